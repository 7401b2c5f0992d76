"""Batches are prepared in the background, so many and no more, with tables and workers put in: no Ray."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayloader.epoch import preparing
from rayloader.epoch.messages import Task
from rayloader.epoch.preparing import COPIED_AHEAD, PINNED_AHEAD, Preparer
from rayloader.protocol import Result, ResultKind
from rayloader.transport import codec
from rayloader.transport.lanes import SMALL_BYTES, read_only_bytes, to_wire

LIMIT_S = 30.0
LARGE = SMALL_BYTES + 8


class Workers:
    """In place of the receiver: nothing ever comes; notes that the thread looks."""

    def __init__(self) -> None:
        self.looked = threading.Semaphore(0)
        self.rung = threading.Event()

    def wait(self, timeout: float, *, ahead: bool) -> bool:
        self.looked.release()
        self.rung.wait(timeout)
        self.rung.clear()
        return False

    def take(self) -> None:
        self.looked.release()

    def wait_until_idle(self) -> None:
        """The thread has prepared what it may."""
        assert self.looked.acquire(timeout=LIMIT_S)


class Frozen:
    """Owns memory that can't be written to, as Ray's store does."""

    def __init__(self, content: np.ndarray) -> None:
        self.content = content
        self.__array_interface__ = {**content.__array_interface__, "data": (content.ctypes.data, True)}


def result(number: int, nbytes: int = LARGE) -> Result:
    tensor = torch.full((nbytes,), number, dtype=torch.uint8)
    skeleton, buffers, carried, packed = to_wire(codec.encode(tensor))
    frozen = [memoryview(np.asarray(Frozen(np.array(memoryview(buffer))))) for buffer in buffers]
    return Result(number, ResultKind.BATCH, (skeleton, frozen, carried, packed), nbytes=nbytes)


class Epoch:
    """What a preparer sees of one."""

    def __init__(self, *, copies: bool = True, pin=None) -> None:
        self.workers = Workers()
        self.tables = SimpleNamespace(
            lock=threading.RLock(),
            deliverable=deque(),
            schedule=SimpleNamespace(closed=False),
            crew=SimpleNamespace(ways=SimpleNamespace(copies=copies, uses_store=copies)),
            failure=None,
            is_under_way=True,
            on_change=lambda: None,
            flush=lambda: None,
        )
        self.preparer = Preparer(self.tables, self.workers, pin, None)

    def deliver(self, *results: Result) -> None:
        with self.tables.lock:
            self.tables.deliverable.extend((Task(r.task_id, 0, None), r) for r in results)
        self.changed()

    def changed(self) -> None:
        self.tables.on_change()
        self.workers.rung.set()

    def take(self):
        while (delivery := self.preparer.first()) is None:
            self.preparer.wait(LIMIT_S)
        with self.tables.lock:
            task, _ = self.tables.deliverable.popleft()
            self.preparer.taken(task)
        self.changed()
        return delivery.data

    def copied(self) -> int:
        with self.tables.lock:
            return sum(read_only_bytes(result.wire) == 0 for _, result in self.tables.deliverable)

    def close(self) -> None:
        with self.tables.lock:
            self.tables.schedule.closed = True
            self.tables.deliverable.clear()
        self.workers.rung.set()
        self.preparer.close(wait=True)


@pytest.fixture
def epoch():
    made = []

    def make(**options):
        made.append(Epoch(**options))
        return made[-1]

    yield make
    for epoch in made:
        epoch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


def test_batches_come_in_order_writable_and_as_they_were(epoch):
    running = epoch()
    running.preparer.start()
    running.deliver(*map(result, range(30)))
    for number in range(30):
        batch = running.take()
        assert batch.eq(number).all()
        batch.add_(1)  # read-only memory would end this process


def test_so_many_are_copied_ahead_and_no_more(epoch):
    running = epoch()
    running.deliver(*map(result, range(COPIED_AHEAD + 5)))
    running.preparer.start()
    running.workers.wait_until_idle()
    assert running.copied() == COPIED_AHEAD
    running.take()
    running.workers.wait_until_idle()
    while running.copied() < COPIED_AHEAD:
        assert running.preparer.wait(LIMIT_S)
    waits = [read_only_bytes(result.wire) > 0 for _, result in running.tables.deliverable]
    assert waits == [False] * COPIED_AHEAD + [True] * 4


def test_so_many_bytes_are_copied_ahead_but_the_first_always_is(epoch, monkeypatch):
    monkeypatch.setattr(preparing, "COPIED_AHEAD_BYTES", 3 * LARGE)
    running = epoch()
    running.deliver(*map(result, range(6)))
    running.preparer.start()
    running.workers.wait_until_idle()
    assert running.copied() == 3
    larger = epoch()
    larger.deliver(*(result(number, 10 * LARGE) for number in range(3)))
    larger.preparer.start()
    larger.workers.wait_until_idle()
    assert larger.copied() == 1
    assert [int(larger.take()[0]) for _ in range(3)] == [0, 1, 2]


def test_what_was_copied_is_let_go_of_in_the_store(epoch):
    running, of_ray = epoch(), result(3)
    (owner,) = [weakref.ref(view.obj.base) for view in of_ray.wire[1]]
    running.deliver(of_ray)
    del of_ray
    assert owner() is not None
    running.preparer.start()
    running.workers.wait_until_idle()
    gc.collect()
    assert owner() is None
    assert running.take().eq(3).all()


def test_small_batches_wait_for_no_thread(epoch):
    running = epoch()
    running.preparer.start()
    running.workers.wait_until_idle()
    with running.tables.lock:
        running.tables.deliverable.append((Task(0, 0, None), result(1, SMALL_BYTES)))
    assert running.preparer.first().data.eq(1).all()


def test_where_nothing_is_to_be_done_there_is_no_thread(epoch):
    running = epoch(copies=False)
    running.preparer.start()
    assert not running.preparer.receives
    running.deliver(result(2))
    assert running.take().eq(2).all()
    running.tables.crew.ways.copies = True  # a worker has no local line any more
    running.preparer.start()
    assert running.preparer.receives


def test_an_epoch_that_is_closed_starts_no_thread(epoch):
    running = epoch()
    running.close()
    running.preparer.start()
    assert not running.preparer.receives


def test_at_most_two_are_pinned_ahead(epoch):
    running = epoch(pin=lambda batch: ("pinned", batch))
    running.deliver(*map(result, range(6)))
    running.preparer.start()
    running.workers.wait_until_idle()
    assert len(running.preparer._pinned) == PINNED_AHEAD
    for number in range(6):
        kind, batch = running.take()
        assert kind == "pinned"
        assert batch.eq(number).all()


class Gate:
    """Holds the thread in the midst of a copy."""

    def __init__(self, preparer, monkeypatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        copy = preparer._copies.copy

        def held(buffer):
            self.reached.set()
            assert self.open.wait(LIMIT_S)
            return copy(buffer)

        monkeypatch.setattr(preparer._copies, "copy", held)


def copying(epoch, monkeypatch, *results):
    """An epoch that has come to the copy of its first batch, and what holds that up."""
    running = epoch()
    gate = Gate(running.preparer, monkeypatch)
    running.deliver(*results)
    running.preparer.start()
    assert gate.reached.wait(LIMIT_S)
    return running, gate


def test_a_batch_that_is_taken_back_while_it_is_copied_is_gone(epoch, monkeypatch):
    running, gate = copying(epoch, monkeypatch, result(1), result(2))
    with running.tables.lock:
        running.tables.deliverable.popleft()
        running.preparer.undone(1)
    gate.open.set()
    assert running.take().eq(2).all()


def test_the_user_waits_for_a_copy_that_is_under_way(epoch, monkeypatch):
    running, gate = copying(epoch, monkeypatch, result(1))
    assert running.preparer.first() is None
    gate.open.set()
    assert running.take().eq(1).all()


def test_closing_in_the_midst_of_a_copy_ends_the_thread(epoch, monkeypatch):
    running, gate = copying(epoch, monkeypatch, result(1))
    closing = threading.Thread(target=running.close)
    closing.start()
    gate.open.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()


def test_what_ends_the_thread_is_raised_to_the_user(epoch, monkeypatch):
    running = epoch()

    def fail(buffer):
        raise MemoryError("as planned")

    monkeypatch.setattr(running.preparer._copies, "copy", fail)
    running.deliver(result(1))
    running.preparer.start()
    with pytest.raises(MemoryError, match="as planned"):
        running.take()
