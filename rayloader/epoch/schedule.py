"""The driver's schedule: which worker builds which batch, and which batch is delivered next.

Promise: a pure state machine. Standard library only; no Ray, no torch, no clock, no thread, no I/O. Two
rules govern it:

1. Everything that happened comes in through `Schedule.handle` as an event; everything to be done goes out in the
   list of commands that it returns. Nothing else changes the state.
2. A task's state changes only along `TRANSITIONS` (messages.py).

It runs under its caller's lock. The assignment of tasks to workers is torch's (see NOTE [round-robin]),
because the workers' random streams, and with them random augmentation, depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayloader.epoch.messages import (
    ANY_WORKER,
    DELIVERED,
    GONE,
    LOST,
    OUTSTANDING,
    QUEUED,
    READY,
    TRANSITIONS,
    BatchTaken,
    Closed,
    Command,
    Deliver,
    DrawIndices,
    DrawsPutOff,
    DrawsUndone,
    Drop,
    Event,
    Fail,
    Forget,
    IndicesDrawn,
    IndicesSkipped,
    Opened,
    Paced,
    ReplaceWorker,
    SamplerExhausted,
    SamplerFailed,
    Submit,
    Task,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)

# NOTE [round-robin]
# Map-style: task i goes to worker i mod W. Iterable: to the next worker in the cycle that is not exhausted. Without
# order (`in_order=False`) a worker is passed over while it holds its share of the window. At most `prefetch_factor`
# tasks per worker are in the table, W * prefetch_factor in all: they are drawn when the epoch opens, then one
# for each batch that is taken, which is when torch draws. In order, an exhausted worker's places in
# the window are dropped, so the others keep their own limit. Without order the others' shares grow (torch's rule), and
# the places are drawn again: otherwise the last worker could be left without a task, and with nothing to take nothing
# would ever be drawn.
#
# NOTE [elastic]
# If the depth is automatic, the window is as deep as the fastest worker needs (`Paced`), and at least torch's.
# When it shrinks, taken batches are not replaced until the table fits again.
#
# NOTE [dynamic]
# If batches do not depend on their worker, tasks queue for any worker: the one with the fewest gets the next ones,
# so that a slow sample delays only what its worker has been given. A worker gets this many before it has
# answered, or as many as `Paced` says: the one in progress, and the next.
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
    """The schedule's record of a worker: what events have said, without the driver's `WorkerSlot`."""

    active: bool = True  # its stream has not ended, and it is not permanently lost
    lost: bool = False  # its process is, and no `WorkerReady` has come since
    held: int = 0  # tasks in the table
    unanswered: int = 0  # those of them that are OUTSTANDING
    restarts: int = 0  # since it last finished a task
    exhausted_at: int | None = None  # task
    depth: int = 0  # of the window, as its pace requires
    ahead: int = AHEAD  # see NOTE [dynamic]


class Schedule:
    """The ordered task table of one epoch.

    Args:
        num_workers: number of workers, at least 1.
        prefetch_factor: tasks per worker submitted and not yet taken by the user, at least 1; torch's if `elastic`.
        in_order: deliver in task order; otherwise as tasks finish.
        elastic: whether the window follows the workers' pace.
        dynamic: any worker may take the next task (map-style datasets only).
        max_restarts: how often in a row a worker that has not finished a task is replaced.
        first_task_id: where the epoch continues: the tasks before it are done.
        first_worker_id: which worker's turn it is.
    """

    def __init__(
        self,
        num_workers: int,
        prefetch_factor: int,
        *,
        in_order: bool = True,
        elastic: bool = False,
        dynamic: bool = False,
        max_restarts: int = 0,
        first_task_id: int = 0,
        first_worker_id: int = 0,
    ) -> None:
        self.in_order = in_order
        self.elastic = elastic
        self.dynamic = dynamic
        self._grows = elastic  # whether the window may still grow
        self._prefetch_factor = prefetch_factor
        self._depth = prefetch_factor  # of the window, per worker
        self._surplus = 0  # tasks in the table beyond the window, after it shrank
        self._max_restarts = max_restarts
        self._workers = [_Worker() for _ in range(num_workers)]
        self._num_active = num_workers
        self._kills: dict[int, int] = {}  # by task
        self._queued: deque[Task] = deque()  # see NOTE [dynamic]
        self._tasks: dict[int, Task] = {}  # in task order
        self._head_id = first_task_id  # no task below it is undelivered
        self._next_task_id = first_task_id
        self._next_worker_id = first_worker_id
        self.owed_draws = 0  # requested and not reported
        self.taken = first_task_id  # batches, including skipped ones
        self._opened = False
        self._sampler_exhausted = False
        self._failed = False  # whether a worker is permanently lost
        self.closed = False
        self._finished = False  # as it was when the epoch was closed
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            Opened: self._open,
            IndicesDrawn: self._assign,
            IndicesSkipped: self._skip,
            SamplerExhausted: self._sampler_ended,
            SamplerFailed: self._sampler_failed,
            DrawsPutOff: self._put_off,
            DrawsUndone: self._draws_undone,
            TaskDone: self._done,
            Paced: self._paced,
            WorkerExhausted: self._worker_exhausted,
            WorkerLost: self._worker_lost,
            WorkerReady: self._worker_ready,
            BatchTaken: self._taken,
            Closed: self._close,
        }

    @property
    def window(self) -> int:
        """Tasks that may be in the table, of all workers together."""
        return self._depth * len(self._workers)

    @property
    def is_paced(self) -> bool:
        """Whether the depth follows `Paced`; else it is the user's to say."""
        return self.elastic or self.dynamic

    @property
    def torch_draws(self) -> int:
        """How many times torch's loader would have drawn from the sampler by now."""
        return self._prefetch_factor * len(self._workers) + self.taken

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
        """Tasks without an answer, in task order, including those that are queued or lost."""
        unanswered = (QUEUED, OUTSTANDING, LOST)
        return tuple(task for task in self._tasks.values() if task.state in unanswered)

    def task(self, task_id: int) -> Task | None:
        """The task with this number, if it is in the task table."""
        return self._tasks.get(task_id)

    def has(self, task: Task) -> bool:
        """Whether it is in the task table; another task with its number may be."""
        return self._tasks.get(task.task_id) is task

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
        return self._handlers[type(event)](event)

    def validate(self) -> None:
        """Checks the invariants that must hold between any two events.

        Raises:
            RuntimeError: one does not hold (a fault of this module); says after which events.
        """
        tasks = self.tasks
        queued = [task for task in tasks if task.state is QUEUED]
        undelivered = [task for task in tasks if task.state is not DELIVERED]  # not by `head`, which changes `_head_id`
        checks = {
            "task ids ascend": list(self._tasks) == sorted(self._tasks),
            "what is GONE is not in the table": all(task.state is not GONE for task in tasks),
            "the queue holds what is QUEUED": list(self._queued) == queued,
            "only a dynamic schedule has a queue": self.dynamic or not queued,
            "QUEUED means no worker": all(task.is_anybodys == (task.state is QUEUED) for task in tasks),
            "no undelivered task is below the head": all(task.task_id >= self._head_id for task in undelivered),
            "in order, what is READY waits for the head": not self.in_order
            or not undelivered
            or undelivered[0].state is not READY,
            "draws are owed, or none": self.owed_draws >= 0 and self._surplus >= 0,
            "what is closed holds nothing": not self.closed or not (tasks or self.owed_draws),
            "the table fits the window": len(tasks) + self.owed_draws <= self.window + self._surplus
            or self._sampler_exhausted
            # An exhausted worker's places are dropped, although its tasks may still wait for the head.
            or not all(worker.active for worker in self._workers),
            "active workers are counted": self._num_active == sum(worker.active for worker in self._workers),
            "lost tasks are of lost workers": self._failed
            or all(self._workers[t.worker_id].lost for t in tasks if t.state is LOST),
        }
        for worker_id, worker in enumerate(self._workers):
            mine = [task for task in tasks if task.worker_id == worker_id]
            checks[f"worker {worker_id} holds its tasks"] = worker.held == len(mine)
            unanswered = sum(task.state is OUTSTANDING for task in mine)
            checks[f"worker {worker_id} owes what is OUTSTANDING"] = worker.unanswered == unanswered
        for rule, holds in checks.items():
            if not holds:
                raise RuntimeError(f"the schedule has broken a rule of its own: {rule}; {self._history()}")

    def _history(self) -> str:
        return f"the last events: {', '.join(map(repr, self._recent))}"

    # ---- drawing and assigning

    def _open(self, event: Opened) -> list[Command]:
        self._opened = True
        return self._draw(self.window)

    def _draw(self, count: int) -> list[Command]:
        if count <= 0 or self._sampler_exhausted or not self._num_active:
            return []
        self.owed_draws += count
        return [DrawIndices(count)]

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
        task = Task(self._next_task_id, ANY_WORKER, event.indices)
        self._next_task_id += 1
        self._tasks[task.task_id] = task
        if not self.dynamic:
            return [self._submit(task, worker_id)]
        self._queued.append(task)
        return self._feed_any()

    def _skip(self, event: IndicesSkipped) -> list[Command]:
        if not self._settle_draw(event):
            return []
        self._next_task_id += 1
        self.taken += 1
        return self._draw(1)

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

    def _submit(self, task: Task, worker_id: int) -> Submit:
        task.worker_id = worker_id
        self._workers[worker_id].held += 1
        self._move(task, Submit)
        return Submit(task)

    def _feed_any(self) -> list[Command]:
        """See NOTE [dynamic]."""
        commands: list[Command] = []
        while self._queued:
            free = [
                (worker.unanswered, worker_id)
                for worker_id, worker in enumerate(self._workers)
                if worker.active and not worker.lost and worker.unanswered < worker.ahead
            ]
            if not free:
                break
            commands.append(self._submit(self._queued.popleft(), min(free)[1]))
        return commands

    def _sampler_ended(self, event: SamplerExhausted) -> list[Command]:
        self._sampler_exhausted = True
        self.owed_draws = 0
        return []

    def _sampler_failed(self, event: SamplerFailed) -> list[Command]:
        self._settle_draw(event)
        return []

    def _put_off(self, event: DrawsPutOff) -> list[Command]:
        self._shrink_to_torch()
        return []

    def _draws_undone(self, event: DrawsUndone) -> list[Command]:
        """Drops the tasks from this one on; their workers are told again what they have to do."""
        if self._failed:
            return []
        gone = [task for task in self._tasks.values() if task.task_id >= event.from_task]
        next_worker_id = gone[0].worker_id if gone else self._next_worker_id
        for worker_id, worker in enumerate(self._workers):
            if worker.exhausted_at is not None and worker.exhausted_at >= event.from_task:
                if worker.exhausted_at == event.from_task:
                    next_worker_id = worker_id
                self._set_active(worker, True)
                worker.exhausted_at = None
        if not self.dynamic:
            self._next_worker_id = next_worker_id
        for task in gone:
            self._move(task, DrawsUndone)
        self._queued = deque(task for task in self._queued if task.state is QUEUED)
        self._next_task_id = event.from_task
        self._head_id = min(self._head_id, event.from_task)
        self._sampler_exhausted = False
        self._shrink_to_torch()
        return [Forget(tuple(task.task_id for task in gone)), *self._draw(self.torch_draws - event.from_task)]

    def _shrink_to_torch(self) -> None:
        self._grows, self._depth, self.owed_draws = False, self._prefetch_factor, 0
        self._surplus = max(0, len(self._tasks) - self.window)

    def _paced(self, event: Paced) -> list[Command]:
        """See NOTE [elastic]."""
        paced = self._workers[event.worker_id]
        paced.depth, paced.ahead = event.depth, event.ahead
        commands = self._feed_any()
        if self._grows:
            depth = max(self._prefetch_factor, *(worker.depth for worker in self._workers))
            self._surplus += (self._depth - depth) * self._num_active
            self._depth = depth
            missing, self._surplus = max(0, -self._surplus), max(0, self._surplus)
            commands += self._draw(missing)
        return commands

    # ---- delivering

    def _done(self, event: TaskDone) -> list[Command]:
        """Ignores a task that was dropped meanwhile, or answered before: reporting it twice does no harm."""
        task = self._tasks.get(event.task_id)
        if task is None or task.state is not OUTSTANDING:
            return []
        self._move(task, TaskDone)
        self._workers[task.worker_id].restarts = 0
        commands: list[Command] = self._deliver_ready() if self.in_order else [self._deliver(task)]
        return commands + self._feed_any() if self._queued else commands

    def _deliver_ready(self) -> list[Command]:
        """Delivers from the head on, up to the first task that is not ready."""
        commands: list[Command] = []
        while self.in_order and (head := self.head) is not None and head.state is READY:
            commands.append(self._deliver(head))
        return commands

    def _deliver(self, task: Task) -> Deliver:
        self._move(task, Deliver)
        return Deliver(task)

    def _taken(self, event: BatchTaken) -> list[Command]:
        task = self._tasks.get(event.task_id)
        if task is None:
            raise RuntimeError(f"{event} names a task that is not in the table; {self._history()}")
        self._move(task, BatchTaken)
        self.taken += 1
        if self.in_order and not self._workers[task.worker_id].active:
            return []
        if self._surplus:
            self._surplus -= 1
            return []
        return self._draw(1)

    # ---- ends

    def _worker_exhausted(self, event: WorkerExhausted) -> list[Command]:
        """A worker's answers may be reported in any order: its tasks before this one may still bring batches."""
        if event.task_id not in self._tasks:
            return []
        worker_id = self._tasks[event.task_id].worker_id
        worker = self._workers[worker_id]
        if worker.active and self._surplus:
            self._surplus = max(0, self._surplus - max(0, worker.held - self._depth))
        self._set_active(worker, False)
        worker.exhausted_at = event.task_id
        dropped = [t for t in self.outstanding if t.worker_id == worker_id and t.task_id >= event.task_id]
        for task in dropped:
            self._move(task, WorkerExhausted)
        commands: list[Command] = [Forget(tuple(task.task_id for task in dropped))]
        if not self.in_order:
            commands += self._draw(len(dropped))
        return commands + self._deliver_ready()

    def _worker_lost(self, event: WorkerLost) -> list[Command]:
        """See NOTE [blame]."""
        worker_id, worker = event.worker_id, self._workers[event.worker_id]
        lost = [t for t in self._tasks.values() if t.worker_id == worker_id and t.state is OUTSTANDING]
        lost_before = [t for t in self._tasks.values() if t.worker_id == worker_id and t.state is LOST]
        if self._failed or not (lost or lost_before or worker.active):
            return []  # reported before, or its work was done
        for task in lost:
            self._move(task, WorkerLost)
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
            return [Fail(worker_id, event.cause, suspect or next(iter(lost_before + lost), None))]
        worker.lost = True
        return [ReplaceWorker(worker_id, event.cause)]

    def _worker_ready(self, event: WorkerReady) -> list[Command]:
        self._workers[event.worker_id].lost = False
        for task in self._tasks.values():
            if task.worker_id == event.worker_id and task.state is LOST:
                self._move(task, WorkerReady)
        return self._feed_any()

    def _close(self, event: Closed) -> list[Command]:
        """Works in any state, even one that Ctrl-C left half changed."""
        self._finished = self.finished
        commands: list[Command] = self._drop_surplus() if event.resuming else []
        if self._tasks:
            commands.append(Forget(tuple(self._tasks)))
        for task in self.tasks:
            self._move(task, Closed)
        self._queued.clear()
        self.closed = True
        self.owed_draws = 0
        return commands

    def _drop_surplus(self) -> list[Command]:
        """Keeps each worker's first `prefetch_factor` tasks in the table, which torch's would have."""
        commands: list[Command] = []
        for worker_id in range(len(self._workers) if self.elastic else 0):
            held = [task.task_id for task in self._tasks.values() if task.worker_id == worker_id]
            if len(held) > self._prefetch_factor:
                commands.append(Drop(worker_id, held[self._prefetch_factor]))
        return commands

    def _move(self, task: Task, step: type) -> None:
        """Changes a task's state, and the counts by state."""
        before = task.state
        try:
            state = TRANSITIONS[before][step]
        except KeyError:
            raise RuntimeError(
                f"{step.__name__} cannot happen to {task}; see TRANSITIONS in messages.py; {self._history()}"
            ) from None
        if task.worker_id != ANY_WORKER:
            worker = self._workers[task.worker_id]
            worker.unanswered += (state is OUTSTANDING) - (before is OUTSTANDING)
            worker.held -= state is GONE
        if state is GONE:
            del self._tasks[task.task_id]
        task.state = state  # last: the table never holds a task that is GONE, which could not be closed
