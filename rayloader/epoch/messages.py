"""The schedule's events and commands, and the table of what may happen to a task.

Promise: standard library only. `TRANSITIONS` is the one place that says how a task's state changes. A message is not
changed after its creation; that is not enforced, because a frozen dataclass takes five times as long to create, and
each batch takes five messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayloader.task import DELIVERED, GONE, LOST, OUTSTANDING, QUEUED, READY, Task, TaskState


@dataclass(slots=True)
class Opened:
    """The epoch begins: indices may be drawn."""


@dataclass(slots=True)
class IndicesDrawn:
    """The sampler gave the next batch's indices (whatever the sampler yields)."""

    indices: Any


@dataclass(slots=True)
class IndicesSkipped:
    """The sampler gave the indices of a batch that the user has, or skips: it keeps its number, and is not built."""


@dataclass(slots=True)
class SamplerExhausted:
    """The sampler has no more indices."""


@dataclass(slots=True)
class SamplerFailed:
    """The sampler raised: this draw gives nothing, a later one may."""


@dataclass(slots=True)
class TaskDone:
    """A worker answered this task, with a batch or with the user's exception.

    Attributes:
        task_id: that task.
        result: what it answered.
        nbytes: of the batch.
    """

    task_id: int
    result: Any = None
    nbytes: int = 0


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
        blameless: the process lives; only the way to it has changed.
    """

    worker_id: int
    cause: str
    suspect: int | None = None
    admitted: bool = False
    blameless: bool = False


@dataclass(slots=True)
class WorkerReady:
    """A worker has a process that may be given its tasks."""

    worker_id: int


@dataclass(slots=True)
class BatchTaken:
    """The user has taken a delivered batch: its place in the window is free."""

    task_id: int


@dataclass(slots=True)
class Closed:
    """The epoch is over for its user, finished or not.

    With `resuming` the workers continue with another epoch; first they build the tasks that they hold, as torch's do.
    """

    resuming: bool = False


Event = (
    Opened
    | IndicesDrawn
    | IndicesSkipped
    | SamplerExhausted
    | SamplerFailed
    | TaskDone
    | WorkerExhausted
    | WorkerLost
    | WorkerReady
    | BatchTaken
    | Closed
)


@dataclass(slots=True)
class Submit:
    """Send this task to its worker."""

    task: Task


@dataclass(slots=True)
class ReplaceWorker:
    """Give the worker another process that knows what the lost one knew; then report `WorkerReady`."""

    worker_id: int
    cause: str


@dataclass(slots=True)
class Fail:
    """The epoch cannot go on: a worker is lost for good. `task` is at fault, or the first one lost with it."""

    worker_id: int
    cause: str
    task: Task | None


Command = Submit | ReplaceWorker | Fail

# state before -> event -> state after; `Submit` is the schedule's own step, and what is READY is DELIVERED by the event
# that ends the wait for an earlier task. The picture in docs/architecture.md is generated from this table.
TRANSITIONS: dict[TaskState, dict[type, TaskState]] = {
    QUEUED: {Submit: OUTSTANDING, WorkerExhausted: GONE, Closed: GONE},
    OUTSTANDING: {
        TaskDone: READY,
        WorkerExhausted: GONE,
        WorkerLost: LOST,
        Closed: GONE,
    },
    READY: {TaskDone: DELIVERED, WorkerExhausted: DELIVERED, Closed: GONE},
    DELIVERED: {BatchTaken: GONE, Closed: GONE},
    LOST: {Submit: OUTSTANDING, Closed: GONE},
    GONE: {},
}
