"""The samplers of a loader that loads a state: whether the state fits them, and what it sets in them.

Promise: nothing is set before it is known that the state fits. Imported only where a state is loaded.
"""

from __future__ import annotations

import copy
import itertools
import reprlib
import types
import warnings
from typing import Any

from torch.utils.data import DistributedSampler

from rayloader.errors import StateError
from rayloader.namespaces import is_a
from rayloader.random.generator_kinds import KINDS, distinct
from rayloader.random.random_state import RandomState
from rayloader.resume.digest import drawn
from rayloader.resume.samplers import (
    DATA,
    Moment,
    Samplers,
    SamplerState,
    attributes_of,
    own_classes,
    same,
    simple_in,
)

# The arguments that make a DistributedSampler this rank's; other ranks may continue, see `ranks.py`.
RANK = ("num_replicas", "rank")
_OF_RANK = (*RANK, "num_samples", "total_size")
_DISTRIBUTED = (*RANK, "seed", "shuffle", "drop_last")
_MOST_COPIED = 100_000  # how many objects a sampler may hold to be copied for this check
_ASKED_FOR = 100  # how many batches of two orders are compared: few samples have the same order by chance
_END = object()


class LoadedSamplers(Samplers):
    """Those of a loader that loads a state."""

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

    def restore(self, moment: Moment, progress: list[list[str]]) -> None:
        """Restores the generators, and the attributes that `progress` names for each sampler."""
        changed = tuple(
            {name: value for name, value in simple.items() if name in names or (makes and name == "generator")}
            for simple, names, makes in zip(moment.attributes, progress, self._makes_generator, strict=True)
        )
        self.move_to(Moment(moment.random, changed))

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
            own = simple_in(sampler)
            for name in own.keys() & simple.keys():
                if isinstance(sampler, DistributedSampler) and name in _DISTRIBUTED:
                    matters = True
                else:
                    matters = not tells and name not in moves
                if _is_epoch(sampler, name):
                    moves.append(name)
                elif matters and not (any_rank and name in _OF_RANK) and not same(own[name], simple[name]):
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
        shared = [dataset, *(getattr(sampler, name, None) for sampler in self._chain for name in DATA)]
        shared += [value for one in shared for value in attributes_of(one).values()]  # for instance a subset's dataset
        given = types.SimpleNamespace(batch_size=self.batch_size, drop_last=self.drop_last)
        before = RandomState.capture(followed := distinct([*self._generators, *others]))
        try:
            given._index_sampler, given.generator = copy.deepcopy(
                (self.index_sampler, self._loaders_own), _Copied({id(one): one for one in shared})
            )
            copies = LoadedSamplers(given)
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


def _alike(a: Any, b: Any) -> bool:
    """Whether an attribute may have both values: of one type, or whole numbers, truth values and None."""
    return type(a) is type(b) or {type(a), type(b)} <= {int, bool, type(None)}


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
