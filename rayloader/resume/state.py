"""What a state holds: its records, their plain form, and the one place where it is checked.

Promise: `State.load(state.pack())` is the same state, also after `torch.save` and `torch.load(weights_only=True)`; what
is foreign, incomplete or of another version is refused. Nobody else reads what `state_dict()` returned. It is a dict of
the fields of `State`, and so are the records inside: of primitives, bytes and tensors, except for what a dataset's or
sampler's own `state_dict` returns.

NOTE [Same parts]. Some frameworks request a state before every batch, and most of a state is unchanged since the last
batch. How the epoch began, and where workers start, is packed once, and all states share it.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import reprlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rayloader.errors import NESTING, StateError, too_deep
from rayloader.random.generators import RandomState
from rayloader.resume.digest import Drawn
from rayloader.resume.journal import Before, Resumed
from rayloader.resume.samplers import EpochBegin, Moment, OwnState, SamplerState, Start
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Step, Task
from rayloader.transport import codec
from rayloader.transport.pickler import ByIdPickler, dumped

FORMAT, VERSION = "rayloader", 20
# Batches taken of the epoch in progress, by torchdata's name: Accelerate lowers it if it has fetched batches
# that are not dispatched to other processes yet.
_TORCHDATAS = {"_snapshot", "_sampler_iter_yielded"}  # of which the states of torchdata's loader have one
TAKEN = "_num_yielded"
_ARRAY, _SCALAR = "rayloader: array", "rayloader: scalar"  # key of a tensor, in a dict with the name of its dtype
_ATOMS = {int, float, str, bytes, bool, type(None)}

# ---- records


class Fits(NamedTuple):
    """What a state and a loader must have in common: other values of these mean another stream."""

    batch_size: int | None
    drop_last: bool
    seeding: str
    scheduling: str
    in_order: bool
    dataset_kind: str
    dataset_length: int | None
    sampler: str  # names the kinds of samplers
    num_replicas: int | None = None  # None: the loader is not one of several ranks
    rank: int | None = None


class LocalState(NamedTuple):
    """Of a loader without workers: all generators of the program and of the dataset, and the dataset's own state."""

    random: RandomState
    dataset: bytes | None

    @property
    def remembers(self) -> bool:
        """Whether batches depend on earlier ones, even if each batch is seeded by itself."""
        return self.dataset is not None or bool(self.random.held)


@dataclass(slots=True)
class Stream:
    """The iterator of the dataset of a loader without workers, with what a resumption must know about it.

    Attributes:
        begin: the generators before it was created; None if it need not be read again.
        state: of an iterator that has one, when the loader's state was saved; also in the iterator that has
            loaded it, until that is asked for a sample.
        digest: of the batches of a stream that must be read again.
        ended: whether it has ended in the middle of the last batch.
        iterator: if it has a state, not in a loader's state; None: none was created since that was loaded.
    """

    begin: RandomState | None = None
    state: bytes | None = None
    digest: int = 0
    ended: bool = False
    iterator: Any = field(default=None, init=False)


class WorkerStart(NamedTuple):
    """Where another process starts that continues a worker, and how it is proven that it arrives there."""

    state: WorkerState | None = None
    before: Before | None = None


class SavedWorker(NamedTuple):
    """A worker at the user's position.

    Attributes:
        start: where another process starts.
        remembers: see `Journal.remembers`.
        to_rebuild: what it builds again from there: numbers of tasks, with the digests of the delivered batches.
    """

    start: WorkerStart = WorkerStart()
    remembers: bool = False
    to_rebuild: tuple[tuple[int, int], ...] = ()


class SavedPlace(NamedTuple):
    """The user's position in an epoch.

    Attributes:
        begin: what stays the same.
        stream: without workers.
        workers: one for each.
        ahead: tasks that were taken after `next_task`.
        next_task: all tasks before it are taken.
        next_worker: whose batch comes next.
        delivered: batches.
        checksum: of the indices before `next_task`.
        skipped: samples.
        finished: whether the last batch was taken.
        draws: from the sampler, including the one that found its end.
        drawn: how many tasks `drawn_checksum` covers.
        drawn_checksum: of the indices of the drawn tasks, as far as it is known.
    """

    begin: EpochBegin
    stream: Stream | None
    workers: tuple[SavedWorker, ...]
    ahead: tuple[int, ...]
    next_task: int
    next_worker: int
    delivered: int
    checksum: int
    skipped: int
    finished: bool
    draws: int
    drawn: int
    drawn_checksum: int

    @property
    def remembers(self) -> bool:
        """Whether batches depend on earlier ones, even if each batch is seeded by itself."""
        return any(worker.remembers for worker in self.workers)


Packed = dict[Hashable, tuple[Any, Any]]  # parts by name: what each was packed from, and what that gave


def _part(known: Packed, name: Hashable, source: Any, pack: Callable[[Any], Any]) -> Any:
    """A part of a state, packed from a record; the last one of this name if its fields are the same objects."""
    last = known.get(name)
    if last is None or not all(map(operator.is_, source, last[0])):
        known[name] = last = source, pack(source)
    return last[1]


@contextlib.contextmanager
def as_saved() -> Iterator[None]:
    """Around what reads a state, without code of the user's.

    Raises:
        StateError: the block has raised, because the state is not what `State.pack` has returned.
    """
    try:
        yield
    except (StateError, Warning):  # a filter may make an error of a warning
        raise
    except Exception as error:  # depends on what is there instead
        raise StateError(
            f"the state is not what state_dict() gave, and can't be read ({type(error).__name__}: {error}); load it as "
            "it was saved, or an earlier state"
        ) from error


class State(NamedTuple):
    """The state of a loader.

    Attributes:
        num_workers: that the batches depend on.
        fits: what it must have in common with the loader that loads it.
        now: the program's samplers, and the generators from which they and the base seed draw.
        sampler: what else there is to the samplers.
        process: the program's own objects that do the work; None: workers do.
        position: in the epoch; None: the next `iter()` begins one.
        epoch: the number of the epoch that the next `iter()` continues or begins, of all of the run, from 0.
        skip_steps: what `skip_steps` named, as pairs of an epoch and a step.
        redeal: how an epoch of other ranks began, which the next `iter()` continues with new workers.
    """

    num_workers: int
    fits: Fits
    now: Moment
    sampler: SamplerState
    process: LocalState | None
    position: SavedPlace | None
    epoch: int
    skip_steps: tuple[Step, ...]
    redeal: EpochBegin | None = None

    @property
    def taken(self) -> int:
        """Batches taken of the epoch that the next `iter()` continues."""
        return 0 if self.position is None or self.position.finished else self.position.delivered

    @property
    def step(self) -> int:
        """The first step of that epoch that was not taken; see `Position.step_of`."""
        place = self.position
        if place is None or place.finished:
            return 0
        return place.delivered if self.fits.dataset_kind == "iterable" else place.next_task

    @property
    def is_between_epochs(self) -> bool:
        """Whether the next `iter()` begins an epoch."""
        return self.redeal is None and (self.position is None or self.position.finished)

    def pack(self, known: Packed | None = None) -> dict[str, Any]:
        """What `state_dict()` returns; `known`: parts of earlier states of the same position."""
        position = None if self.position is None else _packed_place(self.position, {} if known is None else known)
        return {"format": FORMAT, "version": VERSION, TAKEN: self.taken, **_STATE.pack(self), "position": position}

    @classmethod
    def load(cls, packed: Any) -> State:
        """The inverse of `pack`. Entries beside those of a state are the program's.

        Raises:
            StateError: it is not what `pack` has returned.
        """
        if isinstance(packed, dict) and _TORCHDATAS & packed.keys() and "format" not in packed:
            raise StateError(
                "this is not a state of a rayloader.DataLoader but of torchdata's StatefulDataLoader, which cannot be "
                "continued exactly here: its order is of other samplers, and it lacks the workers' random streams; "
                "finish that epoch with the loader that saved it, without rayloader.patch()"
            )
        if not isinstance(packed, dict) or packed.get("format") != FORMAT:
            raise StateError(f"this is not a state of a rayloader.DataLoader: {reprlib.repr(packed)}")
        if (version := packed.get("version")) != VERSION:
            raise StateError(
                f"the state has version {version!r}, this rayloader reads {VERSION}; load it with the rayloader that "
                "wrote it"
            )
        if missing := sorted({*cls._fields, TAKEN} - packed.keys()):
            raise StateError(
                f"the state must have all that state_dict() gives, and lacks {', '.join(missing)}; load it as it was "
                "saved"
            )
        with as_saved():
            state: State = _STATE.unpack(packed)
        if (dispatched := packed[TAKEN]) != state.taken:
            raise StateError(
                f"the state says that {state.taken} batches were taken, and {TAKEN}={dispatched!r} dispatched: with "
                "dispatch_batches=True (Accelerate's default for iterable datasets) one process fetches the batches of "
                "all; use dispatch_batches=False, or save between two epochs"
            )
        return state


# ---- their plain form


class _Form(NamedTuple):
    """How values of one kind are packed, and unpacked."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


_AS_IT_IS = _Form(lambda value: value, lambda packed: packed)


def _maybe(form: _Form) -> _Form:
    return _Form(
        lambda value: None if value is None else form.pack(value),
        lambda packed: None if packed is None else form.unpack(packed),
    )


def _each(form: _Form) -> _Form:
    return _Form(
        lambda values: tuple(map(form.pack, values)),
        lambda packed: tuple(map(form.unpack, packed)),
    )


def _record(kind: Any, **forms: _Form) -> _Form:
    """The fields by name: those named here in their forms, and the others as they are."""
    ways = {name: forms.get(name, _AS_IT_IS) for name in kind.__match_args__}
    return _Form(
        lambda record: {name: form.pack(getattr(record, name)) for name, form in ways.items()},
        lambda packed: kind(**{name: form.unpack(packed[name]) for name, form in ways.items()}),
    )


def to_plain(state: Any, depth: int = 0) -> Any:
    """The state with tensors in the place of NumPy's numbers; `depth`: levels above it.

    Raises:
        StateError: there are too many levels.
    """
    if depth > NESTING:
        raise too_deep()
    kind = type(state)
    if kind is dict:
        return {key: to_plain(value, depth + 1) for key, value in state.items()}
    if kind in (list, tuple):
        return state if _ATOMS.issuperset(map(type, state)) else kind([to_plain(part, depth + 1) for part in state])
    if kind is np.ndarray or isinstance(state, np.generic):
        try:
            array, dtype = np.array(state), state.dtype
            # Torch does not unpickle its own tensors of wide unsigned numbers.
            signed = array.view(dtype.str.replace("u", "i")) if dtype.kind == "u" else array
            return {_ARRAY if kind is np.ndarray else _SCALAR: torch.from_numpy(signed), "dtype": dtype.name}
        except (TypeError, ValueError):  # of a dtype that torch has not, or in another byte order
            return state
    return state


def from_plain(packed: Any) -> Any:
    """The inverse of `to_plain`."""
    kind = type(packed)
    if kind in (list, tuple):
        return packed if _ATOMS.issuperset(map(type, packed)) else kind(map(from_plain, packed))
    if kind is not dict:
        return packed
    if packed.keys() == {_ARRAY, "dtype"}:
        return packed[_ARRAY].numpy().copy().view(packed["dtype"])
    if packed.keys() == {_SCALAR, "dtype"}:
        return packed[_SCALAR].numpy().view(packed["dtype"])[()]
    return {key: from_plain(value) for key, value in packed.items()}


def pack_random(random: RandomState) -> dict[str, Any]:
    """The states of generators in plain types; about 14 kB in a file of torch's."""
    packed: dict[str, Any] = to_plain({**random._asdict(), "numpy": random.numpy and random.numpy[1]})
    return packed


def unpack_random(packed: dict[str, Any]) -> RandomState:
    """The inverse of `pack_random`."""
    random = RandomState._make(map(from_plain(packed).__getitem__, RandomState._fields))
    return random._replace(numpy=random.numpy and (b"", random.numpy))


def _pack_object(told: bytes) -> dict[str, Any]:
    return {"state": to_plain(pickle.loads(told))}


def _unpack_object(packed: dict[str, Any]) -> bytes:
    return dumped(from_plain(packed["state"]), ByIdPickler)


def _pack_entry(entry: Task | Resumed) -> dict[str, Any]:
    if isinstance(entry, Resumed):
        return _RESUMED.pack(entry)  # type: ignore[no-any-return]
    return {"task_id": entry.task_id, "indices": to_plain(entry.indices.indices), "digest": entry.digest}


def _unpack_entry(packed: dict[str, Any]) -> Task | Resumed:
    if "task_id" not in packed:
        resumed: Resumed = _RESUMED.unpack(packed)
        return resumed
    digest, drawn = packed["digest"], Drawn(codec.encode(from_plain(packed["indices"])), 0)
    return Task(packed["task_id"], drawn, digest=digest)


def _packed_place(place: SavedPlace, known: Packed) -> dict[str, Any]:
    return {
        **place._asdict(),
        "begin": _part(known, "begin", place.begin, _BEGIN.pack),
        "stream": _STREAM.pack(place.stream),
        "workers": [
            {**worker._asdict(), "start": _part(known, number, worker.start, _WORKER_START.pack)}
            for number, worker in enumerate(place.workers)
        ],
    }


_OBJECT = _maybe(_Form(_pack_object, _unpack_object))  # the pickled state of an object of the user's
_RANDOM = _Form(pack_random, unpack_random)
_RESUMED = _record(Resumed)
_FITS = _record(Fits)
_MOMENT = _record(Moment, random=_RANDOM)
_SAMPLER = _record(SamplerState, own=_OBJECT)
_PROCESS = _record(LocalState, random=_RANDOM, dataset=_OBJECT)
_START = _record(
    Start,
    moment=_MOMENT,
    own=_record(OwnState, sampler=_OBJECT, iterator=_OBJECT),
    first=_Form(to_plain, from_plain),
    drawing=_maybe(_MOMENT),
)
_BEGIN = _record(EpochBegin, starts=_each(_START))
_SNAPSHOT = _maybe(_record(WorkerState, random=_RANDOM, begin=_maybe(_RANDOM), dataset=_OBJECT, iterator=_OBJECT))
_BEFORE = _maybe(_record(Before, state=_SNAPSHOT, entries=_each(_Form(_pack_entry, _unpack_entry))))
_WORKER_START = _record(WorkerStart, state=_SNAPSHOT, before=_BEFORE)
_WORKER = _record(SavedWorker, start=_WORKER_START)
_STREAM = _maybe(_record(Stream, begin=_maybe(_RANDOM), state=_OBJECT))
_PLACE = _record(SavedPlace, begin=_BEGIN, stream=_STREAM, workers=_each(_WORKER))
_STATE = _record(
    State,
    fits=_FITS,
    now=_MOMENT,
    sampler=_SAMPLER,
    process=_maybe(_PROCESS),
    position=_maybe(_Form(lambda _: None, _PLACE.unpack)),  # `State.pack` packs it
    redeal=_maybe(_BEGIN),
)
