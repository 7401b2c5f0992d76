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
from rayloader.gpu.to_device import PinOrMove
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
    wire = to_wire(codec.encode(torch.full((nbytes,), number, dtype=torch.uint8)))
    frozen = [memoryview(np.asarray(Frozen(np.array(memoryview(buffer))))) for buffer in wire.buffers]
    return Answer(number, ResultKind.BATCH, wire._replace(buffers=frozen), nbytes=nbytes)


class Engine:
    """What a preparation sees of one: nothing ever comes. Also takes batches, as the user's thread does."""

    is_idle = False
    uses_store = True

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.schedule = SimpleNamespace(closed=False, deliverable=deque())
        self.looked = threading.Semaphore(0)
        self.rung = threading.Event()
        self.comes = False  # something, at the next wait
        self.copies = Recycled()
        self.copying, self.go_on = threading.Event(), threading.Event()

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

    def start(self, *results: Answer) -> Engine:
        """With these results there already."""
        self.preparation = Preparation(self, PinOrMove(), self.copies, Tally())
        self.thread = AheadThread(self.preparation.work, None)
        self.schedule.deliverable.extend(Task(one.task_id, None, result=one, nbytes=one.nbytes) for one in results)
        self.thread.start()
        return self

    def wait_until_idle(self) -> Engine:
        """The thread has prepared what it may."""
        assert self.looked.acquire(timeout=LIMIT_S)
        return self

    def hold_up(self) -> Engine:
        """Has the thread wait in the midst of a copy."""
        copy = self.copies.copy

        def held(buffer):
            self.copying.set()
            assert self.go_on.wait(LIMIT_S)
            return copy(buffer)

        self.copies.copy = held
        return self

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
    engine = Engine()
    yield engine
    engine.close()
    engine.thread.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


@pytest.mark.parametrize(
    ("sizes", "most_bytes", "copied"),
    [
        ([LARGE] * (COPIED_AHEAD + 5), ahead.COPIED_AHEAD_BYTES, COPIED_AHEAD),
        ([LARGE] * 6, 3 * LARGE, 3),
        ([10 * LARGE] * 3, 3 * LARGE, 1),  # the first always is
    ],
)
def test_so_many_are_copied_ahead_and_no_more_and_come_in_order_and_writable(
    engine, monkeypatch, sizes, most_bytes, copied
):
    monkeypatch.setattr(ahead, "COPIED_AHEAD_BYTES", most_bytes)
    engine.start(*(result(number, nbytes) for number, nbytes in enumerate(sizes))).wait_until_idle()
    assert engine.copied() == [number < copied for number in range(len(sizes))]
    engine.take()
    engine.wait_until_idle()
    while sum(engine.copied()) < copied:
        assert engine.thread.wait(LIMIT_S)
    assert engine.copied() == [number < copied for number in range(len(sizes) - 1)]
    for number in range(1, len(sizes)):
        batch = engine.take()
        assert batch.eq(number).all()
        batch.add_(1)  # read-only memory would end this process


def test_the_user_is_told_of_what_comes_while_as_many_are_prepared_as_allowed(engine):
    """By then the user may have taken all of them, and wait."""
    engine.start(*map(result, range(COPIED_AHEAD + 2))).wait_until_idle()
    while engine.thread.wait(0.0):
        pass  # the copies
    engine.comes = True
    engine.changed()
    assert engine.thread.wait(LIMIT_S)


def test_what_was_copied_is_let_go_of_in_the_store(engine):
    of_ray = result(3)
    (owner,) = [weakref.ref(view.obj.base) for view in of_ray.wire.buffers]
    engine.hold_up().start(of_ray)
    del of_ray
    assert owner() is not None
    engine.go_on.set()
    engine.wait_until_idle()
    gc.collect()
    assert owner() is None
    assert engine.take().eq(3).all()


def test_small_batches_wait_for_no_thread_and_large_ones_for_their_copy(engine):
    """A batch may be taken back meanwhile."""
    engine.hold_up().start(result(1), result(2))
    assert engine.copying.wait(LIMIT_S)
    assert engine.first() is None
    engine.take_back()
    engine.go_on.set()
    assert engine.take().eq(2).all()
    engine.wait_until_idle()
    with engine.lock:
        engine.schedule.deliverable.append(Task(0, None, result=result(3, SMALL_BYTES)))
    assert engine.first().eq(3).all()
