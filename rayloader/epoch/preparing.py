"""Prepares batches between their delivery and the user's call: makes writable copies, or pins them.

Promise: the first deliverable batches, up to a number and a number of bytes, are prepared in `rayloader-ahead`, which
also receives; so the trainer does not wait for a copy that could have been made before. The thread is owned by this
object: it starts when there is something to prepare, and ends with `close`.

Without pinning, only memory is copied here. The batch is assembled in the user's thread, with that thread's default
device and inference mode, as with torch's loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rayloader import skipping
from rayloader._compat import ExceptionWrapper
from rayloader.epoch.ahead import COPIED_AHEAD_BYTES, AheadThread
from rayloader.epoch.messages import Task
from rayloader.epoch.opening import Delivery, opened
from rayloader.epoch.receiver import TICK_S, Receiver
from rayloader.epoch.tables import Tables
from rayloader.protocol import Result
from rayloader.transport import lanes
from rayloader.transport.recycled import Recycled

# How many batches are opened and pinned before the user asks for them.
PINNED_AHEAD = 2
# How many batches are copied out of Ray's object store: enough that a trainer that takes several in a row waits for no
# copy.
COPIED_AHEAD = 8


class Preparer:
    """Prepares the batches of one epoch.

    Args:
        tables: of the epoch.
        receiver: of the epoch.
        pin: pins a batch; None: no pinning.
        device_index: accelerator that the thread works for, if any.
    """

    def __init__(
        self, tables: Tables, receiver: Receiver, pin: Callable[[Any], Any] | None, device_index: int | None
    ) -> None:
        self._tables = tables
        self._receiver = receiver
        self._pin = pin
        self._device_index = device_index
        self._thread: AheadThread | None = None
        self._pinned: dict[int, Delivery] = {}  # by task
        self._copies = Recycled()

    @property
    def receives(self) -> bool:
        """Whether the thread has started: then it waits for the workers, and `wait` waits for the thread."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread, if there is something to prepare; callable more than once."""
        tables = self._tables
        if self._thread is None and (self._pin is not None or tables.crew.ways.copies):
            with tables.lock:
                if not tables.schedule.closed:
                    thread = AheadThread(self._work, self._device_index)
                    tables.on_change = thread.ring
                    self._thread = thread
        if self._thread is not None:
            self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until the thread has done something; returns whether it has."""
        assert self._thread is not None
        return self._thread.wait(timeout)

    def first(self) -> Delivery | None:
        """The next batch as the user gets it; None if it has not come yet. It stays the next until it is `taken`."""
        with self._tables.lock:
            first = self._tables.deliverable[0] if self._tables.deliverable else None
        if first is None:
            return None
        if self._thread is not None:
            self._thread.check()
            if not self._is_prepared(*first):
                return None
        return self._pinned[first[0].task_id] if self._pin is not None else opened(*first)

    def taken(self, task: Task) -> None:
        """The user has taken the batch."""
        self._pinned.pop(task.task_id, None)

    def undone(self, from_task: int) -> None:
        """The tasks from this one on will be built again."""
        self._pinned = {task_id: pinned for task_id, pinned in self._pinned.items() if task_id < from_task}

    @property
    def leased_bytes(self) -> int:
        """Bytes of copies that are ready, or that the user keeps. Any thread may ask."""
        return self._copies.leased_bytes

    def close(self, *, wait: bool) -> None:
        """Ends the thread; with `wait`, waits for its end. Not under the lock of the tables."""
        self._pinned.clear()
        if self._thread is not None:
            self._thread.close(wait=wait)
        self._copies.close()

    # ---- in the thread

    def _work(self) -> bool:
        """Prepares a batch, or waits for one; False if as many are prepared as allowed."""
        tables = self._tables
        with tables.lock:
            if tables.schedule.closed:
                return False
            entry, full = self._next()
            idle = tables.failure is not None or not tables.is_under_way
        if entry is not None:
            self._prepare(*entry)
            return True
        if idle:
            return False
        if full:
            self._receiver.wait(0.0, ahead=True)
            tables.flush()  # the workers' next tasks, because of what has come
            return False
        self._receiver.wait(TICK_S, ahead=True)
        return True

    def _next(self) -> tuple[tuple[Task, Result] | None, bool]:
        """The first batch that may be prepared and is not; and whether only the limit prevents one."""
        most, nbytes = COPIED_AHEAD if self._pin is None else PINNED_AHEAD, 0
        for index, (task, result) in enumerate(self._tables.deliverable):
            nbytes += result.nbytes
            if index == most or (index and nbytes > COPIED_AHEAD_BYTES and self._pin is None):
                return None, self._pin is not None or self._tables.crew.ways.uses_store
            if not self._is_prepared(task, result):
                return (task, result), False
        return None, False

    def _is_prepared(self, task: Task, result: Result) -> bool:
        if self._pin is not None:
            return task.task_id in self._pinned and self._pinned[task.task_id].task is task
        return result.wire is None or lanes.read_only_bytes(result.wire) <= lanes.SMALL_BYTES

    def _prepare(self, task: Task, result: Result) -> None:
        if self._pin is not None:
            delivery = self._opened_and_pinned(task, result, self._pin)
        else:
            assert result.wire is not None
            result = replace(result, wire=lanes.owned(result.wire, self._copies.copy))
        tables = self._tables
        with tables.lock:
            indices = [index for index, (other, _) in enumerate(tables.deliverable) if other is task]
            for index in indices:  # none, if it was taken back meanwhile
                if self._pin is not None:
                    self._pinned[task.task_id] = delivery
                else:
                    tables.deliverable[index] = task, result

    def _opened_and_pinned(self, task: Task, result: Result, pin: Callable[[Any], Any]) -> Delivery:
        delivery = opened(task, result)
        if not isinstance(delivery.data, ExceptionWrapper) and delivery.data is not skipping.NOTHING:
            try:
                delivery.data = pin(delivery.data)
            except Exception:  # a custom pin_memory() may raise anything: it arrives in its turn, as torch's does
                where = f"in pin memory thread for device {self._device_index}"
                delivery.data = ExceptionWrapper(where=where)
        return delivery
