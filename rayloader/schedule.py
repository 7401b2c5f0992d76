"""The driver's schedule: which worker builds which batch, and which batch is delivered next.

Promise: a pure state machine. Standard library only; no Ray, no torch, no clock, no thread, no I/O. Two
rules govern it:

1. Everything that happened comes in through `Schedule.handle` as an event; everything to be done goes out as the
   list of commands that it returns. Nothing else changes the state.
2. A task's state changes only along `TRANSITIONS`.

It runs under whatever lock its caller holds. The assignment of tasks to workers is torch's (see NOTE [round-robin]),
for the workers' random streams, and with them random augmentation, depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any


class TaskState(Enum):
    """Where a task is on its way; `GONE` is the one state that the task table does not hold."""

    OUTSTANDING = "outstanding"  # submitted to its worker, unanswered
    READY = "ready"  # built, waiting for its turn
    DELIVERED = "delivered"  # its turn has come: on its way to the user, its place in the window still taken
    LOST = "lost"  # its worker died before it answered
    GONE = "gone"  # taken by the user, dropped with its exhausted worker, or closed


@dataclass(frozen=True, slots=True)
class Opened:
    """The epoch begins: every worker is there and may be given work."""


@dataclass(frozen=True, slots=True)
class IndicesDrawn:
    """The sampler gave the next batch's indices (whatever the sampler yields)."""

    indices: Any


@dataclass(frozen=True, slots=True)
class SamplerExhausted:
    """The sampler has no more indices."""


@dataclass(frozen=True, slots=True)
class SamplerFailed:
    """The sampler raised: this draw brings nothing, another may."""


@dataclass(frozen=True, slots=True)
class TasksDone:
    """A worker answered these tasks, each with a batch or with the user's exception."""

    task_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerExhausted:
    """A worker's iterable dataset ended at this task: it leaves the rotation; from here on its tasks yield nothing."""

    task_id: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process is gone; `cause` says why, in words."""

    worker_id: int
    cause: str


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """The user has taken a delivered batch: its place in the window is free."""

    task_id: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The epoch is over for its user, finished or not."""


Event = (
    Opened
    | IndicesDrawn
    | SamplerExhausted
    | SamplerFailed
    | TasksDone
    | WorkerExhausted
    | WorkerLost
    | BatchTaken
    | Closed
)


@dataclass(frozen=True, slots=True)
class DrawIndices:
    """Draw from the sampler `count` times and report each; they are owed until then (`Schedule.owed_draws`)."""

    count: int


@dataclass(slots=True)
class Task:
    """One request to build one batch; `task_id` counts from 0 in delivery order."""

    task_id: int
    worker_id: int
    indices: Any
    state: TaskState = TaskState.OUTSTANDING


@dataclass(frozen=True, slots=True)
class Submit:
    """Send these tasks to their worker in one call."""

    worker_id: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    """This task's batch is the next that the user gets."""

    task: Task


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop whatever is held for these tasks: nobody will ask for them."""

    task_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """The epoch cannot go on: a worker is lost. `task` is the first that is lost with it, if it had any."""

    worker_id: int
    cause: str
    task: Task | None


Command = DrawIndices | Submit | Deliver | Forget | Fail

# state before -> event -> state after. `Deliver` is the schedule's own step from READY. The picture in
# docs/architecture.md is generated from this table.
TRANSITIONS: dict[TaskState, dict[str, TaskState]] = {
    TaskState.OUTSTANDING: {
        "TasksDone": TaskState.READY,
        "WorkerExhausted": TaskState.GONE,
        "WorkerLost": TaskState.LOST,
        "Closed": TaskState.GONE,
    },
    TaskState.READY: {"Deliver": TaskState.DELIVERED, "Closed": TaskState.GONE},
    TaskState.DELIVERED: {"BatchTaken": TaskState.GONE, "Closed": TaskState.GONE},
    TaskState.LOST: {"Closed": TaskState.GONE},
    TaskState.GONE: {},
}

# NOTE [round-robin]
# Map-style: task i goes to worker i mod W. Iterable: to the next worker in the cycle that is not exhausted. Without
# order (`in_order=False`) a worker is passed over while it holds its share of the window. Per worker at most
# `prefetch_factor` tasks are submitted and not taken, W * prefetch_factor in all: they are drawn when the epoch
# opens, then one for each batch that is taken, which are the moments at which torch draws. In order, an exhausted
# worker's places in the window go with it, so the others keep their own bound. Without order the others' shares grow
# (torch's rule), and the places are drawn anew: else the one worker left could be without a task, and with nothing to
# take nothing would ever be drawn.


class Schedule:
    """The ordered task table of one epoch.

    Args:
        num_workers: number of workers, at least 1.
        prefetch_factor: tasks per worker submitted and not yet taken by the user, at least 1.
        in_order: deliver in task order; otherwise as tasks finish.
    """

    def __init__(self, num_workers: int, prefetch_factor: int, *, in_order: bool = True) -> None:
        self.window = num_workers * prefetch_factor
        self.in_order = in_order
        self._active = [True] * num_workers  # not exhausted and not lost, by worker
        self._held = [0] * num_workers  # tasks in the table, by worker
        self._tasks: dict[int, Task] = {}  # in task order
        self._next_task_id = 0
        self._next_worker_id = 0
        self.owed_draws = 0  # asked for and not reported
        self._opened = False
        self._sampler_exhausted = False
        self._closed = False

    @property
    def head(self) -> Task | None:
        """The lowest undelivered task, None if there is none."""
        return next(self._in_state(TaskState.OUTSTANDING, TaskState.READY, TaskState.LOST), None)

    @property
    def outstanding(self) -> tuple[Task, ...]:
        """The tasks that workers have not answered, in task order."""
        return tuple(self._in_state(TaskState.OUTSTANDING))

    @property
    def finished(self) -> bool:
        """Whether every batch there is has been taken, or the epoch was closed."""
        return self._closed or (self._opened and not self._tasks and not self.owed_draws)

    def handle(self, event: Event) -> list[Command]:
        """Takes in what happened and returns what is to be done, in order.

        Raises:
            RuntimeError: the event contradicts the state (a fault in the caller).
        """
        if self._closed:
            return []  # late news of an epoch that nobody listens to
        match event:
            case Opened():
                self._opened = True
                return self._draw(self.window)
            case IndicesDrawn(indices):
                self.owed_draws -= 1
                return self._submit(indices)
            case SamplerExhausted():
                self._sampler_exhausted = True
                self.owed_draws = 0
                return []
            case SamplerFailed():
                self.owed_draws -= 1
                return []
            case TasksDone(task_ids):
                return self._done(task_ids)
            case WorkerExhausted():
                return self._worker_exhausted(event)
            case WorkerLost():
                return self._worker_lost(event)
            case BatchTaken():
                return self._taken(event)
            case Closed():
                return self._close()

    def _draw(self, count: int) -> list[Command]:
        if self._sampler_exhausted or not any(self._active):
            return []
        self.owed_draws += count
        return [DrawIndices(count)]

    def _submit(self, indices: Any) -> list[Command]:
        worker_id = self._next_with_room()
        if worker_id is None:
            return []  # every worker is exhausted: these indices stand for no sample (iterable datasets only)
        task = Task(self._next_task_id, worker_id, indices)
        self._next_task_id += 1
        self._tasks[task.task_id] = task
        self._held[worker_id] += 1
        return [Submit(worker_id, (task,))]

    def _next_with_room(self) -> int | None:
        num_workers = len(self._active)
        share = self.window // max(1, sum(self._active))
        for step in range(num_workers):
            worker_id = (self._next_worker_id + step) % num_workers
            if self._active[worker_id] and (self.in_order or self._held[worker_id] < share):
                self._next_worker_id = (worker_id + 1) % num_workers
                return worker_id
        return None

    def _done(self, task_ids: tuple[int, ...]) -> list[Command]:
        """Tasks dropped meanwhile, or answered before, are passed over: telling it twice does no harm."""
        done = [task for task in self.outstanding if task.task_id in task_ids]
        for task in done:
            self._move(task, TasksDone(task_ids))
        if not self.in_order:
            return [self._deliver(task) for task in done]
        return self._deliver_ready()

    def _taken(self, event: BatchTaken) -> list[Command]:
        worker_id = self._tasks[event.task_id].worker_id
        self._move(self._tasks[event.task_id], event)
        return self._draw(1) if self._active[worker_id] or not self.in_order else []

    def _deliver_ready(self) -> list[Command]:
        """Delivers from the head on, up to the first task that is not ready."""
        commands: list[Command] = []
        while self.in_order and (head := self.head) is not None and head.state is TaskState.READY:
            commands.append(self._deliver(head))
        return commands

    def _deliver(self, task: Task) -> Deliver:
        task.state = TRANSITIONS[task.state]["Deliver"]
        return Deliver(task)

    def _worker_exhausted(self, event: WorkerExhausted) -> list[Command]:
        """A worker's answers may be told in any order: its tasks before this one may still bring batches."""
        if event.task_id not in self._tasks:
            return []
        worker_id = self._tasks[event.task_id].worker_id
        self._active[worker_id] = False
        dropped = [t for t in self.outstanding if t.worker_id == worker_id and t.task_id >= event.task_id]
        for task in dropped:
            self._move(task, event)
        commands: list[Command] = [Forget(tuple(task.task_id for task in dropped))]
        if not self.in_order:
            commands += self._draw(len(dropped))
        return commands + self._deliver_ready()

    def _worker_lost(self, event: WorkerLost) -> list[Command]:
        lost = [task for task in self.outstanding if task.worker_id == event.worker_id]
        if not lost and not self._active[event.worker_id]:
            return []  # its work was done
        self._active[event.worker_id] = False
        for task in lost:
            self._move(task, event)
        return [Fail(event.worker_id, event.cause, lost[0] if lost else None)]

    def _close(self) -> list[Command]:
        """Whatever the state is, also one that a Ctrl-C left half-changed."""
        task_ids = tuple(self._tasks)
        self._tasks.clear()
        self._closed = True
        self.owed_draws = 0
        return [Forget(task_ids)] if task_ids else []

    def _move(self, task: Task, event: Event) -> None:
        try:
            state = TRANSITIONS[task.state][type(event).__name__]
        except KeyError:
            raise RuntimeError(f"{event} cannot happen to {task}; see TRANSITIONS in schedule.py") from None
        if state is TaskState.GONE:
            del self._tasks[task.task_id]
            self._held[task.worker_id] -= 1
        task.state = state

    def _in_state(self, *states: TaskState) -> Iterator[Task]:
        return (task for task in self._tasks.values() if task.state in states)
