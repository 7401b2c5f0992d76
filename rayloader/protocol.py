"""The messages between the driver and the worker processes.

Promise: data only, but for how an exception is made again; both sides import it, and neither imports the other.
Messages down a channel begin with a `Down`, messages up with an `Up`; if the channel is Ray calls, the calls' arguments
and return values replace them. Calls of a process are numbered, and it answers them in order.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from rayloader import fetching
from rayloader._compat import ExceptionWrapper
from rayloader.errors import add_note
from rayloader.transport.lanes import Wire, fits_in_band

NONE_YET: Any = object()  # in place of an answer that has not come


def carried() -> tuple[type, ...]:
    """The kinds of objects that go through Ray unchanged: references to its objects, whose owners it keeps informed.

    Without Ray, there are none.
    """
    reference = getattr(sys.modules.get("ray"), "ObjectRef", None)
    return () if reference is None else (reference,)


class Down:
    """The first item of a message to a worker process, and what follows it."""

    RUN = 0  # a call: call, task_id, indices, room; see `Hosting.run`
    REBUILD = 1  # a call: call, tasks; see `Hosting.rebuild`
    RESUME = 2  # a call: call, epoch, shared_seed, dataset_epoch; see `Hosting.resume`
    START = 3  # a call to a fork: call, setup, state; an actor's goes through Ray, see `WorkerProcess.start`


class Up:
    """The first item of a message from a worker process, and what follows it."""

    ANSWER = 0  # to `run` and `rebuild`: call, fields of the `Answer`
    BEGUN = 1  # to `resume`: call, fields of the `WorkerState` in which it has left the worker
    STARTED = 2  # to a fork's START: call, None


@dataclass(frozen=True, slots=True)
class Setup:
    """What one worker is told before its first task; the same for all except for `worker_id`."""

    worker_id: int
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
    dataset_epoch: int | None  # what its dataset was told by `set_epoch`, if that is known


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
    ERROR = 1  # the user's exception, as a `Caught`
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
    wire: Any = None  # the batch, or the `Caught`: the fields of a `Wire`; the `Wire` itself once received
    text: str = ""  # describes an error
    nbytes: int = 0  # of the batch's buffers
    skipped: tuple[fetching.Skipped, ...] = ()
    digest: int = 0  # tells whether a rebuilt batch is the same
    samples: int = 0  # in the batch
    seconds: float = 0.0  # spent on the call
    spent: bytes = b""  # how the time was spent: a `Spent`, packed
    rebuilt: tuple[int, int] = 0, 0  # batches rebuilt since the worker was restored, and how many must be
    state: tuple[Any, ...] | None = None  # fields of `WorkerState`, if a snapshot of the worker was taken
    full: bool = False  # the arena had no room for something
    no_arena: str = ""  # why the arena could not be opened, if it could not
    sample: str = ""  # names the sample that raised the error, if it is known
    asked: bool = False  # user code has asked which worker this is, or which part is its own
    read: tuple[int, ...] = ()  # digests of the first samples that a wrapper of a stream has read

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


# NOTE [Caught]. An exception of user code arrives as torch's `ExceptionWrapper` raises it again: of its own type where
# that can be made of one string, else as a RuntimeError. Whatever its type is, its text and the traceback of where it
# was raised are seen, in the text of the exception or in a note, and a group arrives as a group.


class Caught(ExceptionWrapper):
    """An exception that was caught, see NOTE [Caught]; refers to none of the frames in its traceback.

    Args:
        error: the exception.
        where: in which process or thread, as torch says it.

    Attributes:
        text: what torch's loader says of it.
        exc_type: its type; None if that cannot be sent.
        sample: names the sample that raised it, if it is known.
    """

    exc_type: Any
    _parts: list[Caught] | None

    def __init__(self, error: BaseException, where: str) -> None:
        try:
            super().__init__((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]
        except Exception:  # Python looks for attributes of the exception, which the user's class may refuse
            self.exc_type, self.where = type(error), where
            lines = traceback.format_tb(error.__traceback__)
            self.exc_msg = "".join(["Traceback (most recent call last):\n", *lines, f"{type(error).__name__}\n"])
        self.text = f"Caught {type(error).__name__} {where}.\nOriginal {self.exc_msg}"
        self.sample = ""
        self._message, self._parts = "", None  # of a group
        if isinstance(error, ExceptionGroup):  # as it was made: the user's class may have other attributes
            self._message = ExceptionGroup.message.__get__(error)
            self._parts = [Caught(part, where) for part in ExceptionGroup.exceptions.__get__(error)]

    def drop_types(self, send: Callable[[Any], object]) -> None:
        """Leaves out its type, and those of a group's parts, where `send` raises an error for them."""
        try:
            send(self.exc_type)
        except Exception:  # the type's own pickling may raise anything
            self.exc_type = None
        for part in self._parts or ():
            part.drop_types(send)

    def made_again(self) -> BaseException:
        """The exception that `reraise` raises, without a traceback."""
        error = self._made_again()
        if not self._is_shown(error):
            add_note(error, self.text)
            if not self._is_shown(error):
                error = RuntimeError(self.text)
        return error

    def _made_again(self) -> BaseException:
        if self._parts is not None:
            return self._group([part.made_again() for part in self._parts])
        try:
            if self.exc_type is not None:
                super().reraise()  # type: ignore[no-untyped-call]
        except (KeyboardInterrupt, SystemExit):  # no worker sends these: an interrupt has come in between
            raise
        except BaseException as raised:
            if self._is_torchs(raised):
                return BaseException.with_traceback(raised, None)  # which the class may hide
            # Of a type that has an attribute `message` torch makes one by `message=`, which not all of these take.
            with contextlib.suppress(Exception):
                if isinstance(error := self.exc_type(self.text), BaseException):
                    return error
        return RuntimeError(self.text)

    def _group(self, parts: list[Any]) -> BaseException:
        with contextlib.suppress(Exception):  # the user's class may take other arguments
            if isinstance(group := self.exc_type(self._message, parts), ExceptionGroup):
                return group
        return ExceptionGroup(self._message, parts)

    def _is_torchs(self, error: BaseException) -> bool:
        """Whether torch has made the exception that it raises, and has not failed to."""
        ours = error.__traceback__
        torchs = ours and ours.tb_next
        failed = type(error) is TypeError or (torchs is not None and torchs.tb_next is not None)
        return not failed or self.exc_type in type(error).__mro__

    def _is_shown(self, error: BaseException) -> bool:
        try:
            return self.text.strip() in "".join(traceback.format_exception_only(error))
        except Exception:  # the user's class, as above
            return False

    @override
    def reraise(self) -> None:
        raise self.made_again()


class CaughtText(Caught):
    """An exception of which only the text has come."""

    def __init__(self, text: str) -> None:
        self.exc_type, self.text = None, text
        self.sample, self._parts = "", None


class Served(NamedTuple):
    """What a call of `serve` returns.

    Attributes:
        refused: why the line could not be opened.
        answer: call and the fields of an `Answer` that could not go over the line; it is still open.
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
