"""`TokenBudget`: batches of samples of similar length, which stay within a number of tokens with their padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from rayloader.options import check_whole
from rayloader.plans.plan import Array, Batches, BatchPlan, Facts, Panel, taking
from rayloader.plans.sample_lengths import kept, lengths_of, sorted_windows

Cost = Callable[[Array, Array], Array]


class TokenBudget(BatchPlan):
    """A batch sampler that pads little: batches of samples of similar length, which fill a budget of tokens.

    The samples are shuffled, all of them, and sorted by length within windows of that order. Each batch takes as many
    of them, from the longest on, as fit into the budget if each is padded to the longest. So a batch of short samples
    has many. Then the batches are shuffled too: in steps, in which each rank has a batch of nearly the same cost. All
    ranks have equally many steps: to fill the last one, batches of the most samples are halved. Batches of so many
    tokens are those of Vaswani et al., Attention Is All You Need, 2017, section 5.1.

    For instance::

        plan = TokenBudget(lengths, max_tokens=16_384)
        loader = rayloader.DataLoader(dataset, batch_sampler=plan, num_workers=8, collate_fn=pad)

    Args:
        lengths: of each sample, in tokens, frames, characters or another unit: whole numbers from 1 on, of shape
            (samples,), in an array, a memory map, a tensor, a list, or a column of Arrow.
        max_tokens: that a batch takes at most: its samples times the length of the longest, in the unit of `lengths`.
        max_samples: of a batch, at most.
        multiple_of: of so many samples is a batch a multiple, unless fewer fit into it, or it is the last of a window.
        window: samples that are sorted together: more of them pad less, and mix less.
        cost: takes the numbers of samples of batches and their longest lengths, int64 of shape (batches,) both, and
            gives how long each batch keeps a rank busy, in any unit. By default that is the padded tokens.
        too_long: what becomes of a sample above `max_tokens`: "error", or "skip" to leave it out; see `left_out`.
        seed: of the random order, together with the epoch.
        num_replicas: for how many ranks the steps are made, where another loader or a framework deals the batches out:
            see `Plan.for_rank`. rayloader's own loader says by itself how many there are.
        drop_last: leave out the last step if it has too few batches, rather than halve some.

    Attributes:
        epoch: that `iter()` gives next.
        left_out: how many samples are above `max_tokens`.

    Raises:
        TypeError: the lengths are not whole numbers.
        ValueError: an argument is out of range, or a sample is above the budget.
    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        multiple_of: int = 1,
        window: int = 1 << 16,
        cost: Cost | None = None,
        too_long: Literal["error", "skip"] = "error",
        seed: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed, num_replicas, drop_last)
        self._lengths = lengths_of(lengths)
        self.max_tokens, self.window = check_whole("max_tokens", max_tokens, 1), check_whole("window", window, 1)
        self.max_samples = None if max_samples is None else check_whole("max_samples", max_samples, 1)
        self.multiple_of = check_whole("multiple_of", multiple_of, 1)
        self._kept, self.left_out = kept(self._lengths, max_tokens, "max_tokens", too_long, ("error", "skip"))
        self._cost = cost

    @property
    def padding(self) -> float:
        """The share of padding in the tokens of this epoch's batches, from 0 to 1."""
        made = self._batches_of(self.epoch)
        return float(1 - made.tokens.sum() / made.room.sum())

    def _batches(self, epoch: int) -> Batches:
        parts: list[tuple[Array, Array, Array, Array]] = []
        for begin, order, lengths in sorted_windows(self._lengths, self._kept, self.window, (self.seed, epoch)):
            begins = np.sort(self._begins(lengths))
            flat = lengths.ravel()
            parts.append((order.ravel(), begin + begins, flat[begins], np.add.reduceat(flat, begins)))
        samples, begins, longest, tokens = map(np.concatenate, zip(*parts, strict=True))
        sizes = np.diff(begins, append=len(samples))
        room = sizes * longest
        costs = room if self._cost is None else np.asarray(self._cost(sizes, longest), np.float64)
        if costs.shape != sizes.shape or not (np.isfinite(costs).all() and (costs > 0).all()):
            raise ValueError(
                f"cost must give a finite number above 0 for each of {len(sizes)} batches, got {costs!r}; compute it "
                "with the two arrays that it is given"
            )
        return Batches(taking(samples), np.append(begins, len(samples)), costs, tokens, room)

    def _begins(self, lengths: Array) -> Array:
        """Where batches begin, in rows of lengths from the longest on: a step in all rows at once."""
        rows, width = lengths.shape
        at, row, begins = np.zeros(rows, np.int64), np.arange(rows), []
        while len(at):
            begins.append(row * width + at)
            size = self.max_tokens // lengths[row, at]
            size = size if self.max_samples is None else np.minimum(size, self.max_samples)
            at = at + np.where(size < self.multiple_of, size, size - size % self.multiple_of)
            goes_on = at < width
            at, row = at[goes_on], row[goes_on]
        return np.concatenate(begins)

    def _facts(self) -> Facts:
        made, (steps, panels) = self._batches_of(self.epoch), self._facts_of_steps()
        sizes = np.diff(made.bounds)
        lines = {
            "samples": f"{sizes.sum():,}" + f", and {self.left_out:,} above the budget left out" * bool(self.left_out),
            "batches": f"{len(sizes):,} of {sizes.min():,} to {sizes.max():,} samples, {sizes.mean():,.1f} on average",
            "padding": f"{self.padding:.2%} of the tokens",
            "budget": f"{made.room.mean() / self.max_tokens:.2%} of {self.max_tokens:,} tokens are used, with padding",
            "steps": steps,
        }
        tokens = {"with padding": made.room, "without": made.tokens}
        of_tokens = Panel("How many tokens a batch has", "tokens of a batch", "batches", tokens)
        of_samples = Panel("How many samples a batch has", "samples of a batch", "batches", {"samples": sizes})
        return lines, [of_tokens, of_samples, *panels]
