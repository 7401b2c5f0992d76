"""The messages between the driver and the worker processes.

Promise: data only; both sides import it, and neither imports the other. Messages down a channel begin with a `Down`,
messages up with an `Up`; if the channel is Ray calls, the calls' arguments and return values
replace them. Calls of a process are numbered, and it answers them in order.
"""

from __future__ import annotations

import operator
import pickle
import struct
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
    REBUILT = 6  # of a call that rebuilds batches: there is none


# After these results the process ends.
ENDS = ResultKind.EXITED, ResultKind.NOT_STARTED


@dataclass(slots=True)
class Answer:
    """The outcome of a task, or of a call that rebuilds batches, with news of the worker."""

    task_id: int
    kind: int  # of `ResultKind`
    wire: Any = None  # the batch, or the ExceptionWrapper: the fields of a `Wire`; the `Wire` itself once received
    text: str = ""  # describes an error
    nbytes: int = 0  # of the batch's buffers
    skipped: tuple[fetching.Skipped, ...] = ()
    digest: int = 0  # tells whether a rebuilt batch is the same
    samples: int = 0  # in the batch
    seconds: float = 0.0  # spent on the call
    spent: bytes = b""  # how the time was spent: a `Spent`, packed
    replay: tuple[int, int] = 0, 0  # batches rebuilt since the worker was restored, and how many must be
    state: tuple[Any, ...] | None = None  # fields of `WorkerState`, if a snapshot of the worker was taken
    full: bool = False  # the arena had no room for something
    no_arena: str = ""  # why the arena could not be opened, if it could not
    asked: bool = False  # user code has asked which worker this is, or which part is its own

    @property
    def fields(self) -> tuple[Any, ...]:
        """What is sent of it, see NOTE [Fields] in lanes.py."""
        return _FIELDS(self)


_FIELDS = operator.attrgetter(*Answer.__slots__)


_PACKED = struct.Struct("=6d")  # NumPy reads many of them as rows of numbers
pack_spent = _PACKED.pack  # the fields of a `Spent`, in their order


class Spent(NamedTuple):
    """How the time of a task was spent, unpacked. In seconds."""

    worker_id: float  # the worker that built the batch.
    began: float  # when it began, perf_counter() of its machine.
    idle: float  # how long its process had nothing to do before that.
    fetch: float  # in the dataset.
    collate: float  # in `collate_fn`.
    # for encoding, and for sending the previous batch: the time to send this one is reported with the next.
    transfer: float

    @classmethod
    def unpack(cls, packed: bytes) -> Spent:
        """The inverse of `pack_spent`."""
        return cls(*_PACKED.unpack(packed))

    @property
    def build(self) -> float:
        """The work on the batch."""
        return self.fetch + self.collate + self.transfer


class Served(NamedTuple):
    """What a call of `serve` returns.

    Attributes:
        refused: why the line could not be opened.
        answer: worker_id, call and the fields of an `Answer` that could not go over the line; it is still open.
    """

    refused: str = ""
    answer: Any = None


# NOTE [final]. A dataset may write to what it returned as soon as it is asked for the next item: a reader that reuses
# its buffer does. So a result is final when its task ends. Over a line it is sent at that moment. If Ray carries it, it
# is pickled once, with copies of small parts; only large parts, or parts that Ray must inspect, keep views of the
# batch's memory: its call ends with it, and Ray copies them before the next call begins.


def final(answer: Answer, in_band: int) -> Any:
    """How an answer goes through Ray: as bytes if at most `in_band` bytes must be copied, else as its fields."""
    if answer.wire is None or fits_in_band(Wire(*answer.wire), in_band):
        return pickle.dumps(answer.fields, pickle.HIGHEST_PROTOCOL)
    return answer.fields
