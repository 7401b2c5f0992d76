"""Turns results into batches, and the thread that prepares them before the user asks: copies, pins or moves them.

Promise: an `AheadThread` owns one thread, `rayloader-ahead`, from `start` on. It ends when `close` is called, or with
an error, which `check` raises. An exception that a signal handler raises in the user's thread, at any line, leaves
nothing locked. With `Preparation` as its work it prepares the first deliverable batches, up to a number and a number of
bytes, and also receives; so the trainer does not wait for a copy that could have been made before.

Without a `Delivery` that prepares batches, only memory is copied here. The batch is assembled in the user's thread,
with that thread's default device and inference mode, as with torch's loader.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from rayloader import fetching
from rayloader._compat import ExceptionWrapper
from rayloader.epoch.schedule import Schedule
from rayloader.interrupts import TICK_S, Bell, DaemonThread
from rayloader.observe.recorder import Tally
from rayloader.protocol import Answer, Caught, CaughtText, ResultKind
from rayloader.task import UNOPENED, Task
from rayloader.transport import lanes
from rayloader.transport.lanes import Recycled

# How many batches are copied out of Ray's object store: enough that a trainer that takes several in a row waits for no
# copy.
COPIED_AHEAD = 8
# How many bytes of batches are copied, or received, ahead of the user, beyond the first one.
COPIED_AHEAD_BYTES = 64 << 20


class Delivery:
    """What is done to each batch between its worker and the user: here nothing; see `gpu/to_device.py`.

    `prepared` may be called in any thread, the rest in the user's.

    Attributes:
        ahead: how many batches are prepared before the user asks for them.
        device_index: accelerator that batches are prepared for, if any.
        accelerator: for which memory is page-locked, an `Accelerator` of `gpu/device.py`; None without one.
    """

    ahead: int = 0
    device_index: int | None = None
    accelerator: Any = None

    @property
    def prepares(self) -> bool:
        """Whether something is done at all."""
        return False

    def prepared(self, data: Any) -> Any:
        """A batch as `handed_over` takes it; a `Caught` if that has failed."""
        return data

    def keeps(self, data: Any) -> bool:
        """Whether what `prepared` has returned lies in memory of its own, so that the batch's slots are free."""
        return False

    def handed_over(self, data: Any) -> Any:
        """A prepared batch, for the user, or a `Caught`; may be called again, after an interrupt."""
        return data

    def asks(self) -> None:
        """The program asks for a batch."""


class AheadThread:
    """Does the given work in a thread of its own.

    Args:
        work: does one thing, or waits for it; returns False if there is nothing to do before the next ring.
        device_index: accelerator whose context the thread uses, None without one.
    """

    def __init__(self, work: Callable[[], bool], device_index: int | None) -> None:
        self._work = work
        self._device_index = device_index
        self._bell = Bell()  # there may be something to do
        self._done = Bell()  # something was done, or the thread has ended
        self._closed = False
        self._error: BaseException | None = None  # what ended the thread
        self._thread = DaemonThread(self._loop, "rayloader-ahead")

    def start(self) -> None:
        """Starts the thread, if it has not been started; see `DaemonThread`."""
        self._thread.start()

    def ring(self) -> None:
        """Tells the thread that there may be something to do."""
        self._bell.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something was done; returns whether it was."""
        return self._done.wait(timeout)

    def check(self) -> None:
        """Raises the error that has ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread, and waits for it."""
        self._closed = True
        self._bell.ring()
        self._done.ring()
        if wait and threading.current_thread() is not self._thread:  # the garbage collector may run this there
            self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(1)  # for this thread only: a copy into pinned memory must not take every core
        try:
            if self._device_index is not None:
                torch.accelerator.set_device_index(self._device_index)
            while not self._closed:
                if self._work():
                    self._done.ring()
                else:
                    self._bell.wait(TICK_S)
        except BaseException as error:  # any error: the user's thread raises it
            self._error = error
            self._done.ring()


class Receives(Protocol):
    """What a `Preparation` needs of the engine of its epoch."""

    schedule: Schedule

    @property
    def lock(self) -> threading.RLock:
        """Guards the schedule."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing will come."""

    @property
    def uses_store(self) -> bool:
        """Whether some batches come through Ray's object store."""

    def receive(self, timeout: float, *, ahead: bool) -> bool:
        """Waits for `timeout` seconds at most until something has come, and handles it."""

    def flush(self) -> None:
        """Sends the messages to the workers."""


class Preparation:
    """Prepares the batches of one epoch, in an `AheadThread`.

    Args:
        engine: of the epoch.
        delivery: what is done to batches; if nothing, they are only copied.
        copies: memory for copies.
        tally: counts what is page-locked.

    Attributes:
        locked_at: when memory was page-locked for a batch last, as of `time.monotonic`; infinite while that goes on.
    """

    def __init__(self, engine: Receives, delivery: Delivery, copies: Recycled, tally: Tally) -> None:
        self._engine = engine
        self._delivery = delivery
        self._copies = copies
        self._tally = tally
        self.locked_at = 0.0

    def is_done(self, task: Task, result: Answer) -> bool:
        """Whether a deliverable batch is prepared."""
        if self._delivery.prepares:
            return task.data is not UNOPENED
        return result.wire is None or lanes.read_only_bytes(result.wire) <= lanes.SMALL_BYTES

    def work(self) -> bool:
        """Prepares a batch, or waits for one; False if nothing came, and as many are prepared as allowed."""
        engine = self._engine
        with engine.lock:
            if engine.schedule.closed:
                return False
            task, full = self._next()
            result: Any = None if task is None else task.result
            idle = engine.is_idle
        if task is not None:
            self._prepare(task, result)
            return True
        if idle:
            return False
        came = engine.receive(0.0 if full else TICK_S, ahead=True)
        if full:
            engine.flush()  # the workers' next tasks, because of what has come
        return came or not full  # the user may have taken all that was prepared meanwhile, and wait for what has come

    def _next(self) -> tuple[Task | None, bool]:
        """The first batch that may be prepared and is not; and whether only the limit prevents one."""
        prepares, nbytes = self._delivery.prepares, 0
        most = self._delivery.ahead if prepares else COPIED_AHEAD
        for index, task in enumerate(self._engine.schedule.deliverable):
            nbytes += task.nbytes
            if index == most or (index and nbytes > COPIED_AHEAD_BYTES and not prepares):
                return None, prepares or self._engine.uses_store
            if not self.is_done(task, task.result):
                return task, False
        return None, False

    def _prepare(self, task: Task, result: Answer) -> None:
        if result.wire is not None:
            result = replace(result, wire=lanes.owned(result.wire, self._copies.copy))
        data = self._opened_and_prepared(task, result) if self._delivery.prepares else UNOPENED
        if self._delivery.keeps(data):
            result = replace(result, wire=None)  # so that its slots are free when they were copied
        with self._engine.lock:
            if task.result is not None:  # otherwise the epoch was closed meanwhile
                task.data, task.result = data, result

    def _opened_and_prepared(self, task: Task, result: Answer) -> Any:
        if result.wire is not None and self._delivery.accelerator is not None:
            began, self.locked_at = time.perf_counter(), math.inf
            locked, all_is_locked = lanes.page_lock(result.wire)
            self._tally.page_locked += all_is_locked
            if locked:
                self._tally.locked_bytes += locked
                self._tally.locking += time.perf_counter() - began
            self.locked_at = time.monotonic()
        data = opened(task, result)
        if isinstance(data, ExceptionWrapper) or data is fetching.NOTHING:
            return data
        return self._delivery.prepared(data)


def opened(task: Task, result: Answer) -> Any:
    """The batch, or a `Caught`, also if it can't be unpickled; `fetching.NOTHING` if all was skipped."""
    data = _opened(task, result)
    if result.kind == ResultKind.ERROR:
        data.sample = result.sample
    return data


def _opened(task: Task, result: Answer) -> Any:
    if result.kind == ResultKind.EMPTY:
        return fetching.NOTHING
    if result.wire is None:
        return CaughtText(result.text)
    try:
        return lanes.from_wire(result.wire)
    except Exception as error:  # the user's own unpickling may raise anything, and so may a signal handler here
        if threading.current_thread() is threading.main_thread() and _opens(result.wire):
            raise  # from a signal handler: the batch is still the next one, see NOTE [interrupts] in interrupts.py
        if result.kind == ResultKind.ERROR:
            return CaughtText(result.text)
        return Caught(error, f"unpickling a batch of DataLoader worker process {task.worker_id}")


def _opens(wire: lanes.Wire) -> bool:
    try:
        lanes.from_wire(wire)
    except Exception:  # the user's own unpickling, again
        return False
    return True
