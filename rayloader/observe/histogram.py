"""How often something took how long: sent by workers, logged at next to no cost, folded into histograms.

Promise: no Ray, no torch, no clock.

NOTE [logs]
For each batch a number is appended to a log, and nothing is computed. NumPy later folds many entries together into
histograms. A log is written by one thread at a time: the user's, or the one that receives at the moment, under the
lock of the epoch. Folded data is never changed: the writer puts a new pair of folded data and log in its place, in one
assignment. So a reader takes the pair, folds a copy of the log for itself, and counts each entry exactly once.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from rayloader.observe.stats import Times


# Classes of a histogram per octave, and the shortest and longest times that it distinguishes: powers of 2, in seconds.
PER_OCTAVE = 8
SHORTEST, LONGEST = -30, 20
CLASSES = (LONGEST - SHORTEST) * PER_OCTAVE

_Numbers = np.ndarray[Any, np.dtype[Any]]

_FIRST = (SHORTEST + 2) * PER_OCTAVE
_PLACES = np.arange(CLASSES)
# Seconds in the middle of each class.
_MIDDLES: _Numbers = np.ldexp((PER_OCTAVE + _PLACES % PER_OCTAVE + 0.5) / PER_OCTAVE, _PLACES // PER_OCTAVE + SHORTEST)


def _classes(seconds: _Numbers) -> _Numbers:
    """Which class each of these times is in."""
    fractions, exponents = np.frexp(seconds)  # fractions of at least a half
    classes = exponents * PER_OCTAVE + (fractions * (2 * PER_OCTAVE)).astype(np.intp) - _FIRST
    return np.where((classes >= 0) & (classes < CLASSES) & (seconds > 0), classes, 0)


class Histogram(NamedTuple):
    """How often something took how long, in classes that are an eighth of an octave wide."""

    counts: _Numbers = np.zeros(CLASSES, np.int64)
    total: float = 0.0
    longest: float = 0.0

    def plus(self, log: array[float]) -> Histogram:
        """Adds these times."""
        if not log:
            return self
        seconds = np.frombuffer(log.tobytes())  # a copy, because another thread may be appending
        counts = self.counts + np.bincount(_classes(seconds), minlength=CLASSES)
        return Histogram(counts, self.total + float(seconds.sum()), max(self.longest, float(seconds.max())))

    def merged(self, other: Histogram) -> Histogram:
        """The sum of both histograms."""
        return Histogram(self.counts + other.counts, self.total + other.total, max(self.longest, other.longest))

    def times(self) -> Times:
        """The histogram in a few numbers."""
        from rayloader.observe.stats import Times

        count = int(self.counts.sum())
        if not count:
            return Times()
        classes = np.searchsorted(np.cumsum(self.counts), [0.5 * count, 0.95 * count, 0.99 * count])
        median, p95, p99 = (min(float(_MIDDLES[index]), self.longest) for index in classes)
        return Times(count, self.total, median, p95, p99, self.longest)

    def above(self, seconds: float) -> tuple[int, float]:
        """How often it took longer than that, and the mean of these times."""
        counts = np.where(seconds < _MIDDLES, self.counts, 0)
        number = int(counts.sum())
        return number, float(counts @ _MIDDLES) / number if number else 0.0


class Series:
    """How long something took each time: see NOTE [logs]."""

    __slots__ = ("_kept", "add")

    def __init__(self, folded: Histogram | None = None) -> None:
        self._keep(folded or Histogram())

    def _keep(self, folded: Histogram) -> None:
        log = array("d")
        self.add = log.append  # first: an entry added between the two is counted with the next ones
        self._kept = folded, log

    def fold(self) -> None:
        """To be called from time to time by the thread that adds."""
        self._keep(self.histogram)

    @property
    def histogram(self) -> Histogram:
        """All times that were added. Any thread may ask."""
        folded, log = self._kept
        return folded.plus(log)

    @property
    def total(self) -> float:
        """The sum of all times, faster than by `histogram`. Any thread may ask."""
        folded, log = self._kept
        return folded.total + sum(log)


class Work(NamedTuple):
    """What the workers did, with a row for each."""

    counts: _Numbers  # histograms of the times that they took to build a batch.
    longest: _Numbers  # the longest of these times.
    sums: _Numbers  # seconds of idleness, fetching, collating and transfer.

    @classmethod
    def nothing(cls, num_workers: int) -> Work:
        """Before the first batch."""
        return cls(np.zeros((num_workers, CLASSES), np.int64), np.zeros(num_workers), np.zeros((num_workers, 4)))

    def plus(self, log: Sequence[bytes]) -> Work:
        """Adds what the workers have sent: `Answer.spent` of some batches."""
        if not log:
            return self
        rows = np.frombuffer(b"".join(log)).reshape(len(log), -1)
        worker_ids, spent = rows[:, 0].astype(np.intp), rows[:, 2:]
        build, number = spent[:, 1:].sum(axis=1), len(self.longest)
        counts = np.bincount(worker_ids * CLASSES + _classes(build), minlength=number * CLASSES)
        longest = self.longest.copy()
        np.maximum.at(longest, worker_ids, build)
        sums = [np.bincount(worker_ids, weights=column, minlength=number) for column in spent.T]
        return Work(self.counts + counts.reshape(self.counts.shape), longest, self.sums + np.stack(sums, axis=1))

    def merged(self, other: Work) -> Work:
        """The sum of both, for as many workers as the larger of the two has."""
        number = max(len(self.longest), len(other.longest))
        mine, theirs = (Work(*(_padded(part, number) for part in work)) for work in (self, other))
        longest = np.maximum(mine.longest, theirs.longest)
        return Work(mine.counts + theirs.counts, longest, mine.sums + theirs.sums)

    def of(self, worker_id: int) -> Histogram:
        """The times that one of them took to build a batch."""
        return Histogram(self.counts[worker_id], float(self.sums[worker_id, 1:].sum()), float(self.longest[worker_id]))


def _padded(part: _Numbers, number: int) -> _Numbers:
    """Pads with rows of zeros up to this number."""
    if len(part) == number:  # as nearly always
        return part
    return np.pad(part, [(0, number - len(part)), *[(0, 0)] * (part.ndim - 1)])


_PACKED = struct.Struct("=6d")  # NumPy reads many of them as rows of numbers
pack = _PACKED.pack  # the fields of a `Spent`, in their order


class Spent(NamedTuple):
    """The unpacked form. In seconds."""

    worker_id: float  # the worker that built the batch.
    began: float  # when it began, perf_counter() of its machine.
    idle: float  # how long its process had nothing to do before that.
    fetch: float  # in the dataset.
    collate: float  # in `collate_fn`.
    # for encoding, and for sending the previous batch: the time to send this one is reported with the next.
    transfer: float

    @classmethod
    def unpack(cls, packed: bytes) -> Spent:
        """The inverse of `pack`."""
        return cls(*_PACKED.unpack(packed))

    @property
    def build(self) -> float:
        """The work on the batch."""
        return self.fetch + self.collate + self.transfer
