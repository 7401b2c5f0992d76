"""The driver's schedule: which worker builds which batch, and which batch is delivered next.

Promise: a pure state machine. Standard library only; no Ray, no torch, no clock, no thread, no I/O. Two
rules govern it:

1. Everything that happened comes in through `Schedule.handle` as an event; what is to be done with workers goes out in
   the list of commands that it returns, what is to be drawn and delivered stands in `owed_draws` and `deliverable`.
   Nothing else changes the state.
2. A task's state changes only along `TRANSITIONS` (messages.py), and its record is the only one: what is unanswered,
   waits, is ready or on its way to the user is written down here and nowhere else.

It runs under its caller's lock. The assignment of tasks to workers is torch's (see NOTE [round-robin]),
because the workers' random streams, and with them random augmentation, depend on it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayloader.epoch.messages import (
    TRANSITIONS,
    BatchTaken,
    Closed,
    Command,
    Event,
    Fail,
    IndicesDrawn,
    IndicesSkipped,
    Opened,
    ReplaceWorker,
    SamplerExhausted,
    SamplerFailed,
    Submit,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)
from rayloader.task import ANY_WORKER, DELIVERED, GONE, LOST, OUTSTANDING, QUEUED, READY, Task

# NOTE [round-robin]
# Map-style: task i goes to worker i mod W. Iterable: to the next worker in the cycle that is not exhausted. Without
# order (`in_order=False`) a worker is passed over while it holds its share of the window. At most `prefetch_factor`
# tasks per worker are in the table, W * prefetch_factor in all: they are drawn when the epoch opens, then one
# for each batch that is taken, which is when torch draws. In order, an exhausted worker's places in
# the window are dropped, so the others keep their own limit. Without order the others' shares grow (torch's rule), and
# the places are drawn again: otherwise the last worker could be left without a task, and with nothing to take nothing
# would ever be drawn. In order, a task that is left out keeps its worker's turn: for a while another worker may have
# one more than its share, but all together never more than the window.
#
# NOTE [waiting]
# A task that is assigned waits until its worker has a process that may be given tasks (`WorkerReady`).
#
# NOTE [dynamic]
# If batches do not depend on their worker, tasks queue for any worker: the one with the fewest gets the next ones,
# so that a slow sample delays only what its worker has been given. A worker gets this many before it has
# answered: the one in progress, and the next.
AHEAD = 2
#
# NOTE [blame]
# The cause of a death is not known: Ray reports a crash in the task and a kill from outside in the same way. So a
# worker may die `max_restarts` times in a row without finishing anything, whatever it was doing; one more death ends
# the epoch. Whatever `max_restarts` is, a task that was running at this many deaths ends the epoch:
DEATHS = 5
# If the process itself reported that the task ended it (SystemExit), so that chance has no part in it, so does a task
# with this many:
KILLS = 2

# How many events an error shows.
RECENT_EVENTS = 20


@dataclass(slots=True)
class _Worker:
    """What events have said of a worker.

    Attributes:
        active: its stream has not ended, and it is not lost for good.
        ready: it has a process that may be given tasks.
        held: number of its tasks in the table.
        waiting: those that it will be given: QUEUED or LOST, in order.
        unanswered: those that it was given and has not answered: OUTSTANDING, oldest first.
        restarts: since it last finished a task.
    """

    active: bool = True
    ready: bool = False
    held: int = 0
    waiting: deque[Task] = field(default_factory=deque)
    unanswered: deque[Task] = field(default_factory=deque)
    restarts: int = 0


class Schedule:
    """The ordered task table of one epoch.

    Args:
        num_workers: number of workers, at least 1.
        prefetch_factor: tasks per worker submitted and not yet taken by the user, at least 1.
        in_order: deliver in task order; otherwise as tasks finish.
        dynamic: any worker may take the next task (map-style datasets only).
        max_restarts: how often in a row a worker that has not finished a task is replaced.
        first_task_id: where the epoch continues: the tasks before it are done.
        first_worker_id: which worker's turn it is.
        only_worker_id: the only worker that gets tasks; None: all do.

    Attributes:
        deliverable: tasks that are DELIVERED, in the order in which the user gets them.
        early: number of tasks that are READY: their batches have come before their turn.
        owed_draws: how often the user's thread is to draw from the sampler, and to report what came of it.
        taken: number of batches that the user has, including skipped ones.
        closed: whether the epoch is over for its user.
    """

    def __init__(
        self,
        num_workers: int,
        prefetch_factor: int,
        *,
        in_order: bool = True,
        dynamic: bool = False,
        max_restarts: int = 0,
        first_task_id: int = 0,
        first_worker_id: int = 0,
        only_worker_id: int | None = None,
    ) -> None:
        self.in_order = in_order
        self.dynamic = dynamic
        self._prefetch_factor = prefetch_factor
        self._max_restarts = max_restarts
        self._workers = [_Worker() for _ in range(num_workers)]
        self._num_active = num_workers
        for worker_id, worker in enumerate(self._workers):
            self._set_active(worker, only_worker_id in (None, worker_id))
        self._kills: dict[int, int] = {}  # by task
        self._queued: deque[Task] = deque()  # see NOTE [dynamic]
        self._tasks: dict[int, Task] = {}  # in task order
        self.deliverable: deque[Task] = deque()
        self.early = 0
        self._head_id = first_task_id  # no task below it is undelivered
        self._next_task_id = first_task_id
        self._next_worker_id = first_worker_id
        self.owed_draws = 0
        self.taken = first_task_id
        self._opened = False
        self._sampler_exhausted = False
        self._failed = False  # whether a worker is permanently lost
        self.closed = False
        self._finished = False  # as it was when the epoch was closed
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)

    @property
    def window(self) -> int:
        """Tasks that may be in the table, of all workers together."""
        return self._prefetch_factor * len(self._workers)

    @property
    def head(self) -> Task | None:
        """The lowest undelivered task, None if there is none."""
        while self._head_id < self._next_task_id:
            task = self._tasks.get(self._head_id)
            if task is not None and task.state is not DELIVERED:
                return task
            self._head_id += 1
        return None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task table, in task order."""
        return tuple(self._tasks.values())

    @property
    def outstanding(self) -> tuple[Task, ...]:
        """Tasks without an answer, in task order, including those that wait."""
        return tuple(task for task in self._tasks.values() if task.state in (QUEUED, OUTSTANDING, LOST))

    @property
    def untaken(self) -> list[Task]:
        """The tasks whose batches have come, and were not taken. Any thread may ask."""
        return [task for task in list(self._tasks.values()) if task.state in (READY, DELIVERED)]

    def unanswered(self, worker_id: int) -> deque[Task]:
        """The tasks that a worker was given and has not answered, oldest first. Not to be changed."""
        return self._workers[worker_id].unanswered

    @property
    def finished(self) -> bool:
        """Whether all batches have been taken. An epoch that is closed before that will never be finished."""
        return self._finished if self.closed else (self._opened and not self._tasks and not self.owed_draws)

    def handle(self, event: Event) -> list[Command]:
        """Takes an event, and returns what is to be done, in order.

        Raises:
            RuntimeError: the event contradicts the state (a fault of the caller).
        """
        if self.closed:
            return []  # late news of a closed epoch
        self._recent.append(event)
        return _HANDLERS[type(event)](self, event)

    def _history(self) -> str:
        return f"the last events: {', '.join(map(repr, self._recent))}"

    # ---- drawing and assigning

    def _open(self, event: Opened) -> list[Command]:
        self._opened = True
        self._draw(self.window)
        return []

    def _draw(self, count: int) -> None:
        if self._num_active and not self._sampler_exhausted:
            self.owed_draws += count

    def _settle_draw(self, event: Event) -> bool:
        """Notes that a draw was reported; whether it counts: an epoch that has failed meanwhile wants no more."""
        if self._failed:
            return False
        if not self.owed_draws:
            raise RuntimeError(f"{event} reports a draw that was not asked for; {self._history()}")
        self.owed_draws -= 1
        return True

    def _assign(self, event: IndicesDrawn) -> list[Command]:
        if not self._settle_draw(event):
            return []
        worker_id = ANY_WORKER if self.dynamic else self._next_with_room()
        if worker_id is None:  # all are exhausted: these indices stand for no sample (iterable datasets only)
            return []
        task = Task(self._next_task_id, event.indices)
        self._next_task_id += 1
        self._tasks[task.task_id] = task
        if worker_id == ANY_WORKER:
            self._queued.append(task)
            return self._feed_any()
        worker = self._workers[worker_id]
        task.worker_id = worker_id
        worker.held += 1
        worker.waiting.append(task)
        return self._feed(worker)

    def _skip(self, event: IndicesSkipped) -> list[Command]:
        if not self._settle_draw(event):
            return []
        self._next_task_id += 1
        self.taken += 1
        if self.in_order and not self.dynamic:
            self._next_with_room()  # it would have been this worker's; the others' tasks stay theirs
        self._draw(1)
        return []

    def _next_with_room(self) -> int | None:
        num_workers = len(self._workers)
        for step in range(num_workers):
            worker_id = (self._next_worker_id + step) % num_workers
            if self._workers[worker_id].active and (self.in_order or self._has_share(worker_id)):
                self._next_worker_id = (worker_id + 1) % num_workers
                return worker_id
        return None

    def _has_share(self, worker_id: int) -> bool:
        return self._workers[worker_id].held < self.window // self._num_active

    def _set_active(self, worker: _Worker, active: bool) -> None:
        self._num_active += active - worker.active
        worker.active = active

    def _feed(self, worker: _Worker) -> list[Command]:
        """Submits what waits for a worker, if it has a process."""
        commands: list[Command] = []
        while worker.waiting and worker.ready:
            commands.append(self._submit(worker.waiting.popleft(), worker))
        return commands

    def _submit(self, task: Task, worker: _Worker) -> Submit:
        worker.unanswered.append(task)
        self._move(task, Submit)
        return Submit(task)

    def _feed_any(self) -> list[Command]:
        """See NOTE [dynamic]."""
        commands: list[Command] = []
        while self._queued and (worker_id := self._freest()) is not None:
            task, worker = self._queued.popleft(), self._workers[worker_id]
            task.worker_id = worker_id
            worker.held += 1
            commands.append(self._submit(task, worker))
        return commands

    def _freest(self) -> int | None:
        """The worker that has the fewest tasks to answer, of those that may be given more."""
        freest, fewest = None, math.inf
        for worker_id, worker in enumerate(self._workers):
            count = len(worker.unanswered)
            if count < fewest and worker.active and count < AHEAD and worker.ready:
                freest, fewest = worker_id, count
        return freest

    def _sampler_ended(self, event: SamplerExhausted) -> list[Command]:
        self._sampler_exhausted = True
        self.owed_draws = 0
        return []

    def _sampler_failed(self, event: SamplerFailed) -> list[Command]:
        self._settle_draw(event)
        return []

    # ---- delivering

    def _done(self, event: TaskDone) -> list[Command]:
        """Ignores a task that was dropped meanwhile, or answered before: reporting it twice does no harm."""
        result, event.result = event.result, None  # the history must not keep a batch's memory
        task = self._tasks.get(event.task_id)
        if task is None or task.state is not OUTSTANDING:
            return []
        worker = self._workers[task.worker_id]
        task.result, task.nbytes = result, event.nbytes
        self._move(task, TaskDone)
        worker.restarts = 0
        if self.in_order:
            self._deliver_ready(TaskDone)
        else:
            self._deliver(task, TaskDone)
        return self._feed_any() if self._queued else []

    def _deliver_ready(self, step: type) -> None:
        """Delivers from the head on, up to the first task that is not ready."""
        while (head := self.head) is not None and head.state is READY:
            self._deliver(head, step)

    def _deliver(self, task: Task, step: type) -> None:
        self._move(task, step)
        self.deliverable.append(task)

    def _taken(self, event: BatchTaken) -> list[Command]:
        task = self._tasks.get(event.task_id)
        if task is None:
            raise RuntimeError(f"{event} names a task that is not in the table; {self._history()}")
        self._move(task, BatchTaken)
        self.deliverable.remove(task)  # nearly always the first
        self.taken += 1
        if not self.in_order or self._workers[task.worker_id].active:
            self._draw(1)
        return []

    # ---- ends

    def _worker_exhausted(self, event: WorkerExhausted) -> list[Command]:
        """A worker's answers may be reported in any order: its tasks before this one may still bring batches."""
        if event.task_id not in self._tasks:
            return []
        worker_id = self._tasks[event.task_id].worker_id
        worker = self._workers[worker_id]
        self._set_active(worker, False)
        dropped = [t for t in self.outstanding if t.worker_id == worker_id and t.task_id >= event.task_id]
        for task in dropped:
            self._move(task, WorkerExhausted)
        worker.waiting = _not_gone(worker.waiting)
        if self.in_order:
            self._deliver_ready(WorkerExhausted)
        else:
            self._draw(len(dropped))
        return []

    def _worker_lost(self, event: WorkerLost) -> list[Command]:
        """See NOTE [blame]."""
        worker_id, worker = event.worker_id, self._workers[event.worker_id]
        if self._failed or not (worker.unanswered or worker.waiting or worker.active):
            return []  # reported before, or its work was done
        worker.ready = False
        lost = list(worker.unanswered)
        for task in lost:
            self._move(task, WorkerLost)
        worker.waiting.extendleft(reversed(lost))
        suspect = self._tasks.get(event.suspect) if event.suspect is not None else None
        if not event.blameless:
            worker.restarts += 1
        if suspect is not None:
            self._kills[suspect.task_id] = self._kills.get(suspect.task_id, 0) + 1
        hopeless = suspect is not None and self._kills[suspect.task_id] >= (KILLS if event.admitted else DEATHS)
        if hopeless or worker.restarts > self._max_restarts:
            self._failed = True
            self._set_active(worker, False)
            self._sampler_exhausted, self.owed_draws = True, 0  # the epoch ends with the batches that have come
            return [Fail(worker_id, event.cause, suspect or next(iter(worker.waiting), None))]
        return [ReplaceWorker(worker_id, event.cause)]

    def _worker_ready(self, event: WorkerReady) -> list[Command]:
        worker = self._workers[event.worker_id]
        worker.ready = True
        return self._feed(worker) + self._feed_any()

    def _close(self, event: Closed) -> list[Command]:
        """Works in any state, even one that Ctrl-C left half changed."""
        self._finished = self.finished
        commands: list[Command] = []
        if event.resuming:  # as torch's, the workers build all that they were to be given; their journals have it
            commands += [self._submit(task, worker) for worker in self._workers for task in worker.waiting]
        for task in self.tasks:
            self._move(task, Closed)
        self._queued.clear()
        self.deliverable.clear()
        for worker in self._workers:
            worker.waiting.clear()
            worker.unanswered.clear()
        self.closed = True
        self.owed_draws = 0
        return commands

    def _move(self, task: Task, step: type) -> None:
        """Changes a task's state, and what its worker's record says of it.

        In an order that can be closed wherever Ctrl-C strikes: the table holds nothing that is GONE.
        """
        before = task.state
        try:
            state = TRANSITIONS[before][step]
        except KeyError:
            raise RuntimeError(
                f"{step.__name__} cannot happen to {task}, see TRANSITIONS in messages.py; what has happened to it: "
                f"{', '.join(past.__name__ for past in task.steps) or 'nothing'}; {self._history()}"
            ) from None
        task.steps.append(step)
        if state is GONE:
            if task.worker_id != ANY_WORKER:
                self._workers[task.worker_id].held -= 1
            task.result = None
            del self._tasks[task.task_id]
        self.early += (state is READY) - (before is READY)
        task.state = state
        if before is OUTSTANDING:
            task.lent = None
            if step is not Closed:  # after which no worker owes anything
                self._workers[task.worker_id].unanswered.remove(task)  # nearly always the first


def _not_gone(tasks: deque[Task]) -> deque[Task]:
    return deque(task for task in tasks if task.state is not GONE)


_HANDLERS: dict[type, Callable[[Schedule, Any], list[Command]]] = {
    Opened: Schedule._open,
    IndicesDrawn: Schedule._assign,
    IndicesSkipped: Schedule._skip,
    SamplerExhausted: Schedule._sampler_ended,
    SamplerFailed: Schedule._sampler_failed,
    TaskDone: Schedule._done,
    WorkerExhausted: Schedule._worker_exhausted,
    WorkerLost: Schedule._worker_lost,
    WorkerReady: Schedule._worker_ready,
    BatchTaken: Schedule._taken,
    Closed: Schedule._close,
}
