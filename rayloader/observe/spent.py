"""How long things took: what workers send of each batch, noted at next to no cost and told in a few numbers.

Promise: no Ray, no torch, no clock.

NOTE [logs]
What a worker has sent of a batch is appended to a log, and nothing is computed. NumPy later folds many entries
together. A log is written by one thread at a time: the one that receives at the moment, under the lock of the epoch.
Folded data is never changed: the writer puts a new pair of folded data and log in its place, in one assignment. So a
reader takes the pair, folds a copy of the log for itself, and counts each entry exactly once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from rayloader.observe.stats import Times

# Quantiles are those of so many times, the last ones.
KEPT = 2048

_Numbers = np.ndarray[Any, np.dtype[Any]]


class Series:
    """How long something took each time. One thread adds, and any may read."""

    __slots__ = ("count", "longest", "recent", "total")

    def __init__(self, count: int = 0, total: float = 0.0, longest: float = 0.0, recent: Iterable[float] = ()) -> None:
        self.count, self.total, self.longest = count, total, longest
        self.recent = deque(recent, KEPT)

    def add(self, seconds: float) -> None:
        """It took so long once more."""
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds
        self.recent.append(seconds)

    def merged(self, other: Series) -> Series:
        """Both together."""
        longest = max(self.longest, other.longest)
        return Series(
            self.count + other.count, self.total + other.total, longest, [*list(self.recent), *list(other.recent)]
        )

    def times(self) -> Times:
        """All of it in a few numbers."""
        from rayloader.observe.stats import Times

        recent = list(self.recent)  # at once, for another thread may be adding
        if not recent:
            return Times()
        median, p95, p99 = np.quantile(recent, [0.5, 0.95, 0.99]).tolist()
        return Times(self.count, self.total, median, p95, p99, self.longest)

    def above(self, seconds: float) -> tuple[int, float]:
        """How often it took longer than that, as far as the last times tell, and the mean of these times."""
        recent = np.array(list(self.recent))
        slow = recent[recent > seconds]
        return round(self.count * len(slow) / max(1, len(recent))), float(slow.mean()) if len(slow) else 0.0


class Work(NamedTuple):
    """What the workers did, with a row for each."""

    counts: _Numbers  # batches that they built.
    longest: _Numbers  # the longest of the times that they took to build one.
    sums: _Numbers  # seconds of idleness, fetching, collating and transfer.
    recent: _Numbers  # of the last batches: the worker, and how long it took.

    @classmethod
    def nothing(cls, num_workers: int) -> Work:
        """Before the first batch."""
        return cls(np.zeros(num_workers, int), np.zeros(num_workers), np.zeros((num_workers, 4)), np.zeros((0, 2)))

    def plus(self, log: Sequence[bytes]) -> Work:
        """Adds what the workers have sent: `Answer.spent` of some batches."""
        if not log:
            return self
        rows = np.frombuffer(b"".join(log)).reshape(len(log), -1)
        worker_ids, spent = rows[:, 0].astype(np.intp), rows[:, 2:]
        build, number = spent[:, 1:].sum(axis=1), len(self.longest)
        longest = self.longest.copy()
        np.maximum.at(longest, worker_ids, build)
        sums = [np.bincount(worker_ids, weights=column, minlength=number) for column in spent.T]
        recent = np.concatenate([self.recent, np.stack([worker_ids, build], axis=1)])[-KEPT:]
        counts = self.counts + np.bincount(worker_ids, minlength=number)
        return Work(counts, longest, self.sums + np.stack(sums, axis=1), recent)

    def merged(self, other: Work) -> Work:
        """The sum of both, for as many workers as the larger of the two has."""
        number = max(len(self.longest), len(other.longest))
        mine, theirs = ([_padded(part, number) for part in work[:3]] for work in (self, other))
        recent = np.concatenate([self.recent, other.recent])[-KEPT:]
        return Work(mine[0] + theirs[0], np.maximum(mine[1], theirs[1]), mine[2] + theirs[2], recent)

    def of(self, worker_id: int) -> Series:
        """The times that one of them took to build a batch."""
        recent = self.recent[self.recent[:, 0] == worker_id, 1].tolist()
        total = float(self.sums[worker_id, 1:].sum())
        return Series(int(self.counts[worker_id]), total, float(self.longest[worker_id]), recent)


def _padded(part: _Numbers, number: int) -> _Numbers:
    """Pads with rows of zeros up to this number."""
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
