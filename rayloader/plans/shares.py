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

    def counts(self, places: Array) -> Array:
        """How often each source has been read, after so many samples of this epoch, and before it: a row for each."""
        blocks = self._block_of(places)
        sizes = self._begin + places - self._bounds[blocks]
        rows = self._fill(blocks, sizes)
        inside = [np.bincount(row, minlength=self._counts.shape[1]) for row in rows]
        return np.asarray(self._counts[blocks] + inside)

    def read(self, begin: int, end: int) -> tuple[Array, Array]:
        """The samples between two places, at least one: the source of each, and which of that source's it is."""
        first, last = self._block_of(np.array([begin, end - 1])).tolist()
        blocks = np.arange(first, last + 1)
        bounds = np.append(self._bounds[blocks], self._begin + end)
        sources = np.concatenate(self._fill(blocks, np.diff(bounds)))
        numbers = np.empty(len(sources), np.int64)
        for source, count in enumerate(self._counts[first].tolist()):
            mine = np.flatnonzero(sources == source)
            numbers[mine] = np.arange(count, count + len(mine))
        left_out = self._begin + begin - int(bounds[0])
        return sources[left_out:], numbers[left_out:]

    def _block_of(self, places: Array) -> Array:
        return np.searchsorted(self._bounds, self._begin + places, "right") - 1

    def _fill(self, blocks: Array, sizes: Array) -> list[Array]:
        """The sources of the first samples of each of these blocks, so many of each."""
        ends = self._counts[np.minimum(blocks + 1, len(self._counts) - 1)]
        return _filled(self._shares, self._bounds[blocks], sizes, self._counts[blocks], ends)


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


def _filled(shares: Shares, begins: Array, sizes: Array, counts: Array, ends: Array) -> list[Array]:
    """The source of each sample in blocks: a sample of each block at a time. See NOTE [Shares].

    Args:
        shares: of the sources.
        begins: of the blocks.
        sizes: how many samples of each block are wanted.
        counts: how often each source has been read when a block begins.
        ends: likewise, when it ends.
    """
    blocks = np.argsort(-sizes, kind="stable")  # the longest first: those that go on stay in front
    rows = np.searchsorted(shares.begins, begins[blocks], "right") - 1
    weights = shares.weights[rows]
    wanted = np.array([shares.at(int(step)) for step in begins[blocks]])
    read, ends, sizes = counts[blocks].astype(np.float64), ends[blocks], sizes[blocks]
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
    return [found[row, : sizes[row]] for row in np.argsort(blocks)]


def block_of(weights: Any) -> int:
    """Samples of a block: a multiple of the common denominator of the shares, if it is small."""
    fractions = [Fraction(float(weight)).limit_denominator(_PERIOD) for weight in weights]
    total = sum(fractions)
    period = math.lcm(*((one / total).denominator for one in fractions)) if total else 1
    if period > _PERIOD or not np.allclose([float(one) for one in fractions], weights, rtol=1e-12, atol=0):
        return _BLOCK
    return period * max(1, _BLOCK // period)
