"""The messages between the driver and the worker processes.

Promise: data only; both sides import it, and neither imports the other. Messages down a channel begin with a `Down`,
messages up with an `Up`; if the channel is Ray calls, the calls' arguments and return values
replace them. Calls of a process are numbered, and it answers them in order.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rayloader import fetching
from rayloader.transport.lanes import Wire, fits_in_band


def carried() -> tuple[type, ...]:
    """The kinds of objects that go through Ray unchanged: references to its objects, whose owners it keeps informed.

    Without Ray, there are none.
    """
    reference = getattr(sys.modules.get("ray"), "ObjectRef", None)
    return () if reference is None else (reference,)


class Down:
    """The first item of a message to a worker process, and what follows it."""

    RUN = 0  # a call: worker_id, call, task_id, indices, room; see `WorkerProcess.run`
    REPLAY = 1  # a call: worker_id, call, tasks; see `WorkerProcess.replay`
    RESUME = 2  # a call: worker_id, call, epoch, shared_seed, undo_from; see `WorkerProcess.resume`
    DROP = 3  # after_call, up_to_call, from_task: of the calls in between, the tasks from this one on are cancelled
    # To a fork, which has no other way for them; to an actor they are calls through Ray.
    START = 4  # a call: worker_id, call, setup, state; see `WorkerProcess.start`
    HURRY = 5  # a call: worker_id, call; see `WorkerProcess.hurry`
    LEAVE = 6  # a call: worker_id, call; see `WorkerProcess.leave`


class Up:
    """The first item of a message from a worker process, and what follows it."""

    ANSWER = 0  # to `run` and `replay`: worker_id, call, fields of the `Answer`
    BEGUN = 1  # to `resume`: worker_id, call, fields of the `WorkerState` in which it has left the worker
    MANAGED = 2  # to a fork's START, HURRY and LEAVE: worker_id, call, which of these


@dataclass(frozen=True, slots=True)
class Setup:
    """What one worker is told before its first task; the same for all except for `worker_id`."""

    worker_id: int
    name: str  # of the loader
    num_workers: int
    base_seed: int
    seed_batches: bool  # seed before each batch, by its number
    shared_seed: int | None  # of IterDataPipes
    dataset_kind: int
    auto_collation: bool
    batch_size: int | None
    drop_last: bool
    skip_errors: bool
    ranks: tuple[int, int] | None  # the loader's rank, and their number; see `shard_info.Reader`
    persistent: bool  # after this epoch the same dataset object is iterated over again
    max_undone: int  # tasks that `resume` may have to undo


@dataclass(frozen=True, slots=True)
class Replica:
    """Sent once per worker: the user's objects, pickled together, as one fork would copy them together."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None
    collate_fn_map: dict[Any, Any]  # torch's default_collate_fn_map, as the program has it


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker runs."""

    pid: int
    node_id: str
    hostname: str
    reaches_driver: bool  # can open the driver's memory files
    machine: str  # workers of one node and one machine can open each other's

    @property
    def location(self) -> tuple[str, str]:
        """A value that is equal for workers that share an image."""
        return self.node_id, self.machine


class ResultKind:
    """The outcome of a task."""

    BATCH = 0
    ERROR = 1  # the user's exception, as torch's ExceptionWrapper
    EXHAUSTED = 2  # the worker's iterable dataset has ended
    EMPTY = 3  # every sample of it was skipped
    EXITED = 4  # user code asked this process to end: SystemExit, KeyboardInterrupt
    NOT_STARTED = 5  # the same as EXITED, before its first task


# After these results the process ends.
ENDS = ResultKind.EXITED, ResultKind.NOT_STARTED


@dataclass(slots=True)
class Result:
    """The outcome of a task: `wire` holds the batch or the ExceptionWrapper, `text` describes an error."""

    task_id: int
    kind: int  # of `ResultKind`
    wire: Wire | None = None
    text: str = ""
    nbytes: int = 0  # of the batch's buffers
    skipped: tuple[fetching.Skipped, ...] = ()
    digest: int = 0  # tells whether a rebuilt batch is the same
    samples: int = 0  # in the batch

    @property
    def fields(self) -> tuple[Any, ...]:
        """The part of it that is sent."""
        return (
            self.task_id,
            self.kind,
            None if self.wire is None else self.wire.fields,
            self.text,
            self.nbytes,
            self.skipped,
            self.digest,
            self.samples,
        )


class Answer(NamedTuple):
    """What a call of `run` or `replay` returns, with news of the worker."""

    result: Any  # in the form that is sent, see NOTE [final]; None: of a replay that has not ended the process
    seconds: float  # spent on it
    spent: bytes = b""  # how the time was spent: a `Spent`, packed
    replay: tuple[int, int] = 0, 0  # batches rebuilt since the worker was restored, and how many must be
    state: tuple[Any, ...] | None = None  # fields of `WorkerState`, if a snapshot of the worker was taken
    full: bool = False  # the arena had no room for something
    no_arena: str = ""  # why the arena could not be opened, if it could not

    @property
    def fields(self) -> tuple[Any, ...]:
        """The part of it that is sent: without the fields after the third, if they have their usual values."""
        return self[:3] if self[3:] == _USUAL else tuple(self)


_USUAL = tuple(Answer(None, 0.0))[3:]


class Served(NamedTuple):
    """What a call of `serve` returns.

    Attributes:
        refused: why the line could not be opened.
        answer: packed worker_id, call and `Answer`, which could not go over the line; the line is still open.
    """

    refused: str = ""
    answer: Any = None


# NOTE [final]. A dataset may write to what it returned as soon as it is asked for the next item: a reader that reuses
# its buffer does. So a result is final when its task ends. Over a line it is sent at that moment. If Ray carries it, it
# is pickled once, with copies of small parts; only large parts, or parts that Ray must inspect, keep views of the
# batch's memory: its call ends with it, and Ray copies them before the next call begins.


def final(result: Result, in_band: int) -> Any:
    """The form in which a result goes through Ray: bytes if at most `in_band` bytes must be copied, else its fields."""
    if result.wire is None or fits_in_band(result.wire, in_band):
        return pickle.dumps(result.fields, pickle.HIGHEST_PROTOCOL)
    return result.fields


def result_of(travelled: Any) -> Result:
    """The result, from the form that was sent."""
    result = Result(*(pickle.loads(travelled) if isinstance(travelled, bytes) else travelled))
    fields: Any = result.wire
    if fields is not None:
        result.wire = Wire(*fields)
    return result
