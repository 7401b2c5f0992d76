"""Threads that a signal handler may interrupt: how they start and end, and the one that ends what finalizers leave."""

import functools
import gc
import itertools
import os
import threading
import weakref
from pathlib import Path

import pytest

from handlers import interrupted
from rayloader import interrupts
from rayloader.transport import memory_file
from rayloader.workers import janitor as module
from rayloader.workers.janitor import Janitor

FILES = {threading.__file__, interrupts.__file__, module.__file__}
HANG_LIMIT = 500.0  # seconds; on expiry the test fails


def use(janitor, done):
    """As the next one who waits for it."""
    janitor.start()
    janitor.do(lambda: janitor.do(lambda: done.append(threading.current_thread().name)))
    janitor.end()


def end_and_use(janitor, done):
    """It is told twice to end, which does not end the next one."""
    janitor.end()
    use(janitor, done)


def end(janitor, done):
    """As a program that ends then."""
    janitor.later(lambda: done.append(threading.current_thread().name))
    janitor.end()


@pytest.mark.parametrize(
    ("method", "after"), [*itertools.product(["wait", "start", "first start"], [use, end]), ("end", end_and_use)]
)
def test_an_interrupt_at_any_moment_hangs_nobody_and_leaves_no_second_thread(method, after):
    others = threading.enumerate()  # the loaders' own may be among them
    for number in itertools.count():
        janitor = Janitor(lambda: None)
        if method != "first start":
            janitor.start()
            janitor.wait()
        fired = interrupted(FILES, number, getattr(janitor, method.split()[-1]))
        if after is end and janitor._thread is None:
            continue
        done = []
        user = threading.Thread(target=after, args=(janitor, done), daemon=True)
        user.start()
        user.join(HANG_LIMIT)
        assert done == ["rayloader-janitor"], number
        assert not user.is_alive(), number
        new = [thread.name for thread in threading.enumerate() if thread not in others]
        assert "rayloader-janitor" not in new, number
        if not fired:
            break
    assert number > 1


def keep(made, make):
    made.append(make())


@pytest.mark.parametrize("make", [interrupts.Waker, lambda: memory_file.MemoryFile("test", 4096)])
def test_an_interrupt_loses_no_descriptor(make):
    for number in itertools.count():
        before, made = os.listdir("/proc/self/fd"), []
        fired = interrupted({interrupts.__file__, memory_file.__file__}, number, functools.partial(keep, made, make))
        made.clear()
        assert os.listdir("/proc/self/fd") == before, number
        if not fired:
            break
    assert number > 1


def test_a_thread_does_its_work_once_however_often_it_is_started_and_an_interrupted_join_may_be_called_again():
    for number in itertools.count():
        go, done = interrupts.Bell(), []
        thread = interrupts.DaemonThread(lambda go=go, done=done: done.append(go.wait(HANG_LIMIT)), "works")
        thread.join()  # does not wait for what has not begun
        for _ in range(3):
            thread.start()
        thread.join(0.01)
        assert thread.is_alive()
        go.ring()
        fired = interrupted(FILES, number, thread.join)
        thread.join()
        thread.start()
        assert len(done) == 1
        assert not thread.is_alive(), number
        assert thread not in threading.enumerate(), number
        if not fired:
            break
    assert number > 1


def test_a_thread_that_was_given_up_in_time_never_begins():
    thread = interrupts.DaemonThread(pytest.fail, "works")
    assert thread.give_up()
    thread._start_here()  # as after an interrupt, of whom had called for it
    thread.start()
    thread.join()
    assert not thread.is_alive()
    assert thread.spent
    assert not thread.give_up()


def test_a_thread_that_cannot_be_started_says_so_and_may_be_started_later(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    done = []
    thread = interrupts.DaemonThread(lambda: done.append(1), "works")
    with monkeypatch.context() as patched:
        for name in "_start_new_thread", "_start_joinable_thread":  # the second from Python 3.13 on
            patched.setattr(threading, name, refuse, raising=False)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.start()
    assert not thread.is_alive()
    thread.start()
    thread.join()
    assert done == [1]


def test_a_fork_keeps_what_its_parents_jobs_hold():
    """It may be Ray's, which must not be called there."""
    held = threading.Event()
    alive = weakref.ref(held)
    janitor = Janitor()
    janitor.later(functools.partial(id, held))
    del held
    janitor.forget()
    janitor.forget()  # a fork of the fork
    assert alive() is not None


def test_a_waker_that_the_collector_finalizes_is_closed_by_the_thread_that_may_still_ring_it():
    jobs = []
    waker = interrupts.Waker(jobs.append)
    descriptors = [Path(f"/proc/self/fd/{descriptor}") for descriptor in waker._fds]
    waker.me = waker
    del waker
    gc.collect()
    assert all(map(Path.is_symlink, descriptors))
    (close,) = jobs
    close()
    assert not any(map(Path.is_symlink, descriptors))
