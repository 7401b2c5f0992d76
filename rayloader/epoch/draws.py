"""The indices of one epoch: drawn from the sampler when torch's loader would, or earlier where nobody can notice.

Promise: only the user's thread draws, because sampler and generator are the user's. The position always knows how
often torch's loader would have drawn. Only samplers that may be read early without a visible difference are, and if
torch's loader would have drawn something else than was drawn early, that is an error.
"""

from __future__ import annotations

import copy
import itertools
import reprlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler

from rayloader.errors import RayloaderError
from rayloader.observe.recorder import Tally
from rayloader.protocol import carried
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.position import Position
from rayloader.resume.samplers import is_quiet

# NOTE [ahead]
# Once torch's own samplers have given their first index, little of what they give depends on what the program does
# meanwhile. That little is checked when torch's loader would have drawn:
# - `batch_size` of a BatchSampler (without drop_last, with which it is read once), and `indices` of a
#   SubsetRandomSampler, are read at each draw. An early draw is compared with what would be drawn now. If they
#   differ, the epoch ends with an error.
# - A RandomSampler that has given a permutation asks for its own length, which may have changed, and draws from its
#   generator, which may be the user's. So nothing after the permutation is drawn early.
# A rank's shard of any sampler has drawn its whole epoch by then, whichever sampler it wraps, and a plan is made.
# Types in which a lookup calls no code of the user's, so that it may be repeated.
LOOKED_UP = {list, tuple, range, np.ndarray, torch.Tensor}


class Draws:
    """The draws of one epoch.

    Args:
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        position: the user's position in the stream; it is told of each draw.
        tally: counts the time.

    Attributes:
        count: draws so far, of the epoch: the number of the next task.
    """

    def __init__(self, sampler_iter: Iterator[Any], position: Position, tally: Tally) -> None:
        self._sampler_iter = sampler_iter
        self._ahead = sampler_iter if isinstance(sampler_iter, DrawAhead) else None
        self._position = position
        self._tally = tally
        self.count = position.next_task
        self._checksum = position.checksum

    def begin(self) -> None:
        """The sampler's iterator is about to be read."""
        self._position.sampler_begins(self._sampler_iter)

    @property
    def may_draw(self) -> bool:
        """Whether the next draw is due, or may be made early."""
        return self._ahead is None or self._ahead.may_draw

    def next(self) -> Drawn | None:
        """The next indices, None if the user has that batch. Raises the sampler's errors; StopIteration at its end."""
        began = time.perf_counter()
        try:
            if self.count >= self._position.skips.end:
                raise StopIteration
            indices = next(self._sampler_iter)
        except StopIteration:
            self._position.sampler_ended(self.count)
            raise
        self._tally.drawing += time.perf_counter() - began
        result = drawn(indices, self._checksum, carried())
        self._checksum = result.checksum
        self.count += 1
        had = self._position.drawn(self.count - 1, self._sampler_iter, indices, self._checksum)
        return None if had else result

    def reach(self, torch_draws: int) -> None:
        """Checks draws that were made early, at the moment at which torch's loader would have made them.

        Raises:
            RayloaderError: that would draw something else now.
        """
        if self._ahead is None:
            return
        if change := self._ahead.reach(torch_draws):
            raise RayloaderError(
                f"the sampler was changed during the epoch, after batches had been drawn from it ahead: {change};"
                " change it between two epochs, or pass prefetch_factor=2, with which batches are drawn when torch's "
                "loader draws them"
            )
        self._position.drawn_by_torch = torch_draws


# ---- reading ahead


def may_draw_ahead(sampler: Any, *, resumed: bool = False) -> bool:
    """Whether drawing its indices earlier than torch would makes no visible difference.

    Args:
        sampler: the loader's.
        resumed: whether the epoch continues with an iterator that was not created by `start`.
    """
    innermost = _innermost(sampler)
    if type(innermost) is RandomSampler and innermost.generator is not None:
        # With replacement, or more or fewer samples than there are, it draws while it yields; see NOTE [ahead].
        return not innermost.replacement and innermost.num_samples == len(innermost.data_source)
    if type(innermost) is SubsetRandomSampler:
        return not resumed and type(innermost.indices) in LOOKED_UP
    return is_quiet(innermost)


def start(sampler: Any) -> DrawAhead:
    """The iterator of such a sampler, from the start of an epoch."""
    innermost = _innermost(sampler)
    if type(innermost) is not SubsetRandomSampler:
        return DrawAhead(sampler, iter(sampler))
    places = copy.copy(innermost)
    places.indices = range(len(innermost.indices))
    of_places = iter(places) if innermost is sampler else _batches(iter(places), sampler, sampler.batch_size)
    return DrawAhead(sampler, of_places, look_up=True)


def _innermost(sampler: Any) -> Any:
    return sampler.sampler if type(sampler) is BatchSampler else sampler


class DrawAhead(Iterator[Any]):
    """A sampler's iterator that may be read early, see NOTE [ahead].

    Args:
        sampler: the loader's, one that `may_draw_ahead`.
        indices: its iterator.
        look_up: whether it yields places in `indices` of a SubsetRandomSampler.
    """

    def __init__(self, sampler: Any, indices: Iterator[Any], *, look_up: bool = False) -> None:
        self._sampler = sampler
        self._indices = indices
        self._batched = type(sampler) is BatchSampler
        self._batch_size: int = sampler.batch_size if self._batched else 1
        self._fixed_size = not self._batched or sampler.drop_last  # then torch reads it once
        self._subset = _innermost(sampler) if look_up else None
        self._num_indices = 0 if self._subset is None else len(self._subset.indices)
        self._certain = _certain(_innermost(sampler)) // self._batch_size  # number of draws
        self._draws = 0
        self._torch_draws = 0
        self._early: deque[tuple[Any, Any]] = deque()  # what `indices` yielded early, and what was made of it

    @property
    def may_draw(self) -> bool:
        """Whether the next draw is due, or may be made early."""
        if self._draws < self._torch_draws:
            return True
        same_size = self._subset is None or len(self._subset.indices) == self._num_indices  # else a lookup may raise
        return self._draws < self._certain and same_size

    def __next__(self) -> Any:
        given = next(self._indices)
        try:
            indices = given if self._subset is None else self._looked_up(given)
        except BaseException:  # the sampler's own iterator would have ended with it
            self._indices = iter(())
            raise
        if self._draws >= self._torch_draws:
            self._early.append((given, indices))
        self._draws += 1
        return indices

    def skipped(self, draws: int) -> None:
        """The iterator was read this many times before, when torch's loader would have read it."""
        self._draws = self._torch_draws = draws

    def reach(self, torch_draws: int) -> str:
        """Torch's loader would have drawn this many times by now; returns what makes it draw something else, if any."""
        while self._early and self._torch_draws < torch_draws:
            if change := self._change(*self._early[0]):
                return change
            self._early.popleft()
            self._torch_draws += 1
        self._torch_draws = max(torch_draws, self._torch_draws)
        return ""

    def _change(self, given: Any, early: Any) -> str:
        if not self._fixed_size and self._sampler.batch_size != self._batch_size:
            return f"batch_size of the BatchSampler is {self._sampler.batch_size}, and was {self._batch_size}"
        if self._subset is None:
            return ""
        try:
            now = self._looked_up(given)
        except Exception as error:  # the subset has become too small
            return f"indices of the SubsetRandomSampler cannot be read ({type(error).__name__}: {error})"
        if _same(now, early):
            return ""
        return f"indices of the SubsetRandomSampler give {reprlib.repr(now)}, and gave {reprlib.repr(early)}"

    def _looked_up(self, given: Any) -> Any:
        if self._subset is None:
            return given
        indices = self._subset.indices
        return [indices[place] for place in given] if self._batched else indices[given]


def _batches(samples: Iterator[Any], sampler: BatchSampler, batch_size: int) -> Iterator[list[Any]]:
    """Batches as a BatchSampler makes them; reads its `batch_size` at each draw; with drop_last it stays as given."""
    if sampler.drop_last:
        return iter(BatchSampler(samples, batch_size, drop_last=True))
    return _batches_of_any_size(samples, sampler)


def _batches_of_any_size(samples: Iterator[Any], sampler: BatchSampler) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(samples, sampler.batch_size)):
        yield batch


def _same(now: Any, early: Any) -> bool:
    """Whether two draws are equal, and of the same types: a dataset may distinguish a tensor from a number."""
    if type(now) is not type(early):
        return False
    if isinstance(now, list):
        return len(now) == len(early) and all(map(_same, now, early))
    return bool(now == early)


def _certain(sampler: Any) -> int:
    """How many samples it yields that depend on nothing that may change meanwhile."""
    if type(sampler) is not RandomSampler:
        return sys.maxsize
    at_once = 32 if sampler.replacement else max(1, len(sampler.data_source))
    return sampler.num_samples // at_once * at_once
