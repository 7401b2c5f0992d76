"""The schedule's events and commands, and the states of a task.

Promise: standard library only. `TRANSITIONS` is the one place that says how a task's state changes. A message is not
changed after its creation; that is not enforced, because a frozen dataclass takes five times as long to create, and
each batch takes six messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class TaskState(Enum):
    """Where a task is on its way; `GONE` is the one state that the task table does not hold."""

    QUEUED = "queued"  # drawn, not yet assigned to a worker
    OUTSTANDING = "outstanding"  # submitted to its worker, unanswered
    READY = "ready"  # built, waiting for its turn
    DELIVERED = "delivered"  # its turn has come: on its way to the user, still occupying its place in the window
    LOST = "lost"  # its worker died before it answered; it is sent again to the next process of that worker
    GONE = "gone"  # taken by the user, dropped with its exhausted worker, or closed

    __hash__ = object.__hash__  # Enum's own hashes the name, by a Python call for each look into `TRANSITIONS`


# An Enum's metaclass makes `TaskState.READY` take five times as long as a global name, twenty times a batch.
QUEUED, OUTSTANDING, READY, DELIVERED, LOST, GONE = TaskState


@dataclass(slots=True)
class Opened:
    """The epoch begins: every worker exists and may be given work."""


@dataclass(slots=True)
class IndicesDrawn:
    """The sampler gave the next batch's indices (whatever the sampler yields)."""

    indices: Any


@dataclass(slots=True)
class IndicesSkipped:
    """The sampler gave the indices of a batch that the user already has: it keeps its number, and is not built."""


@dataclass(slots=True)
class SamplerExhausted:
    """The sampler has no more indices."""


@dataclass(slots=True)
class SamplerFailed:
    """The sampler raised: this draw gives nothing, a later one may."""


@dataclass(slots=True)
class DrawsPutOff:
    """The sampler must not be read early any more: from here on the window is torch's."""


@dataclass(slots=True)
class DrawsUndone:
    """From this task on, the indices differ from those that were drawn early; they are drawn when torch draws them."""

    from_task: int


@dataclass(slots=True)
class TaskDone:
    """A worker answered this task, with a batch or with the user's exception."""

    task_id: int


@dataclass(slots=True)
class Paced:
    """How many tasks one worker should have, see pace.py.

    Attributes:
        worker_id: that worker.
        depth: tasks of each worker that should be under way, if the window is elastic; 0: no opinion.
        ahead: tasks that it may be given before it has answered, if any worker may take any task.
    """

    worker_id: int
    depth: int
    ahead: int


@dataclass(slots=True)
class WorkerExhausted:
    """A worker's iterable dataset ended at this task: it leaves the rotation; its later tasks give no batches."""

    task_id: int


@dataclass(slots=True)
class WorkerLost:
    """A worker's process is gone.

    Attributes:
        worker_id: the worker.
        cause: in words.
        suspect: the task that it was executing, if known.
        admitted: the process itself reported that the task ended it.
        blameless: another worker's task in the same process may have caused it, or no task did.
    """

    worker_id: int
    cause: str
    suspect: int | None = None
    admitted: bool = False
    blameless: bool = False


@dataclass(slots=True)
class WorkerReady:
    """A lost worker has a process again, which was given the tasks that the worker had."""

    worker_id: int


@dataclass(slots=True)
class BatchTaken:
    """The user has taken a delivered batch: its place in the window is free."""

    task_id: int


@dataclass(slots=True)
class Closed:
    """The epoch is over for its user, finished or not.

    With `resuming` the workers continue with another epoch; first they build what torch's would have been given by now.
    """

    resuming: bool = False


Event = (
    Opened
    | IndicesDrawn
    | IndicesSkipped
    | SamplerExhausted
    | SamplerFailed
    | DrawsPutOff
    | DrawsUndone
    | TaskDone
    | Paced
    | WorkerExhausted
    | WorkerLost
    | WorkerReady
    | BatchTaken
    | Closed
)


@dataclass(slots=True)
class DrawIndices:
    """Draw from the sampler `count` times and report each draw; until then they are owed (`Schedule.owed_draws`)."""

    count: int


ANY_WORKER = -1


@dataclass(slots=True)
class Task:
    """One request to build one batch; `task_id` counts from 0 in delivery order."""

    task_id: int
    worker_id: int  # ANY_WORKER while it is not assigned
    indices: Any
    state: TaskState = QUEUED

    @property
    def is_anybodys(self) -> bool:
        """Whether it is not assigned to a worker yet."""
        return self.worker_id == ANY_WORKER


@dataclass(slots=True)
class Submit:
    """Send this task to its worker."""

    task: Task


@dataclass(slots=True)
class Deliver:
    """This task's batch is the next that the user gets."""

    task: Task


@dataclass(slots=True)
class Forget:
    """Drop everything that is held for these tasks: they will not be requested."""

    task_ids: tuple[int, ...]


@dataclass(slots=True)
class Drop:
    """The worker need not build its tasks from this one on, and those it has built must have no effect."""

    worker_id: int
    first_task_id: int


@dataclass(slots=True)
class ReplaceWorker:
    """Give the worker another process, and what the lost one knew and had to do; then report `WorkerReady`."""

    worker_id: int
    cause: str


@dataclass(slots=True)
class Fail:
    """The epoch cannot go on: a worker is lost for good. `task` is at fault, or the first one lost with it."""

    worker_id: int
    cause: str
    task: Task | None


Command = DrawIndices | Submit | Deliver | Forget | Drop | ReplaceWorker | Fail

# state before -> event -> state after; `Submit` and `Deliver` are the schedule's own steps. The picture in
# docs/architecture.md is generated from this table.
TRANSITIONS: dict[TaskState, dict[type, TaskState]] = {
    QUEUED: {Submit: OUTSTANDING, DrawsUndone: GONE, Closed: GONE},
    OUTSTANDING: {
        TaskDone: READY,
        DrawsUndone: GONE,
        WorkerExhausted: GONE,
        WorkerLost: LOST,
        Closed: GONE,
    },
    READY: {Deliver: DELIVERED, DrawsUndone: GONE, Closed: GONE},
    DELIVERED: {BatchTaken: GONE, DrawsUndone: GONE, Closed: GONE},
    LOST: {WorkerReady: OUTSTANDING, DrawsUndone: GONE, Closed: GONE},
    GONE: {},
}
