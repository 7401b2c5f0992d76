"""The thread that works ahead, with something to do put in: no accelerator, no Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rayloader.epoch.ahead import AheadThread

HANG_LIMIT_S = 500.0


@pytest.fixture
def ahead_threads() -> Iterator[list[AheadThread]]:
    """Closes what a test made, and proves that no thread is left."""
    made: list[AheadThread] = []
    yield made
    for thread in made:
        thread.close()
    assert not [t for t in threading.enumerate() if t.name == "rayloader-ahead"]


def test_it_does_what_there_is_and_waits_for_the_next_ring(ahead_threads):
    todo, done, idle = [1, 2, 3], [], threading.Event()

    def work() -> bool:
        if todo:
            done.append(todo.pop(0))
            return True
        idle.set()
        return False

    thread = AheadThread(work, None)
    ahead_threads.append(thread)
    thread.start()
    assert idle.wait(HANG_LIMIT_S)
    assert done == [1, 2, 3]
    todo.append(4)
    idle.clear()
    thread.ring()
    assert idle.wait(HANG_LIMIT_S)
    assert done == [1, 2, 3, 4]
    thread.check()


def test_without_the_context_of_its_accelerator_it_ends_with_an_error(ahead_threads, monkeypatch):
    def fail(index: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.accelerator, "set_device_index", fail)
    thread = AheadThread(lambda: False, 0)
    ahead_threads.append(thread)
    thread.start()
    thread._thread.join(HANG_LIMIT_S)
    with pytest.raises(RuntimeError, match="out of memory"):
        thread.check()


def test_an_error_ends_it_and_is_raised_each_time(ahead_threads):
    def work() -> bool:
        raise KeyError("as planned")

    thread = AheadThread(work, None)
    ahead_threads.append(thread)
    thread.start()
    thread._thread.join(HANG_LIMIT_S)
    for _ in range(2):
        with pytest.raises(KeyError):
            thread.check()


def test_close_ends_a_thread_that_waits_and_one_that_works(ahead_threads):
    for busy in (False, True):
        thread = AheadThread(lambda busy=busy: busy, None)
        ahead_threads.append(thread)
        thread.start()
        thread.close()
        assert not thread._thread.is_alive()
        thread.close()
