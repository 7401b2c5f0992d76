"""The samplers of a loader: what they draw from, and how to make them draw the same again.

Promise: independent of Ray and of workers. The generators and attributes that a sampler and a loader's base seed draw
from can be captured, restored, and set for a while (`Samplers.at`) without a visible effect.

NOTE [What a state moves]: the random generators, the samplers and their epoch belong to the program.
`load_state_dict` immediately sets them to what they were when the state was saved; later changes by the program take
effect. At `iter()` a loader draws from them what torch's loader would have drawn there, and nothing else. So the
`iter()` that continues in the middle of an epoch draws nothing: the uninterrupted run called no `iter()` at that
point. The indices that were drawn before the state was saved are drawn again from copies of the generators as they
were when the epoch began (`Samplers.at`); later draws come from the program's generators, as in the uninterrupted run.
A state that was saved between two epochs changes nothing at `iter()`.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rayloader._compat import InfiniteConstantSampler
from rayloader.errors import StateError
from rayloader.namespaces import functions_of, is_a, names_in, namespace_of
from rayloader.random.generators import KINDS, RandomState, distinct, suits
from rayloader.random.search import search
from rayloader.resume.snapshot import dump_state, has_state

# Torch's own, and those of `SHARDS`: what they give depends on nothing that a state does not hold. So is it with plans.
QUIET_SAMPLERS = {
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    InfiniteConstantSampler,
}
SHARDS: set[type] = set()  # samplers of `ranks.py`, if that was imported: a rank's part of any other
_MOST_HELD = 20  # samplers in each other
_SIMPLE = (int, float, str, bool, type(None))
DATA = ("data_source", "dataset")  # names of the attributes for what samplers sample from
_STOCK = {"torch", "rayloader", "typing", "abc", "collections", "builtins"}  # their classes have no state

# Simple attributes of samplers when a loader first had them, by id: those changed since are the sampler's progress.
_first_seen: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


class Moment(NamedTuple):
    """The state of a loader's samplers at one moment, apart from their own `state_dict`.

    Attributes:
        random: the generators that the samplers and the base seed draw from.
        attributes: simple ones (numbers, strings, booleans, None) of each sampler, the outermost first.
    """

    random: RandomState
    attributes: tuple[dict[str, Any], ...]


class OwnState(NamedTuple):
    """The result of `state_dict` of a sampler, and of its iterator, pickled; or why there is none."""

    sampler: bytes | None = None
    iterator: bytes | None = None
    error: str = ""


class SamplerState(NamedTuple):
    """What a state says of the samplers beside their `Moment`.

    Attributes:
        own: the result of the sampler's `state_dict`, pickled.
        progress: for each sampler, the attributes that had changed since a loader first had it.
        tells: whether a `state_dict` of the sampler, or of its iterator, contains its state.
    """

    own: bytes | None
    progress: tuple[tuple[str, ...], ...]
    tells: bool


class Start(NamedTuple):
    """A point of an epoch from which the sampler can be read again: before its first draw, or after that.

    The second is for samplers with a state of their own. Some continue exactly from a state saved between two epochs,
    others only from one saved in the middle of an epoch.
    """

    moment: Moment
    own: OwnState = OwnState()
    first: Any = None  # after the first draw: its result
    checksum: int = 0  # of that
    drawing: Moment | None = None  # before the first draw, if the sampler's iterator was created some time before


Ranges = list[tuple[int, int]]  # of places in a rank's share: the first, and the one after the last
Stage = list[Ranges]  # what a set of ranks has taken of an epoch: the places of each rank


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


_NO_STATE = OwnState()


class Planned(Sampler):  # type: ignore[type-arg]  # whose parameters are torch's affair
    """A sampler whose order is a function of its arguments and its epoch, and is known as a whole; see plans/plan.py.

    It has `set_epoch`, and holds no random generator. The order may depend on the number of ranks, and its length is a
    multiple of that.
    """

    _gives_batches = False  # whether its items are lists of samples

    def order_for(self, num_replicas: int) -> Sequence[Any]:
        """All items of this epoch; of these, rank `r` gets `[r::num_replicas]`."""
        raise NotImplementedError


def check_plans(loader: Any) -> None:
    """Raises ValueError where a loader would make batches of a plan's batches, or takes its samples for batches."""
    samplers = [sampler.sampler for sampler in chain_of(loader._index_sampler) if type(sampler) is BatchSampler]
    for plan in map(_plan_of, samplers):
        if plan is not None and plan._gives_batches:
            raise ValueError(
                f"a {type(plan).__name__} gives whole batches, and a sampler with a batch_size must give samples; pass "
                "it as batch_sampler=, without batch_size"
            )
    plan = _plan_of(loader.batch_sampler)
    if plan is not None and not plan._gives_batches:
        raise ValueError(
            f"a {type(plan).__name__} gives samples, and batch_sampler must give batches; pass it as sampler=, with "
            "batch_size="
        )


def _plan_of(sampler: Any) -> Planned | None:
    """The plan that a sampler is, or of which it is a rank's part."""
    whole = sampler.sampler if type(sampler) in SHARDS else sampler
    return whole if isinstance(whole, Planned) else None


def is_quiet(sampler: Any) -> bool:
    """Whether it is one of these samplers, or a plan."""
    return type(sampler) in QUIET_SAMPLERS or isinstance(sampler, Planned)


class Samplers:
    """The sampler of a loader and those that it wraps."""

    def __init__(self, loader: Any) -> None:
        self.index_sampler = loader._index_sampler
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self._chain = chain_of(self.index_sampler)
        self.are_of_users = any(map(own_classes, self._chain))  # there is one that is neither torch's nor rayloader's
        stateful = [sampler for sampler in self._chain if has_state(sampler)]
        self._stateful = stateful[0] if stateful else None
        innermost = self._chain[-1]
        self.part = part_of(self.index_sampler)
        is_stock = is_quiet(innermost) and {type(s) for s in self._chain[:-1]} <= {BatchSampler}
        # Users of the global generators: the base seed, and samplers. A shard's order does not depend on them.
        shards = type(self.part) in SHARDS
        self._only_torch = is_stock or shards
        own = loader.generator is not None and (shards or getattr(innermost, "generator", loader.generator) is not None)
        self._needs_global = not (self._only_torch and own)
        self._loaders_own = loader.generator
        self._makes_generator = [_makes_generator(sampler) for sampler in self._chain]
        self._generators = self._find_generators()
        self.name = " of ".join(type(sampler).__name__ for sampler in self._chain)  # names the kinds of samplers

    # ---- generators and attributes

    def _find_generators(self) -> list[Any]:
        own = [] if self._loaders_own is None else [self._loaders_own]
        return own + [g for g in self._held_generators() if g is not self._loaders_own]

    def _held_generators(self) -> list[Any]:
        found: list[Any] = []
        for sampler in self._chain:
            if isinstance(sampler, Planned):  # it holds none
                continue
            attributes = attributes_of(sampler).items()
            inner = {k: v for k, v in attributes if type(v) not in _SIMPLE and not self._is_searched(k, v)}
            if inner:  # torch's own have none, and some frameworks make a state before every batch
                found += search(inner).values()
            found += named_generators(sampler)
        return distinct(found)

    def _is_searched(self, name: str, value: Any) -> bool:
        """Whether an attribute of a sampler is searched elsewhere."""
        named = name in (*DATA, "sampler") and type(value) not in _SIMPLE
        return named or any(value is sampler for sampler in self._chain)

    def _has_made(self, moment: Moment) -> None:
        """Gives samplers that create their generator on first use one, or none, as at that moment."""
        for sampler, simple, makes in zip(self._chain, moment.attributes, self._makes_generator, strict=True):
            if makes and "generator" in simple:
                sampler.generator = None
            elif makes and sampler.generator is None:
                sampler.generator = torch.Generator()
        self._generators = self._find_generators()

    def capture(self) -> Moment:
        """The generators that `iter()` and the samplers draw from, and the samplers' attributes."""
        return Moment(self.random(), self.attributes())

    def attributes(self) -> tuple[dict[str, Any], ...]:
        """The current simple attributes of each sampler."""
        return tuple(simple_in(sampler) for sampler in self._chain)

    def random(self) -> RandomState:
        """The current states of the generators that `iter()` and the samplers draw from."""
        if any(self._makes_generator):
            self._generators = self._find_generators()
        random = RandomState.capture(self._generators, only_torch=self._only_torch)
        if not self._needs_global:
            random = random._replace(torch=None)
        return random

    @contextlib.contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """Temporarily restores everything to that moment; afterwards to what it was before."""
        before = self.capture()
        self.move_to(moment)
        try:
            yield
        finally:
            self.move_to(before)

    def move_to(self, moment: Moment) -> None:
        """Restores everything to that moment."""
        self._has_made(moment)
        for sampler, simple in zip(self._chain, moment.attributes, strict=True):
            if "epoch" in simple and hasattr(sampler, "set_epoch") and sampler.epoch != simple["epoch"]:
                sampler.set_epoch(simple["epoch"])
            if sampler is not self._stateful:  # otherwise its state_dict() contains the attributes
                attributes_of(sampler).update(simple)
        self._check_generators(moment)
        moment.random.restore(self._generators)

    def progress(self) -> tuple[tuple[str, ...], ...]:
        """For each sampler, the attributes that have changed since a loader first had it."""
        changed = [simple_in(sampler).items() - _first_attributes(sampler).items() for sampler in self._chain]
        return tuple(tuple(sorted(name for name, _ in items)) for items in changed)

    def _check_generators(self, moment: Moment) -> None:
        others = moment.random.others
        own = self._generators
        if others is not None and not (len(own) == len(others) and all(map(suits, own, others))):
            raise StateError(
                f"the state is of a loader whose sampler has {len(others)} random generators of its own, this "
                f"one has {len(own)}, or others; make the loader as the one that was saved, with all "
                "generators from the beginning, or give the sampler state_dict() and load_state_dict()"
            )

    # ---- the own states of the user's samplers

    def is_stateful(self, iterator: Any) -> bool:
        """Whether the sampler, or its iterator, has a state_dict."""
        return has_state(iterator) or self._stateful is not None

    def own_state(self) -> OwnState:
        """The sampler's own state."""
        return _NO_STATE if self._stateful is None else OwnState(**_own_state(self._stateful, "sampler"))

    def with_iterator(self, own: OwnState, iterator: Any) -> OwnState:
        """That state, and the one of its iterator if that is another object."""
        if iterator is self._stateful or not has_state(iterator):
            return own
        return own._replace(**_own_state(iterator, "iterator"))

    def load(self, state: bytes | None) -> None:
        """Loads the sampler's own state."""
        if self._stateful is not None and state is not None:
            self._stateful.load_state_dict(pickle.loads(state))


def part_of(index_sampler: Any) -> DistributedSampler[Any] | None:
    """The sampler of a loader that yields this rank's part, if its whole order can be drawn."""
    found = [sampler for sampler in chain_of(index_sampler) if type(sampler) in {DistributedSampler, *SHARDS}]
    return found[0] if found else None


def chain_of(sampler: Any, until: tuple[type, ...] = ()) -> list[Any]:
    """A sampler and those that it holds, the innermost last; or up to the first one of these types.

    Some objects have a `sampler` without end: a `Mock`, or a proxy that wraps its inner one anew at each access.
    """
    chain: list[Any] = []
    while sampler is not None and len(chain) < _MOST_HELD and not any(sampler is known for known in chain):
        chain.append(sampler)
        if isinstance(sampler, until):
            break
        inner = _held(sampler, "sampler")
        sampler = inner if inner is not None else _held(sampler, "batch_sampler")
    return chain


def _held(sampler: Any, name: str) -> Any:
    """An attribute of a sampler, if it is the same object whenever it is read: torch does not read it at all."""
    try:
        value = getattr(sampler, name, None)  # it may be a tensor, which has no truth value
        return value if value is None or value is getattr(sampler, name) else None
    except Exception:  # of the user's own code, which may raise anything
        return None


def tell_epoch(parts: list[Any], epoch: int) -> None:
    """Sets the epoch of those of a loader's parts that have `set_epoch`."""
    for part in parts:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def trains_in_a_group() -> bool:
    """Whether this process is one of several of torch.distributed's, whatever its loaders were told."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_in(loader: Any, samplers: Samplers) -> Any:
    """What divides a loader's data among ranks, with their number and its own; None if nothing does."""
    return samplers.part if samplers.part is not None else loader._ranks


class Resuming:
    """A loader as seen by torch's iterators; creating one from it draws nothing from the program's generators."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._index_sampler = ()
        self.generator = torch.Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def note_first_attributes(loader: Any) -> None:
    """Remembers the attributes of a loader's samplers at its creation."""
    for sampler in chain_of(loader._index_sampler):
        _first_attributes(sampler)


def _own_state(obj: Any, name: str) -> dict[str, Any]:
    try:
        return {name: dump_state(obj)}
    except Exception:  # the user's state_dict() may raise anything, and its result may be impossible to copy
        return {"error": traceback.format_exc()}


def _first_attributes(sampler: Any) -> dict[str, Any]:
    key = id(sampler)
    if key not in _first_seen:
        try:
            reference = weakref.ref(sampler, lambda _: _first_seen.pop(key, None))
        except TypeError:  # a list, for instance: it has no attributes
            return simple_in(sampler)
        _first_seen[key] = reference, simple_in(sampler)
    return _first_seen[key][1]


def simple_in(sampler: Any) -> dict[str, Any]:
    """The simple attributes of a sampler."""
    return {name: value for name, value in attributes_of(sampler).items() if type(value) in _SIMPLE}


def _makes_generator(sampler: Any) -> bool:
    """Whether it creates its generator on first use, as Accelerate's does."""
    had: Any = _first_attributes(sampler).get("generator", sampler)
    return had is None and not is_quiet(sampler)


# ---- what is in a sampler; no code of the user's runs


def attributes_of(obj: Any) -> dict[str, Any]:
    """The attributes of an object by name, without those in `__slots__`; a list, for instance, has none."""
    attributes: dict[str, Any] = getattr(obj, "__dict__", {})
    return attributes


def own_classes(sampler: Any) -> list[type]:
    """The classes of a sampler that do not belong to torch or Python."""
    return [kind for kind in type(sampler).__mro__ if not _is_stock(kind.__module__)]


def named_generators(sampler: Any) -> list[Any]:
    """The generators that a sampler does not hold itself: attributes of its classes, and globals that these name."""
    found: list[Any] = []
    for kind in own_classes(sampler):
        members, contents = list(vars(kind).values()), namespace_of(sys.modules.get(kind.__module__))
        names = {name for member in members for one in functions_of(member) for name in names_in(one.__code__)}
        found += [*members, *(value for name, value in list(contents.items()) if name in names)]
    return [value for value in found if is_a(value, KINDS)]


@functools.lru_cache(maxsize=256)
def _is_stock(module: str) -> bool:
    return module.partition(".")[0] in _STOCK
