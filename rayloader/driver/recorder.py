"""Measures a loader while it works, for `DataLoader.stats()`.

Promise: costs a few microseconds a batch, and memory that does not grow. Each number has one thread that writes it: the
user's, or whichever receives at the moment, under the lock of the epoch. Any thread may read, without a lock: what it
gets is right but for the batch that is just being counted. Nothing here refers to an iterator, to batches or to actors.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Sequence
from math import frexp
from pathlib import Path
from time import perf_counter

from rayloader.driver.cpu_use import CpuUse
from rayloader.errors import RayloaderError
from rayloader.stats import Period, SlowBatch, Times, WorkerStats
from rayloader.trace import Trace

# Classes of a histogram by octave, and the shortest and longest times that it tells apart, as powers of 2 of a second.
PER_OCTAVE = 8
SHORTEST, LONGEST = -30, 20
CLASSES = (LONGEST - SHORTEST) * PER_OCTAVE
# How many of the slowest batches are named.
SLOWEST = 5
# A batch that takes more than so many times the median is slow.
SLOW = 4.0


_HALVES = 2 * PER_OCTAVE
_FIRST = (SHORTEST + 2) * PER_OCTAVE


class Histogram:
    """How often something took how long, in classes that are an eighth of an octave wide."""

    __slots__ = ("count", "counts", "longest", "total")

    def __init__(self) -> None:
        self.counts = [0] * CLASSES
        self.count = 0
        self.total = 0.0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        """It happened once more."""
        fraction, exponent = frexp(seconds)  # a fraction of at least a half
        place = exponent * PER_OCTAVE + int(fraction * _HALVES) - _FIRST
        self.counts[place if 0 <= place < CLASSES and seconds > 0 else 0] += 1
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds

    def merge(self, other: Histogram) -> None:
        """All that has happened there happened here."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    def times(self) -> Times:
        """The same in a few numbers."""
        counts = list(self.counts)
        median, p95, p99 = (self._quantile(counts, share) for share in (0.5, 0.95, 0.99))
        return Times(self.count, self.total, median, p95, p99, self.longest)

    def above(self, seconds: float) -> tuple[int, float]:
        """How often it took longer than that, and how long on average."""
        counts = list(self.counts)
        first = next((place for place in range(len(counts)) if _middle(place) > seconds), len(counts))
        number = sum(counts[first:])
        total = sum(count * _middle(place) for place, count in enumerate(counts) if place >= first)
        return number, total / number if number else 0.0

    def _quantile(self, counts: list[int], share: float) -> float:
        left = share * sum(counts)
        for place, count in enumerate(counts):
            left -= count
            if count and left <= 0:
                return min(_middle(place), self.longest)
        return 0.0


def _middle(place: int) -> float:
    """Seconds in the middle of a class."""
    octave, part = divmod(place, PER_OCTAVE)
    return float((PER_OCTAVE + part + 0.5) / PER_OCTAVE * 2.0 ** (octave + SHORTEST))


class WorkerTally:
    """What one worker did; see `WorkerStats`."""

    __slots__ = ("arena", "build", "collate", "depth", "fetch", "idle", "lane", "transfer")

    def __init__(self) -> None:
        self.build = Histogram()
        self.idle = self.fetch = self.collate = self.transfer = 0.0
        self.depth = 0
        self.lane = ""
        self.arena: bool | None = None  # whether its last batch had room in one; None before the first

    def merge(self, other: WorkerTally) -> None:
        """All that was done there was done here."""
        for name in ("idle", "fetch", "collate", "transfer"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.build.merge(other.build)
        self.depth = max(self.depth, other.depth)
        self.lane = other.lane or self.lane

    def stats(self, worker_id: int) -> WorkerStats:
        """The same, for the user."""
        build = self.build.times()
        return WorkerStats(worker_id, build, self.idle, self.fetch, self.collate, self.transfer, self.lane, self.depth)


_SUMS = "batches", "samples", "nbytes", "restarts", "skipped", "first_wait", "blocked", "behind", "drawing"


class Tally:
    """What one epoch of one iterator brought; see `Period`.

    Args:
        num_workers: that build its batches.
        processes: that host them.
        depth: batches of each worker that may be under way; None if that is automatic.

    Attributes:
        cpu_use: since its first batch.
    """

    def __init__(self, num_workers: int = 0, processes: int = 0, depth: int | None = None) -> None:
        self.processes = processes
        self.depth = depth
        self.wait, self.step = Histogram(), Histogram()
        self.batches = self.samples = self.nbytes = self.restarts = self.skipped = 0
        self.first_wait = self.blocked = self.behind = self.drawing = 0.0
        self.workers = [WorkerTally() for _ in range(num_workers)]
        self.slowest: list[SlowBatch] = []
        self.cpu_use: CpuUse | None = None
        self.trace: Trace | None = None  # while one is on
        self._batch = 0  # that `gave` was told last
        self._slow = 0.0  # seconds; what takes longer is one of the slowest
        # perf_counter(): when `next` was called, when it returned (0: it has not), and when it first did.
        self._asked = self._left = 0.0
        self._began = math.inf

    # ---- in the user's thread

    def asked(self) -> None:
        """`next` was called."""
        now = perf_counter()
        if self._left:
            self.step.add(now - self._left)
            if self.trace is not None:
                self.trace.trainer("step", self._batch, self._left, now)
            self._left = 0.0
        self._asked = now

    def gave(self, batch: int, samples: int, nbytes: int) -> None:
        """It is about to return this batch."""
        now = perf_counter()
        if self.trace is not None:
            self.trace.trainer("wait", batch, self._asked, now)
        if self.batches:
            self.wait.add(now - self._asked)
        else:
            self.first_wait = now - self._asked
            self.blocked = self.behind = self.drawing = 0.0  # these were part of it
            self.cpu_use = CpuUse()
            self._began = now
        self.batches += 1
        self.samples += samples
        self.nbytes += nbytes
        self._batch, self._left = batch, now

    def ended(self) -> None:
        """There is no further batch."""
        if self.cpu_use is not None:
            self.cpu_use.end()

    # ---- in the thread that receives

    def answered(
        self, worker_id: int, began: float, idle: float, fetch: float, collate: float, transfer: float
    ) -> bool:
        """A worker has sent what became of a task; whether that is one of the slowest, for `note_slow`.

        Args:
            worker_id: that worker.
            began: when it began to work on it, perf_counter() of its machine.
            idle: seconds that its process had nothing to do before that.
            fetch: seconds of its work.
            collate: likewise.
            transfer: likewise.
        """
        worker, seconds = self.workers[worker_id], fetch + collate + transfer
        worker.build.add(seconds)
        if idle:  # before the first batch it waited for others that started
            worker.idle += max(0.0, min(idle, self._asked - self._began))
        worker.fetch += fetch
        worker.collate += collate
        worker.transfer += transfer
        return seconds > self._slow

    def note_slow(self, slow: SlowBatch) -> None:
        """One of the slowest batches."""
        self.slowest = sorted([*self.slowest, slow], key=lambda slow: -slow.seconds)[:SLOWEST]
        if len(self.slowest) == SLOWEST:
            self._slow = self.slowest[-1].seconds

    # ---- in any thread

    @classmethod
    def of(cls, tallies: Sequence[Tally]) -> Tally:
        """All of them together."""
        whole = cls()
        for tally in tallies:
            for name in _SUMS:
                setattr(whole, name, getattr(whole, name) + getattr(tally, name))
            whole.wait.merge(tally.wait)
            whole.step.merge(tally.step)
            whole.workers += [WorkerTally() for _ in tally.workers[len(whole.workers) :]]
            for worker, other in zip(whole.workers, tally.workers, strict=False):
                worker.merge(other)
            for slow in tally.slowest:
                whole.note_slow(slow)
        return whole

    def period(self) -> Period:
        """The same, for the user."""
        together = Histogram()
        for worker in self.workers:
            together.merge(worker.build)
        build = together.times()
        slow, seconds = together.above(SLOW * build.median)
        return Period(
            batches=self.batches,
            samples=self.samples,
            nbytes=self.nbytes,
            first_wait=self.first_wait,
            wait=self.wait.times(),
            step=self.step.times(),
            blocked=self.blocked,
            behind=self.behind,
            drawing=self.drawing,
            build=build,
            slow=slow,
            slow_ratio=seconds / build.median if slow else 0.0,
            restarts=self.restarts,
            skipped=self.skipped,
            workers=tuple(worker.stats(worker_id) for worker_id, worker in enumerate(self.workers)),
            slowest=tuple(self.slowest),
        )


class Recorder:
    """What all epochs of one loader brought. The loader owns it and its iterators write to their `Tally`."""

    def __init__(self) -> None:
        # What has ended, in one, and the tallies that iterators still write to, the latest last. Replaced as a whole:
        # another thread may be reading it.
        self._tallies: tuple[Tally, list[tuple[weakref.ref[object], Tally]]] = Tally(), []
        self._trace: Trace | None = None

    def begins(self, iterator: object, num_workers: int, processes: int = 0, depth: int | None = None) -> Tally:
        """An iterator of the loader begins an epoch; the one before, if it had one, has ended. See `Tally`."""
        past, live = self._tallies
        ended = [tally for ref, tally in live if ref() in (None, iterator)]
        others = [(ref, tally) for ref, tally in live if ref() not in (None, iterator)]
        new = Tally(num_workers, processes, depth)
        new.trace = self._trace
        self._tallies = Tally.of([past, *ended]), [*others, (weakref.ref(iterator), new)]
        return new

    @contextlib.contextmanager
    def traced(self, path: Path, title: str) -> Iterator[None]:
        """Traces what the iterators do meanwhile; see `DataLoader.trace`."""
        if self._trace is not None:
            raise RayloaderError("this loader is being traced already; end that trace first")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} for the trace; make it first")
        trace = Trace()
        self._set_trace(trace)
        try:
            yield
        finally:
            self._set_trace(None)
            trace.write(path, title)

    def _set_trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for _, tally in self._tallies[1]:
            tally.trace = trace

    def tell(self) -> tuple[Tally, Tally]:
        """Of the epoch that began last, and of all."""
        past, live = self._tallies
        return self.latest, Tally.of([past, *(tally for _, tally in live)])

    @property
    def latest(self) -> Tally:
        """Of the epoch that began last; zeros before the first one."""
        past, live = self._tallies
        return live[-1][1] if live else past
