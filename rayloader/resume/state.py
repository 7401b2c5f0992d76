"""What a state holds: its records, their plain form, and the one place where it is checked.

Promise: `State.load(state.pack())` is the same state, also after `torch.save` and `torch.load(weights_only=True)`; what
is foreign, incomplete or of another version is refused. Nobody else reads what `state_dict()` returned. It is a dict of
the fields of `State`, and so are the records inside: of primitives, bytes and tensors, except for what a dataset's or
sampler's own `state_dict` returns.

NOTE [Same parts]. Some frameworks request a state before every batch, and most of a state is unchanged since the last
batch. What stays the same is packed once (`Parts`), and all states share it.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import platform
import reprlib
import zlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rayloader._version import __version__
from rayloader.errors import StateError, unfit
from rayloader.random.packed import checked, from_plain, to_plain
from rayloader.random.packed import pack as pack_random
from rayloader.random.packed import unpack as unpack_random
from rayloader.random.random_state import RandomState
from rayloader.resume.digest import Drawn
from rayloader.resume.journal import Before, Resumed
from rayloader.resume.ranks import Stage
from rayloader.resume.samplers import Moment, OwnState, SamplerState, Start
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Step, Task
from rayloader.transport import codec
from rayloader.transport.pickler import ByIdPickler, dumped

FORMAT, VERSION = "rayloader", 18
# What a state of an earlier version would continue otherwise, by the version that has changed it.
CHANGED = {16: 'seeding="batch" draws other random numbers'}
# Batches taken of the epoch in progress, by torchdata's name: Accelerate lowers it if it has fetched batches
# that are not dispatched to other processes yet.
_TORCHDATAS = {"_snapshot", "_sampler_iter_yielded"}  # of which the states of torchdata's loader have one
TAKEN = "_num_yielded"
VERSIONS = {
    "rayloader": __version__,
    "python": platform.python_version(),
    "torch": str(torch.__version__),
    "numpy": np.__version__,
}

_T = TypeVar("_T")


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

    def equals(self, other: LocalState) -> bool:
        """Whether both are the same."""
        return self.dataset == other.dataset and self.random.equals(other.random)

    @property
    def remembers(self) -> bool:
        """Whether batches depend on earlier ones, even if each batch is seeded by itself."""
        return self.dataset is not None or bool(self.random.held)


class EpochBegin(NamedTuple):
    """What of a position stays the same from the epoch's first draw on.

    Attributes:
        base_seed: of the workers.
        shared_seed: of DataPipes.
        epoch: epochs of these workers before this one.
        starts: where the sampler can be read again; each is further than the one before.
        stages: through which the epoch went with other numbers of ranks.
    """

    base_seed: int = 0
    shared_seed: int | None = None
    epoch: int = 0
    starts: tuple[Start, ...] = ()
    stages: tuple[Stage, ...] = ()


@dataclass(slots=True)
class Stream:
    """The iterator of the dataset of a loader without workers, with what a resumption must know about it.

    Attributes:
        begin: the generators before it was created; None if it need not be read again.
        told: the state of an iterator that has one, when the loader's state was saved; also in the iterator that has
            loaded it, until that is asked for a sample.
        digest: of the batches of a stream that must be read again.
        ended: whether it has ended in the middle of the last batch.
        iterator: if it has a state, not in a loader's state; None: none was created since that was loaded.
    """

    begin: RandomState | None = None
    told: bytes | None = None
    digest: int = 0
    ended: bool = False
    iterator: Any = None


class WorkerStart(NamedTuple):
    """Where another process starts that continues a worker, and how it is proven that it arrives there."""

    state: WorkerState | None = None
    before: Before | None = None


class SavedWorker(NamedTuple):
    """A worker at the user's position.

    Attributes:
        start: where another process starts.
        remembers: see `Journal.remembers`.
        replay: what it builds again from there: numbers of tasks, with the digests of the delivered batches.
    """

    start: WorkerStart = WorkerStart()
    remembers: bool = False
    replay: tuple[tuple[int, int], ...] = ()


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


class Parts:
    """The parts of one object's states, each valid as long as its source stays the same; see NOTE [Same parts]."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def part(
        self, name: Hashable, source: _T, pack: Callable[[_T], Any], same: Callable[[_T, _T], bool] = operator.is_
    ) -> Any:
        """The part with this name.

        Args:
            name: of the part.
            source: what it is packed from; it is not changed from now on.
            pack: returns the content of the part.
            same: whether the source equals that of the last part with this name, which is then still valid.
        """
        known = self._known.get(name)
        if known is None or not same(source, known[0]):
            self._known[name] = known = source, pack(source)
        return known[1]


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
        now: the program's generators from which the samplers and the base seed draw.
        sampler: the program's samplers.
        process: the program's own objects that do the work; None: workers do.
        position: in the epoch; None: the next `iter()` begins one.
        epoch: the number of the epoch that the next `iter()` continues or begins, of all of the run, from 0.
        skip_steps: what `skip_steps` named, as pairs of an epoch and a step.
        versions: of what built the batches.
        redeal: how an epoch of other ranks began, which the next `iter()` continues with new workers.
    """

    num_workers: int
    fits: Fits
    now: RandomState
    sampler: SamplerState
    process: LocalState | None
    position: SavedPlace | None
    epoch: int
    skip_steps: tuple[Step, ...]
    versions: dict[str, str]
    redeal: EpochBegin | None = None

    @property
    def moment(self) -> Moment:
        """The samplers when the state was saved."""
        return Moment(self.now, self.sampler.attributes)

    @property
    def begin(self) -> EpochBegin | None:
        """How the epoch began that the next `iter()` continues, or the last one that was taken to its end."""
        return self.redeal if self.position is None else self.position.begin

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

    @property
    def mark(self) -> int:
        """A number that tells this state from those of other places in the stream, and of other runs."""
        place = self.position
        if place is not None:
            place = place._replace(begin=EpochBegin(place.begin.base_seed), stream=None, workers=())
        return zlib.crc32(repr((self.num_workers, self.fits, pack_random(self.now), place)).encode())

    def pack(self, parts: Parts | None = None) -> dict[str, Any]:
        """What `state_dict()` returns; `parts`: of earlier states of the same position."""
        part, process, redeal = (parts := parts or Parts()).part, self.process, self.redeal
        return {
            "format": FORMAT,
            "version": VERSION,
            TAKEN: self.taken,
            "num_workers": self.num_workers,
            "fits": part("fits", self.fits, _FITS.pack, operator.eq),
            "now": part("now", self.now, pack_random, RandomState.equals),
            "sampler": part("sampler", self.sampler, _SAMPLER.pack),
            "process": None if process is None else part("process", process, _PROCESS.pack, LocalState.equals),
            "position": None if self.position is None else _packed_place(self.position, parts),
            "epoch": self.epoch,
            "skip_steps": self.skip_steps,
            "versions": {**self.versions},
            "redeal": None if redeal is None else part("redeal", redeal, _BEGIN.pack),
        }

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
            since = [what for number, what in CHANGED.items() if isinstance(version, int) and version < number]
            why = f", in which {', '.join(since)}" if since else ""
            wrote = packed["versions"].get("rayloader", "") if isinstance(packed.get("versions"), dict) else ""
            raise StateError(
                f"the state has version {version!r}, this rayloader reads {VERSION}{why}; load it with the rayloader "
                f"that wrote it{wrote and f', {wrote}'}"
            )
        if missing := sorted({*cls._fields, TAKEN} - packed.keys()):
            raise StateError(
                f"the state must have all that state_dict() gives, and lacks {', '.join(missing)}; load it as it was "
                "saved"
            )
        with as_saved():
            state: State = _STATE.unpack(packed)
            if state.position is not None and len(state.position.workers) != state.num_workers:
                raise unfit("num_workers", f"that of its workers, {len(state.position.workers)}", state.num_workers)
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
    ways = {name: forms.get(name) or _plain(kind, name) for name in kind._fields}
    return _Form(
        lambda record: {name: form.pack(getattr(record, name)) for name, form in ways.items()},
        lambda packed: kind(**{name: form.unpack(packed[name]) for name, form in ways.items()}),
    )


def _plain(kind: Any, name: str) -> _Form:
    """A field that is packed as it is; a number, text or truth value must be one when it is unpacked."""
    annotation = kind.__annotations__[name]
    types = _SIMPLE.get(getattr(annotation, "__forward_arg__", annotation))

    def unpack(packed: Any) -> Any:
        if types is not None and type(packed) not in types:
            raise unfit(name, f"of type {annotation}", packed)
        return _whole(packed, name, _LEAST.get(name, 0)) if type(packed) is int else packed

    return _Form(lambda value: value, unpack)


def _whole(value: Any, name: str = "numbers", least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise unfit(name, f"a whole number from {least} to 2**63 - 1", value)
    return value


def _unpack_simple(packed: Any) -> dict[str, Any]:
    """Simple attributes of a sampler, whose other attributes are not for a state to set."""
    simple = dict(packed)
    if not {*map(type, simple)} <= {str} or not {*map(type, simple.values())} <= {int, float, str, bool, type(None)}:
        raise unfit("attributes of samplers", "numbers, texts, truth values or None", simple)
    return simple


def _unpack_names(packed: Any) -> tuple[str, ...]:
    if not {*map(type, packed)} <= {str}:
        raise unfit("progress", "names of attributes", packed)
    return tuple(packed)


def _unpack_versions(packed: Any) -> dict[str, str]:
    if not {type(text) for pair in packed.items() for text in pair} <= {str}:
        raise unfit("versions", "texts", packed)
    return {**packed}


def _unpack_stage(packed: Any) -> Stage:
    if not packed:
        raise unfit("stages", "of ranks", packed)
    return Stage([[(_whole(begin), _whole(end)) for begin, end in ranges] for ranges in packed])


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
    return Task(_whole(packed["task_id"]), drawn, digest=None if digest is None else _whole(digest))


def _packed_place(place: SavedPlace, parts: Parts) -> dict[str, Any]:
    stream = place.stream
    return {
        **place._asdict(),
        "begin": parts.part("begin", place.begin, _BEGIN.pack),
        "stream": None
        if stream is None
        else {
            "begin": parts.part("stream", stream.begin, _maybe(_RANDOM).pack),
            "told": _OBJECT.pack(stream.told),
            "digest": stream.digest,
            "ended": stream.ended,
        },
        "workers": [
            {**worker._asdict(), "start": parts.part(number, worker.start, _WORKER_START.pack)}
            for number, worker in enumerate(place.workers)
        ],
    }


def _unpack_stream(packed: dict[str, Any]) -> Stream:
    return Stream(
        _maybe(_RANDOM).unpack(packed["begin"]),
        _OBJECT.unpack(packed["told"]),
        _whole(packed["digest"]),
        packed["ended"] is True,
    )


def _unpacked_place(packed: dict[str, Any]) -> SavedPlace:
    place: SavedPlace = _PLACE.unpack(packed)
    if not place.begin.starts or place.next_worker >= max(1, len(place.workers)):
        raise unfit("next_worker", "one of the workers, in an epoch with a start", place.next_worker)
    return place


def _unpack_pair(packed: Any) -> tuple[int, int]:
    first, second = map(_whole, packed)
    return first, second


_SIMPLE = {"int": (int,), "bool": (bool,), "str": (str,), "int | None": (int, type(None))}
_LEAST = {"last_task": -1, "dataset_epoch": -(2**63)}  # of the numbers that may be negative
_OBJECT = _maybe(_Form(_pack_object, _unpack_object))  # the pickled state of an object of the user's
_RANDOM = _Form(pack_random, lambda packed: checked(unpack_random(packed)))
_ATTRIBUTES = _each(_Form(dict, _unpack_simple))
_PAIRS = _each(_Form(tuple, _unpack_pair))
_STAGES = _each(_Form(lambda stage: stage.taken, _unpack_stage))
_RESUMED = _record(Resumed)
_FITS = _record(Fits)
_MOMENT = _record(Moment, random=_RANDOM, attributes=_ATTRIBUTES)
_SAMPLER = _record(SamplerState, own=_OBJECT, attributes=_ATTRIBUTES, progress=_each(_Form(tuple, _unpack_names)))
_PROCESS = _record(LocalState, random=_RANDOM, dataset=_OBJECT)
_START = _record(
    Start,
    moment=_MOMENT,
    own=_record(OwnState, sampler=_OBJECT, iterator=_OBJECT),
    first=_Form(to_plain, from_plain),
    drawing=_maybe(_MOMENT),
)
_BEGIN = _record(EpochBegin, starts=_each(_START), stages=_STAGES)
_SNAPSHOT = _maybe(_record(WorkerState, random=_RANDOM, begin=_maybe(_RANDOM), dataset=_OBJECT, iterator=_OBJECT))
_BEFORE = _maybe(_record(Before, state=_SNAPSHOT, entries=_each(_Form(_pack_entry, _unpack_entry))))
_WORKER_START = _record(WorkerStart, state=_SNAPSHOT, before=_BEFORE)
_WORKER = _record(SavedWorker, start=_WORKER_START, replay=_PAIRS)
_PLACE = _record(
    SavedPlace,
    begin=_BEGIN,
    stream=_maybe(_Form(dict, _unpack_stream)),
    workers=_each(_WORKER),
    ahead=_each(_Form(int, _whole)),
)
_STATE = _record(
    State,
    fits=_FITS,
    now=_RANDOM,
    sampler=_SAMPLER,
    process=_maybe(_PROCESS),
    position=_maybe(_Form(dict, _unpacked_place)),  # `State.pack` packs it
    skip_steps=_PAIRS,
    versions=_Form(dict, _unpack_versions),
    redeal=_maybe(_BEGIN),
)
