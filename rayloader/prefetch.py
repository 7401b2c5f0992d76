"""How deep to prefetch, and whose sampler allows it.

Promise: says which samplers may be asked earlier than torch's loader would ask them without anybody noticing, and puts
back the one thing that somebody could notice, the state of a generator of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from torch.utils.data.dataloader import _InfiniteConstantSampler

# Bytes of batches under way, of all workers together, where the depth is automatic: three calls of batches of 5 MB from
# each of sixteen workers, and little beside what training takes. More would only hide longer pauses of the workers.
PREFETCH_BYTES = 256 << 20

# Once these have given their first index they draw from no generator that anybody else sees. Subclasses may.
QUIET_SAMPLERS = {
    SequentialSampler,
    RandomSampler,  # see DrawAhead for one with a generator of the user's
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    _InfiniteConstantSampler,
}


class AutomaticPrefetch(int):
    """torch's default for `prefetch_factor`, which nobody asked for; survives being passed to another loader."""


def may_draw_ahead(sampler: Any) -> bool:
    """Whether nobody can tell that its indices are drawn earlier than torch would draw them."""
    innermost = _innermost(sampler)
    if type(innermost) is RandomSampler and innermost.generator is not None:
        # With replacement, or more or fewer samples than there are, it goes on drawing what it gives; see DrawAhead.
        return not innermost.replacement and innermost.num_samples == len(innermost.data_source)
    return type(innermost) in QUIET_SAMPLERS


def _innermost(sampler: Any) -> Any:
    return sampler.sampler if type(sampler) is BatchSampler else sampler


class DrawAhead(Iterator[Any]):
    """A sampler's iterator that may be asked early.

    A `RandomSampler` with a generator of the user's draws from it once more when it has given all its indices: a
    permutation that it then makes no use of. If it was asked for that early, this is undone, and done again when
    `reach` says that torch's loader would have asked.
    """

    def __init__(self, sampler: Any, indices: Iterator[Any]) -> None:
        innermost = _innermost(sampler)
        self._random: RandomSampler | None = None
        if type(innermost) is RandomSampler and innermost.generator is not None:
            self._random = innermost
        self._indices = indices
        self._draws = 0
        self._torch_draws = 0
        self._undone: int | None = None  # the draw that is to be done again

    def __next__(self) -> Any:
        self._draws += 1
        if self._random is None or self._draws <= self._torch_draws:
            return next(self._indices)
        generator = self._random.generator
        before = generator.get_state()
        try:
            return next(self._indices)
        finally:
            if not torch.equal(generator.get_state(), before):
                generator.set_state(before)
                self._undone = self._draws

    def skipped(self, draws: int) -> None:
        """The iterator was asked so often before, when torch's loader would have asked."""
        self._draws = self._torch_draws = draws

    def reach(self, torch_draws: int) -> None:
        """Torch's loader would have asked so often by now."""
        self._torch_draws = torch_draws
        if self._undone is not None and self._undone <= torch_draws:
            self._undone = None
            assert self._random is not None
            torch.randperm(self._random.num_samples, generator=self._random.generator)
