"""Of which source each sample of a mixture is.

NOTE [Shares]. A source of weight w should have been read w * t times after t samples. A sample of it may come as soon
as the number read stays below that plus 1, and has to come before the number falls 1 behind. Of those that may come,
the one whose time is up first does: in this way every share is within one sample of its weight, always (Tijdeman, The
chairman assignment problem, 1980; it is the rule of the earliest deadline). Time is cut into blocks, so that all are
filled at once, one sample of each at a time, each from rounded counts to rounded counts. If the weights are fractions
of a common denominator up to 65,536, blocks are multiples of it, and nothing has to be rounded. Otherwise it is not
proved that a block can always be filled within one; where it could not, the source that is furthest behind would come
too early. Of 270 mixtures of 2 to 100 sources of random weights, in one a share was off by 1.08.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from typing import Any

import numpy as np

from rayloader.plans.inputs import Array

NEAR = 1e-6  # counts that differ by less are equal: sums of floating-point numbers up to some billions
_BLOCK = 1 << 12  # samples of a block, about
_AT_ONCE = 1 << 20  # samples of the blocks that are filled together
_PERIOD = 1 << 16  # the largest common denominator that is kept
_LATE = 1e18  # added to the deadline of a sample that may not come yet: it comes only if no other may


class Shares:
    """Weights in time.

    Args:
        begins: the numbers of samples from which weights hold, the first one 0.
        weights: of shape (begins, sources), each row with the sum 1.
        blocks: samples of a block, for each row.
    """

    def __init__(self, begins: list[int], weights: Array, blocks: list[int]) -> None:
        self.begins, self.weights, self.blocks = begins, weights, blocks
        taken = np.diff(begins)[:, None] * weights[:-1]
        self._before = np.concatenate([np.zeros((1, weights.shape[1])), np.cumsum(taken, axis=0)])

    def row(self, step: int) -> int:
        """Which weights hold after so many samples."""
        return bisect.bisect_right(self.begins, step) - 1

    def at(self, step: int) -> Array:
        """How often each source should have been read after so many samples, a fraction."""
        row = self.row(step)
        return np.asarray(self._before[row] + (step - self.begins[row]) * self.weights[row])

    def when(self, source: int, count: int) -> float:
        """After how many samples a source should have been read so often; infinity: never."""
        before, weights = self._before[:, source], self.weights[:, source]
        row = max(int(np.searchsorted(before, count, "left")) - 1, 0)
        left = count - before[row]
        return self.begins[row] + float(left / weights[row]) if weights[row] else math.inf


class Stream:
    """One epoch of a mixture: of which source each sample is, and which of that source's.

    Args:
        shares: of the sources.
        begin: samples of all epochs before.
        end: and with this one.
        before: how often each source was read in all epochs before.
        after: and with this one.
    """

    def __init__(self, shares: Shares, begin: int, end: int, before: Array, after: Array) -> None:
        self._shares, self._begin = shares, begin
        bounds = []
        for row, (first, block) in enumerate(zip(shares.begins, shares.blocks, strict=True)):
            last = min(end, shares.begins[row + 1]) if row + 1 < len(shares.begins) else end
            if last > (start := max(begin, first)):
                bounds += [start, *range(first + ((start - first) // block + 1) * block, last, block)]
        self._bounds = np.array([*bounds, end])
        counts = [before]  # when a block begins
        for step in self._bounds[1:-1].tolist():
            counts.append(rounded(shares, step, counts[-1], after))
        self._counts = np.array([*counts, after])
        self._group = max(1, _AT_ONCE // max(shares.blocks))
        self._filled: tuple[Any, ...] = ()  # number of a group of blocks, and their sources

    def counts(self, place: int) -> Array:
        """How often each source has been read, after so many samples of this epoch, and before it."""
        step = self._begin + place
        block = int(np.searchsorted(self._bounds, step, "right")) - 1
        if (more := step - int(self._bounds[block])) == 0:
            return self._counts[block].copy()  # type: ignore[no-any-return]
        first, sources = self._fill(block // self._group)
        inside = sources[step - more - first : step - first]
        return self._counts[block] + np.bincount(inside, minlength=self._counts.shape[1])  # type: ignore[no-any-return]

    def chunk(self, place: int) -> tuple[int, Array, Array]:
        """Samples side by side, with the one at that place: the first one's place, sources, and numbers in these."""
        block = int(np.searchsorted(self._bounds, self._begin + place, "right")) - 1
        group = block // self._group
        first, sources = self._fill(group)
        numbers = np.empty(len(sources), np.int64)
        for source, count in enumerate(self._counts[group * self._group].tolist()):
            mine = np.flatnonzero(sources == source)
            numbers[mine] = np.arange(count, count + len(mine))
        return first - self._begin, sources, numbers

    def _fill(self, group: int) -> tuple[int, Array]:
        if self._filled[:1] != (group,):
            blocks = slice(group * self._group, (group + 1) * self._group + 1)
            bounds = self._bounds[blocks]
            self._filled = group, int(bounds[0]), _filled(self._shares, bounds, self._counts[blocks])
        return self._filled[1:]


def rounded(shares: Shares, step: int, least: Array | None = None, most: Array | None = None) -> Array:
    """How often each source has been read after so many samples: whole numbers of this sum, within bounds.

    Fractions are added up from the largest weight on, and where their sum passes a half, a source is rounded up. So
    of the sources that will soon be read, as many as are due have been read already, and no more.
    """
    wanted = shares.at(step)
    low = np.floor(wanted + NEAR).astype(np.int64)
    least = np.zeros_like(low) if least is None else least
    most = np.full_like(low, step) if most is None else most
    found = np.clip(low, least, most)
    order = np.argsort(-shares.weights[shares.row(step)], kind="stable")
    order = order[(found == low)[order] & (low < most)[order]]
    rest = np.maximum(wanted - low, 0)[order]
    if (missing := step - int(found.sum())) > 0 and rest.any():
        ends = np.floor(np.cumsum(np.minimum(rest * (missing / rest.sum()), 1)) + 0.5).astype(np.int64)
        found[order] += np.diff(ends, prepend=0)
    while missing := step - int(found.sum()):  # where bounds are in the way: the furthest off
        sign = 1 if missing > 0 else -1
        may = found < most if sign > 0 else found > least
        change = np.argsort(np.where(may, sign * (found - wanted), np.inf), kind="stable")[
            : min(abs(missing), may.sum())
        ]
        found[change] += sign
    return found


def _filled(shares: Shares, bounds: Array, counts: Array) -> Array:
    """The source of each sample in blocks: a sample of each block at a time. See NOTE [Shares]."""
    sizes = np.diff(bounds)
    blocks = np.argsort(-sizes, kind="stable")  # the longest first: those that go on stay in front
    rows = np.searchsorted(shares.begins, bounds[:-1][blocks], "right") - 1
    weights = shares.weights[rows]
    wanted = np.array([shares.at(int(step)) for step in bounds[:-1][blocks]])
    read, ends, sizes = counts[:-1][blocks].astype(np.float64), counts[1:][blocks], sizes[blocks]
    with np.errstate(divide="ignore", over="ignore"):  # of weights that are zero, or nearly
        pace = np.minimum(1 / weights, _LATE / 2)
        deadlines = np.where(weights > 0, (read + 1 - wanted) * pace, _LATE / 2)
    found = np.empty((len(blocks), int(sizes[0])), np.uint32)
    many = np.arange(len(blocks))
    limits = wanted - NEAR
    for step in range(int(sizes[0])):
        if (active := int(np.searchsorted(-sizes, -step, "left"))) < len(read):
            read, ends, weights, deadlines = read[:active], ends[:active], weights[:active], deadlines[:active]
            pace, limits, many = pace[:active], limits[:active], many[:active]
        limits = limits + weights
        late = np.where(read < limits, deadlines, deadlines + _LATE)
        source = np.where(read < ends, late, np.inf).argmin(axis=1)
        found[:active, step] = source
        read[many, source] += 1
        deadlines[many, source] += pace[many, source]
    flat = np.empty(int(bounds[-1] - bounds[0]), np.uint32)
    for block, size, row in zip(blocks.tolist(), sizes.tolist(), found, strict=True):
        flat[bounds[block] - bounds[0] :][:size] = row[:size]
    return flat


def block_of(weights: Any) -> int:
    """Samples of a block: a multiple of the common denominator of the shares, if it is small."""
    fractions = [Fraction(float(weight)).limit_denominator(_PERIOD) for weight in weights]
    total = sum(fractions)
    period = math.lcm(*((one / total).denominator for one in fractions)) if total else 1
    if period > _PERIOD or not np.allclose([float(one) for one in fractions], weights, rtol=1e-12, atol=0):
        return _BLOCK
    return period * max(1, _BLOCK // period)
