"""The samplers of a loader that loads a state: whether the state fits them, and what it sets in them.

Promise: nothing is set before it is known that the state fits. Imported only where a state is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rayloader.resume.samplers import Moment, Samplers, SamplerState

# The arguments that make a DistributedSampler this rank's; other ranks may continue, see `ranks.py`.
RANK = ("num_replicas", "rank")
_OF_RANK = (*RANK, "num_samples", "total_size")
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

    def with_arguments(self, moment: Moment, names: Sequence[Collection[str]]) -> Moment:
        """A moment with these samplers' own arguments: it keeps of each sampler the attributes of `names` alone."""
        attributes = tuple(
            {
                name: value if name in those or (makes and name == "generator") else own.get(name, value)
                for name, value in simple.items()
            }
            for simple, own, those, makes in zip(
                moment.attributes, self.attributes(), names, self._makes_generator, strict=True
            )
        )
        return Moment(moment.random, attributes)

    def check(self, saved: Moment, sampler_state: SamplerState) -> list[set[str]]:
        """Raises StateError if these samplers can't become what the saved ones were.

        Args:
            saved: what the samplers were when the state was saved.
            sampler_state: the rest of the state that is about them.

        Returns:
            For each sampler, the attributes that have changed, there or here, since a loader first had it, and its
            epoch: the others are its arguments, and stay.
        """
        self._has_made(saved)
        self._check_generators(saved)
        epochs = [
            [name for name in simple if _is_epoch(sampler, name)]
            for sampler, simple in zip(self._chain, saved.attributes, strict=True)
        ]
        parts = zip(sampler_state.progress, self.progress(), epochs, strict=True)
        return [{*theirs, *ours, *epoch} for theirs, ours, epoch in parts]

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


def _is_epoch(sampler: Any, name: str) -> bool:
    """Whether it is the epoch that the program sets."""
    return hasattr(sampler, "set_epoch") and "epoch" in name.lower()
