"""The tasks and results of one epoch: events go into the schedule here, and its commands are carried out.

Promise: decides nothing. All changes of the tables happen under one lock, and are marked at their beginning and end.

NOTE [interrupts]
In the main thread a signal handler, for instance that of Ctrl-C, may raise at almost any line. Six rules keep `next()`
correct:
1. A batch remains the next one until `EpochIterator.__next__` notes, in its very last step, that the user has it
   (`Position.handed`). CPython runs handlers when a call returns, when a function is entered and in loops, and between
   that note and the user there is none of these. Everything before may be repeated, or is marked as done.
2. Changes of the tables are marked before and after (`changes`). If a foreign exception interrupts one, the epoch is
   `broken`: `next()` says so, and the next `iter()` starts with fresh workers. The position is right nevertheless,
   because it counts only batches that were handed over.
3. Locks that the user's thread takes are implemented in C, and waits are one call of `select.poll`.
4. No generator is left before its end, by `any` or `next` for instance: an exception that a handler raises while Python
   closes it is printed and dropped. That is why lists are used where generators would do.
5. An exception from opening a batch is attributed to the data only if opening it again raises as well. In `__del__`
   Python prints and drops a handler's exception, as it does everywhere.
6. An `Exception` raised while the sampler draws counts as the sampler's, because a handler's cannot be told from it. It
   takes the place of a batch, as with torch's loader, which is why handlers should raise a `BaseException`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rayloader.epoch.messages import (
    BatchTaken,
    Deliver,
    DrawIndices,
    Drop,
    Event,
    Fail,
    Forget,
    ReplaceWorker,
    Submit,
    Task,
    TaskDone,
)
from rayloader.epoch.opening import describe
from rayloader.epoch.schedule import Schedule
from rayloader.errors import RayloaderError, WorkerDiedError, add_note
from rayloader.observe.recorder import Tally
from rayloader.protocol import Result
from rayloader.resume.journal import Told
from rayloader.workers.channel import ActorLost
from rayloader.workers.crew import Crew
from rayloader.workers.worker_slot import Call, WorkerSlot

logger = logging.getLogger("rayloader")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def changes(method: _Method) -> _Method:
    """Marks a method of `Tables`, or of an object with `tables`, that changes them; see NOTE [interrupts]."""

    @functools.wraps(method)
    def change(self: Any, *args: Any, **named: Any) -> Any:
        tables: Tables = self if type(self) is Tables else self.tables
        with tables.lock:
            tables.begun += 1
            try:
                result = method(self, *args, **named)
            except BaseException as error:
                ours = isinstance(error, (RayloaderError, ActorLost))
                if ours or threading.current_thread() is not threading.main_thread():
                    tables.ended += 1  # no interrupt: no change was left half done
                raise
            tables.ended += 1
            return result

    return change  # type: ignore[return-value]


class Tables:
    """The tables of one epoch.

    Args:
        crew: carries out the commands.
        schedule: gives them.
        lock: guards all of this.
        tally: counts what happens.

    Attributes:
        slots: of the crew's workers.
        unanswered: tasks that were submitted, and neither answered nor forgotten.
        results: not delivered, by task.
        deliverable: delivered and not taken, in that order.
        unsent: tasks given to workers since the last `flush`.
        failure: the error that ends the epoch once all deliverable batches were taken.
        on_change: called after each change.
    """

    def __init__(self, crew: Crew, schedule: Schedule, lock: threading.RLock, tally: Tally) -> None:
        self.crew = crew
        self.slots = crew.slots
        self.schedule = schedule
        self.lock = lock
        self.tally = tally
        self.begun = self.ended = 0  # changes
        self.unanswered: set[int] = set()
        self.results: dict[int, Result] = {}
        self.deliverable: deque[tuple[Task, Result]] = deque()
        self.unsent: list[int] = []
        self.failure: WorkerDiedError | None = None
        self.on_change: Callable[[], None] | None = None
        for slot in self.slots:
            slot.drop_calls()
            slot.dropped = None
            slot.allowance = None

    @property
    def broken(self) -> bool:
        """Whether a change was interrupted."""
        if self.ended == self.begun:  # in this order: a change that another thread ends meanwhile hides none
            return False
        with self.lock:
            return self.begun != self.ended

    @property
    def is_under_way(self) -> bool:
        """Whether the workers still have something to send."""
        return bool([slot for slot in self.slots if slot.calls] or self.crew.moving.awaited)

    @property
    def untaken(self) -> list[Result]:
        """The results that have come, and were not taken. Any thread may ask."""
        return [*list(self.results.values()), *[result for _, result in self.deliverable.copy()]]

    @changes
    def handle(self, event: Event) -> None:
        """Reports an event to the schedule, and carries out its commands."""
        self.take_in(event)

    def take_in(self, event: Event) -> None:
        """Does the work of `handle`, as a part of a change."""
        for command in self.schedule.handle(event):
            match command:
                case Submit(task):
                    self._submit(task)
                case Deliver(task):
                    self.deliverable.append((task, self.results.pop(task.task_id)))
                case DrawIndices():
                    pass  # owed: only the user's thread may draw from the sampler
                case Forget(task_ids):
                    for task_id in task_ids:
                        self.unanswered.discard(task_id)
                        self.results.pop(task_id, None)
                        for slot in self.slots:
                            self._gone(slot, task_id)
                case Drop(worker_id, first_task_id):
                    slot = self.slots[worker_id]
                    self.crew.drop(slot, first_task_id)
                    slot.dropped = first_task_id
                case ReplaceWorker(worker_id, cause):
                    if self.crew.moving.replace(self.slots[worker_id]):
                        self.tally.restarts += 1
                        text = _briefly(cause)
                        logger.warning("rayloader: worker %d is lost and gets another process: %s", worker_id, text)
                case Fail():
                    self.failure = self._worker_died(command)
        if self.on_change is not None:
            self.on_change()

    @changes
    def flush(self) -> None:
        """Sends the messages to the workers."""
        self.unsent.clear()
        self.crew.flush()

    def taken(self, task: Task) -> None:
        """The user has taken the task's batch; as a part of a change."""
        slot = self.slots[task.worker_id]
        self.take_in(BatchTaken(task.task_id))
        self._gone(slot, task.task_id)
        self.feed(slot)

    def answered(self, slot: WorkerSlot, result: Result) -> None:
        """A worker has built a task's batch; as a part of a change."""
        self.results[result.task_id] = result
        if slot.allowance is not None:
            slot.allowance.answered(result.task_id, result.nbytes)
        self.take_in(TaskDone(result.task_id))
        self.unanswered.discard(result.task_id)

    def feed(self, slot: WorkerSlot) -> None:
        """Gives a worker its waiting tasks, as far as its allowance permits; see NOTE [bytes] in allowance.py."""
        while slot.waiting and (slot.allowance is None or slot.allowance.allows(slot.unanswered)):
            self.run(slot, slot.waiting.popleft())

    def run(self, slot: WorkerSlot, told: Told) -> None:
        """Makes a worker build a task's batch."""
        self.unsent.append(told.task_id)
        lent = self.crew.run(slot, told)
        slot.calls.append(Call(slot.host, slot.host.calls, told.task_id, lent))

    def _gone(self, slot: WorkerSlot, task_id: int) -> None:
        if slot.allowance is not None:
            slot.allowance.gone(task_id)

    def replay(self, slot: WorkerSlot, tasks: list[Told]) -> None:
        """Makes a worker rebuild tasks."""
        self.crew.replay(slot, tasks)
        slot.calls.append(Call(slot.host, slot.host.calls, None, None))

    def run_unanswered(self, slot: WorkerSlot) -> None:
        """Gives a worker all tasks that it owes."""
        slot.waiting = deque(told for told in slot.journal.tasks if told.task_id in self.unanswered)
        self.feed(slot)

    def _submit(self, task: Task) -> None:
        slot, told = self.slots[task.worker_id], Told(task.task_id, task.indices.encoded)
        slot.journal.told(told)
        self.unanswered.add(task.task_id)
        if not slot.away and slot.replay is None:
            slot.waiting.append(told)
            self.feed(slot)

    def describe(self, task: Task) -> str:
        """Names batch, worker and indices."""
        return describe(task, None if task.is_anybodys else self.crew.address(self.slots[task.worker_id]))

    def _worker_died(self, fail: Fail) -> WorkerDiedError:
        address = self.crew.address(self.slots[fail.worker_id])
        process, node = (f"(pid(s) {address.pid})", f" on {address.hostname}") if address else ("(not started)", "")
        error = WorkerDiedError(
            f"DataLoader worker {process} exited unexpectedly: worker {fail.worker_id}{node}. Cause: {fail.cause}",
            fail.worker_id,
        )
        if fail.task is not None:
            add_note(error, self.describe(fail.task))
        return error


def _briefly(cause: str) -> str:
    """Of a traceback, the error at its end."""
    return cause.rstrip().splitlines()[-1] if "Traceback" in cause else cause
