"""Batches are prepared in the background, so many and no more, with an engine put in its place: no Ray."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayloader.epoch import ahead
from rayloader.epoch.ahead import COPIED_AHEAD, AheadThread, Preparation, opened
from rayloader.gpu.to_device import PINNED_AHEAD, PinOrMove
from rayloader.observe.recorder import Tally
from rayloader.protocol import Answer, ResultKind
from rayloader.task import UNOPENED, Task
from rayloader.transport import codec
from rayloader.transport.lanes import SMALL_BYTES, Recycled, read_only_bytes, to_wire

LIMIT_S = 500.0
LARGE = SMALL_BYTES + 8


class Frozen:
    """Owns memory that can't be written to, as Ray's store does."""

    def __init__(self, content: np.ndarray) -> None:
        self.content = content
        self.__array_interface__ = {**content.__array_interface__, "data": (content.ctypes.data, True)}


def result(number: int, nbytes: int = LARGE) -> Answer:
    tensor = torch.full((nbytes,), number, dtype=torch.uint8)
    wire = to_wire(codec.encode(tensor))
    frozen = [memoryview(np.asarray(Frozen(np.array(memoryview(buffer))))) for buffer in wire.buffers]
    return Answer(number, ResultKind.BATCH, wire._replace(buffers=frozen), nbytes=nbytes)


class Engine:
    """What a preparation sees of one: nothing ever comes. Also takes batches, as the user's thread does."""

    is_idle = False
    uses_store = True

    def __init__(self, *, pin=None) -> None:
        self.lock = threading.RLock()
        self.schedule = SimpleNamespace(closed=False, deliverable=deque())
        self.looked = threading.Semaphore(0)
        self.rung = threading.Event()
        self.comes = False  # something, at the next wait
        self.copies = Recycled()
        self.preparation = Preparation(self, PinOrMove(pin, ahead=PINNED_AHEAD), self.copies, Tally())
        self.thread = AheadThread(self.preparation.work, None)

    # ---- for the preparation

    def receive(self, timeout: float, *, ahead: bool) -> bool:
        self.looked.release()
        self.rung.wait(timeout)
        self.rung.clear()
        came, self.comes = self.comes, False
        return came

    def flush(self) -> None:
        pass

    # ---- for the tests

    def wait_until_idle(self) -> None:
        """The thread has prepared what it may."""
        assert self.looked.acquire(timeout=LIMIT_S)

    def deliver(self, *results: Answer) -> None:
        with self.lock:
            self.schedule.deliverable.extend(
                Task(number, None, result=result, nbytes=result.nbytes) for number, result in enumerate(results)
            )
        self.changed()

    def changed(self) -> None:
        self.thread.ring()
        self.rung.set()

    def first(self):
        """The first batch, None if it is not prepared."""
        task = self.schedule.deliverable[0]
        self.thread.check()
        if not self.preparation.is_done(task, task.result):
            return None
        return opened(task, task.result) if task.data is UNOPENED else task.data

    def take(self):
        while (batch := self.first()) is None:
            self.thread.wait(LIMIT_S)
        self.take_back()
        return batch

    def take_back(self) -> None:
        with self.lock:
            self.schedule.deliverable.popleft().result = None
        self.changed()

    def copied(self) -> list[bool]:
        with self.lock:
            return [read_only_bytes(task.result.wire) == 0 for task in self.schedule.deliverable]

    def close(self) -> None:
        with self.lock:
            self.schedule.closed = True
            self.schedule.deliverable.clear()
        self.rung.set()
        self.thread.close(wait=True)
        self.copies.close()


@pytest.fixture
def engine():
    made = []

    def make(**options):
        made.append(Engine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


def test_batches_come_in_order_writable_and_as_they_were(engine):
    running = engine()
    running.thread.start()
    running.deliver(*map(result, range(30)))
    for number in range(30):
        batch = running.take()
        assert batch.eq(number).all()
        batch.add_(1)  # read-only memory would end this process


def test_so_many_are_copied_ahead_and_no_more(engine):
    running = engine()
    running.deliver(*map(result, range(COPIED_AHEAD + 5)))
    running.thread.start()
    running.wait_until_idle()
    assert sum(running.copied()) == COPIED_AHEAD
    running.take()
    running.wait_until_idle()
    while sum(running.copied()) < COPIED_AHEAD:
        assert running.thread.wait(LIMIT_S)
    assert running.copied() == [True] * COPIED_AHEAD + [False] * 4


def test_the_user_is_told_of_what_comes_while_as_many_are_prepared_as_allowed(engine):
    """By then the user may have taken all of them, and wait."""
    running = engine()
    running.deliver(*map(result, range(COPIED_AHEAD)), result(8), result(9))
    running.thread.start()
    running.wait_until_idle()
    while running.thread.wait(0.0):
        pass  # the copies
    running.comes = True
    running.changed()
    assert running.thread.wait(LIMIT_S)


def test_so_many_bytes_are_copied_ahead_but_the_first_always_is(engine, monkeypatch):
    monkeypatch.setattr(ahead, "COPIED_AHEAD_BYTES", 3 * LARGE)
    running = engine()
    running.deliver(*map(result, range(6)))
    running.thread.start()
    running.wait_until_idle()
    assert sum(running.copied()) == 3
    larger = engine()
    larger.deliver(*(result(number, 10 * LARGE) for number in range(3)))
    larger.thread.start()
    larger.wait_until_idle()
    assert sum(larger.copied()) == 1
    assert [int(larger.take()[0]) for _ in range(3)] == [0, 1, 2]


def test_what_was_copied_is_let_go_of_in_the_store(engine):
    running, of_ray = engine(), result(3)
    (owner,) = [weakref.ref(view.obj.base) for view in of_ray.wire.buffers]
    running.deliver(of_ray)
    del of_ray
    assert owner() is not None
    running.thread.start()
    running.wait_until_idle()
    gc.collect()
    assert owner() is None
    assert running.take().eq(3).all()


def test_small_batches_wait_for_no_thread(engine):
    running = engine()
    running.thread.start()
    running.wait_until_idle()
    with running.lock:
        running.schedule.deliverable.append(Task(0, None, result=result(1, SMALL_BYTES)))
    assert running.first().eq(1).all()


def test_at_most_two_are_pinned_ahead(engine):
    running = engine(pin=lambda batch: ("pinned", batch))
    running.deliver(*map(result, range(6)))
    running.thread.start()
    running.wait_until_idle()
    assert [task.data is not UNOPENED for task in running.schedule.deliverable] == [True] * PINNED_AHEAD + [False] * 4
    for number in range(6):
        kind, batch = running.take()
        assert kind == "pinned"
        assert batch.eq(number).all()


class Gate:
    """Holds the thread in the midst of a copy."""

    def __init__(self, copies, monkeypatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        copy = copies.copy

        def held(buffer):
            self.reached.set()
            assert self.open.wait(LIMIT_S)
            return copy(buffer)

        monkeypatch.setattr(copies, "copy", held)


def copying(engine, monkeypatch, *results):
    """An epoch that has come to the copy of its first batch, and what holds that up."""
    running = engine()
    gate = Gate(running.copies, monkeypatch)
    running.deliver(*results)
    running.thread.start()
    assert gate.reached.wait(LIMIT_S)
    return running, gate


def test_a_batch_that_is_taken_back_while_it_is_copied_is_gone(engine, monkeypatch):
    running, gate = copying(engine, monkeypatch, result(1), result(2))
    running.take_back()
    gate.open.set()
    assert running.take().eq(2).all()


def test_the_user_waits_for_a_copy_that_is_under_way(engine, monkeypatch):
    running, gate = copying(engine, monkeypatch, result(1))
    assert running.first() is None
    gate.open.set()
    assert running.take().eq(1).all()


def test_closing_in_the_midst_of_a_copy_ends_the_thread(engine, monkeypatch):
    running, gate = copying(engine, monkeypatch, result(1))
    closing = threading.Thread(target=running.close)
    closing.start()
    gate.open.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()


def test_what_ends_the_thread_is_raised_to_the_user(engine, monkeypatch):
    running = engine()

    def fail(buffer):
        raise MemoryError("as planned")

    monkeypatch.setattr(running.copies, "copy", fail)
    running.deliver(result(1))
    running.thread.start()
    with pytest.raises(MemoryError, match="as planned"):
        running.take()
