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
import copy
import functools
import itertools
import operator
import pickle
import reprlib
import sys
import traceback
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rayloader._compat import InfiniteConstantSampler
from rayloader.errors import StateError
from rayloader.namespaces import functions_of, is_a, names_in, namespace_of
from rayloader.random.generator_kinds import KINDS, distinct, suit
from rayloader.random.random_state import RandomState
from rayloader.random.search import search
from rayloader.resume.drawn import drawn
from rayloader.resume.ranks import Shard, Stage, chain_of, in_batches, order_of, part_of, share
from rayloader.resume.snapshot import dump_state, has_state
from rayloader.resume.state import Moment, OwnState, SamplerState

# Torch's own, and a rank's shard of any sampler: what they give depends on nothing that a state does not hold.
QUIET_SAMPLERS = {
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    InfiniteConstantSampler,
    Shard,
}
_SIMPLE = (int, float, str, bool, type(None))
# The arguments that make a DistributedSampler this rank's; other ranks may continue, see `ranks.py`.
RANK = ("num_replicas", "rank")
_OF_RANK = (*RANK, "num_samples", "total_size")
_DISTRIBUTED = (*RANK, "seed", "shuffle", "drop_last")
_DATA = ("data_source", "dataset")  # names of the attributes for what samplers sample from
_MOST_COPIED = 100_000  # how many objects a sampler may hold to be copied for this check
_ASKED_FOR = 100  # how many batches of two orders are compared: few samples have the same order by chance
_STOCK = {"torch", "rayloader", "typing", "abc", "collections", "builtins"}  # their classes have no state
_END = object()
_NO_STATE = OwnState()

# Simple attributes of samplers when a loader first had them, by id: those changed since are the sampler's progress.
_first_seen: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}


class Samplers:
    """The sampler of a loader and those that it wraps."""

    def __init__(self, loader: Any) -> None:
        self.index_sampler = loader._index_sampler
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self._chain = chain_of(self.index_sampler)
        self._is_stock = not any(map(own_classes, self._chain))
        self._seen = self._contents(loader)
        stateful = [sampler for sampler in self._chain if has_state(sampler)]
        self._stateful = stateful[0] if stateful else None
        innermost = self._chain[-1]
        self.part = part_of(self.index_sampler)
        is_stock = type(innermost) in QUIET_SAMPLERS and {type(s) for s in self._chain[:-1]} <= {BatchSampler}
        # Users of the global generators: the base seed, and samplers. A shard's order does not depend on them.
        shards = type(self.part) is Shard
        self._only_torch = is_stock or shards
        own = loader.generator is not None and (shards or getattr(innermost, "generator", loader.generator) is not None)
        self._needs_global = not (self._only_torch and own)
        self._loaders_own = loader.generator
        self._makes_generator = [_makes_generator(sampler) for sampler in self._chain]
        self._is_shallow = True  # no sampler holds objects that may hold generators
        self._generators = self._find_generators()
        self.name = " of ".join(type(sampler).__name__ for sampler in self._chain)  # names the kinds of samplers
        self._last_state: SamplerState | None = None

    def are_of(self, loader: Any) -> bool:
        """Whether that loader's samplers are still these, and neither their attributes nor the loader's have changed.

        False also if that can't be known without searching everything that a sampler holds.
        """
        if not self._is_shallow:
            return False
        contents = self._contents(loader)
        return len(contents) == len(self._seen) and all(map(operator.is_, contents, self._seen))

    @property
    def are_of_users(self) -> bool:
        """Whether there is one whose class is not torch's, nor rayloader's."""
        return not self._is_stock

    def _contents(self, loader: Any) -> list[Any]:
        """Everything that is looked at here, except for what is inside of a sampler's attributes."""
        contents = [loader._index_sampler, loader.generator, loader.batch_size, loader.drop_last]
        # Torch's samplers hold the ones that they wrap, so that another chain has other contents too.
        for sampler in self._chain if self._is_stock else chain_of(loader._index_sampler):
            attributes = attributes_of(sampler)
            contents += attributes
            contents += attributes.values()
            if not self._is_stock:
                contents += (sampler, *named_generators(sampler))
        return contents

    def iterator(self, stages: Sequence[Stage]) -> Any:
        """The index sampler's iterator; after stages, over what is left for this rank."""
        if not stages:
            return iter(self.index_sampler)
        part = self.part
        assert part is not None
        mine = share(order_of(part), stages, part.num_replicas, part.rank, drop_last=part.drop_last)
        return in_batches(mine, self._batch_size, drop_last=self._drop_last)

    # ---- generators and attributes

    def of_this_rank(self, moment: Moment) -> Moment:
        """A moment of another rank's samplers, converted for these: only what all ranks share is taken from it."""
        own = self.capture()
        attributes = tuple(
            {**theirs, **{name: value for name, value in ours.items() if name in _OF_RANK}}
            for theirs, ours in zip(moment.attributes, own.attributes, strict=True)
        )
        others = moment.random.others
        if others and self._keeps_generator:
            others = own.random.others[:1] + others[1:]  # type: ignore[index]
        return Moment(own.random._replace(others=others), attributes)

    @property
    def _keeps_generator(self) -> bool:
        """Whether the loader's generator does not matter to the samplers: only base seeds are drawn from it."""
        return self._loaders_own is not None and all(g is not self._loaders_own for g in self._held_generators())

    def _find_generators(self) -> list[Any]:
        own = [] if self._loaders_own is None else [self._loaders_own]
        return own + [g for g in self._held_generators() if g is not self._loaders_own]

    def _held_generators(self) -> list[Any]:
        found: list[Any] = []
        for sampler in self._chain:
            attributes = attributes_of(sampler).items()
            inner = {k: v for k, v in attributes if type(v) not in _SIMPLE and not self._is_searched(k, v)}
            if inner:  # torch's own have none, and some frameworks make a state before every batch
                found += [one.generator for one in search(inner)]
                self._is_shallow &= all(isinstance(value, KINDS) for value in inner.values())
            found += named_generators(sampler)
        return distinct(found)

    def _is_searched(self, name: str, value: Any) -> bool:
        """Whether an attribute of a sampler is searched elsewhere."""
        named = name in (*_DATA, "sampler") and type(value) not in _SIMPLE
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
        return tuple(_simple(sampler) for sampler in self._chain)

    def random(self) -> RandomState:
        """The current states of the generators that `iter()` and the samplers draw from."""
        if any(self._makes_generator):
            self._generators = self._find_generators()
        random = RandomState.capture(self._generators, only_torch=self._only_torch)
        if not self._needs_global:
            random = random._replace(torch=None)
        return random

    def restore(self, moment: Moment, progress: list[list[str]]) -> None:
        """Restores the generators, and the attributes that `progress` names for each sampler."""
        changed = tuple(
            {name: value for name, value in simple.items() if name in names or (makes and name == "generator")}
            for simple, names, makes in zip(moment.attributes, progress, self._makes_generator, strict=True)
        )
        self.move_to(Moment(moment.random, changed))

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
        return tuple(
            tuple(
                name for name, value in _simple(sampler).items() if name not in first or not _same(value, first[name])
            )
            for sampler, first in zip(self._chain, map(_first_attributes, self._chain), strict=True)
        )

    def _check_generators(self, moment: Moment) -> None:
        others = moment.random.others
        if others is not None and not suit(self._generators, others):
            raise StateError(
                f"the state is of a loader whose sampler has {len(others)} random generators of its own, this "
                f"one has {len(self._generators)}, or others; make the loader as the one that was saved, with all "
                "generators from the beginning, or give the sampler state_dict() and load_state_dict()"
            )

    def check_attributes(self, moment: Moment) -> None:
        """Raises StateError if samplers, at another moment, can't have had these attributes."""
        for sampler, simple, makes in zip(self._chain, moment.attributes, self._makes_generator, strict=True):
            for name, value in simple.items():
                if makes and name == "generator" and value is None:
                    continue  # see _has_made
                here = attributes_of(sampler).get(name)
                is_held = self._is_searched(name, here) or is_a(here, KINDS) or (callable(here) and value is not None)
                is_torchs = not own_classes(sampler) or _is_epoch(sampler, name)
                if is_held or (is_torchs and not _alike(value, here)):
                    raise StateError(
                        f"the state has {name}={value!r} of the sampler {type(sampler).__name__}, and it can't become "
                        f"that here, where it is {reprlib.repr(here)}; make the sampler as the one that was saved"
                    )

    def check(self, saved: Moment, sampler_state: SamplerState, *, any_rank: bool) -> list[list[str]]:
        """Raises StateError if the saved samplers were created with other arguments than these.

        An attribute that has changed in neither of the two runs, and differs, is an argument.

        Args:
            saved: what the samplers were when the state was saved.
            sampler_state: the rest of the state that is about them.
            any_rank: whether the state may be another rank's.

        Returns:
            For each sampler, the attributes that have changed, there or here.
        """
        self._has_made(saved)
        self._check_generators(saved)
        self.check_attributes(saved)
        progress, tells = sampler_state.progress, sampler_state.tells
        both = [sorted({*theirs, *ours}) for theirs, ours in zip(progress, self.progress(), strict=True)]
        for sampler, simple, moves in zip(self._chain, saved.attributes, both, strict=True):
            own = _simple(sampler)
            for name in own.keys() & simple.keys():
                if isinstance(sampler, DistributedSampler) and name in _DISTRIBUTED:
                    matters = True
                else:
                    matters = not tells and name not in moves
                if _is_epoch(sampler, name):
                    moves.append(name)
                elif matters and not (any_rank and name in _OF_RANK) and not _same(own[name], simple[name]):
                    _refuse(sampler, name, simple[name], own[name])
        return both

    def keep_more(self, dataset: Any, others: list[Any]) -> bool:
        """Whether the user's samplers have state that neither a `Moment` nor their own state contains, and draw by it.

        Iterates over copies of them twice from the same moment on. They share the dataset, which may be large. If a
        sampler can't be copied or read, False.

        Args:
            dataset: that the samplers sample from.
            others: generators that are restored together with the samplers' own.
        """
        if self._stateful is not None or not any(map(own_classes, self._chain)):
            return False
        shared = [dataset, *(getattr(sampler, name, None) for sampler in self._chain for name in _DATA)]
        shared += [value for one in shared for value in attributes_of(one).values()]  # for instance a subset's dataset
        given = types.SimpleNamespace(batch_size=self._batch_size, drop_last=self._drop_last)
        before = RandomState.capture(followed := distinct([*self._generators, *others]))
        try:
            given._index_sampler, given.generator = copy.deepcopy(
                (self.index_sampler, self._loaders_own), _Copied({id(one): one for one in shared})
            )
            copies = Samplers(given)
            moment = copies.capture()
            first = copies._draw()
            before.restore(followed)
            copies.move_to(moment)
            return first != copies._draw()
        except Exception:  # of the user's own code, which may raise anything
            return False
        finally:
            before.restore(followed)

    def _draw(self) -> int:
        """A checksum of the first batches that the sampler yields."""
        checksum = 0
        for indices in itertools.islice(self.index_sampler, _ASKED_FOR):
            checksum = drawn(indices, checksum).checksum
        return checksum

    # ---- the own states of the user's samplers

    def is_stateful(self, iterator: Any) -> bool:
        """Whether the sampler, or its iterator, has a state_dict."""
        return has_state(iterator) or self._stateful is not None

    def state(self, own: bytes | None, *, tells: bool, asked: bool) -> SamplerState:
        """The samplers, for a state; the last one as long as `are_of` says that nothing has changed since."""
        last = self._last_state
        if last is None or (last.own, last.tells, last.asked) != (own, tells, asked):
            self._last_state = last = SamplerState(own, self.attributes(), self.progress(), tells, asked)
        return last

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

    def load_between_epochs(self, state: bytes | None) -> None:
        """Loads a state from between two epochs: the next epoch is a whole one.

        Samplers differ in what such a state says: that they begin, or, like torchdata's, that everything was yielded.
        Such a sampler is iterated once, yields nothing, and then begins.
        """
        self.load(state)
        if self._stateful is None or state is None:
            return
        before = self.capture()
        is_at_end = next(iter(self.index_sampler), _END) is _END
        if is_at_end:
            before.random.restore(self._generators)
        else:
            self.move_to(before)
            self.load(state)


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
            return _simple(sampler)
        _first_seen[key] = reference, _simple(sampler)
    return _first_seen[key][1]


def _simple(sampler: Any) -> dict[str, Any]:
    return {name: value for name, value in attributes_of(sampler).items() if type(value) in _SIMPLE}


def _makes_generator(sampler: Any) -> bool:
    """Whether it creates its generator on first use, as Accelerate's does."""
    had: Any = _first_attributes(sampler).get("generator", sampler)
    return had is None and type(sampler) not in QUIET_SAMPLERS


def _alike(a: Any, b: Any) -> bool:
    """Whether an attribute may have both values: of one type, or whole numbers, truth values and None."""
    return type(a) is type(b) or {type(a), type(b)} <= {int, bool, type(None)}


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)


def _is_epoch(sampler: Any, name: str) -> bool:
    """Whether it is the epoch that the program sets."""
    return hasattr(sampler, "set_epoch") and "epoch" in name.lower()


def _refuse(sampler: Any, name: str, saved: Any, own: Any) -> None:
    what = f"the state was saved with {name}={saved!r} of the sampler {type(sampler).__name__}, which is {own!r} here"
    if isinstance(saved, (float, str)) or isinstance(own, (float, str)):  # a path, a time: perhaps irrelevant
        warnings.warn(
            f"{what}: if the order of the samples depends on it, the batches are others than those of the saved run; "
            "make the sampler as the one that was saved, or give it state_dict() and load_state_dict()",
            stacklevel=4,
        )
        return
    raise StateError(
        f"{what}: its batches would not be the rest of the same stream; make the sampler as the one that was saved"
        + (", or load the list of all ranks' states" if name in RANK else "")
        + ", or, if the attribute says how far the sampler is, give it state_dict() and load_state_dict()"
    )


class _Copied(dict[int, Any]):
    """The memo of `copy.deepcopy`, with a limit on the number of objects."""

    def __setitem__(self, key: int, value: Any) -> None:
        if len(self) >= _MOST_COPIED:
            raise OverflowError("too many objects")
        super().__setitem__(key, value)


# ---- what is in a sampler; no code of the user's runs


def attributes_of(obj: Any) -> dict[str, Any]:
    """The attributes of an object by name, without those in `__slots__`; a list, for instance, has none."""
    attributes: dict[str, Any] = getattr(obj, "__dict__", {})
    return attributes


def own_classes(sampler: Any) -> list[type]:
    """The classes of a sampler that do not belong to torch or Python."""
    if _is_stock(type(sampler).__module__):
        return []
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
