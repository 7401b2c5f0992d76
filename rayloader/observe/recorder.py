"""Measures a loader while it works, for `DataLoader.stats()`.

Promise: costs about a microsecond per batch, and memory that does not grow. Any thread may read, without a lock: see
NOTE [logs]. Nothing here refers to an iterator, to batches or to actors.

NOTE [logs]
What a worker has sent of a batch is appended to a log, and nothing is computed. NumPy later folds many entries
together. A log is written by one thread at a time: the one that receives at the moment, under the lock of the epoch.
Folded data is never changed: the writer puts a new pair of folded data and log in its place, in one assignment. So a
reader takes the pair, folds a copy of the log for itself, and counts each entry exactly once.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rayloader.errors import RayloaderError
from rayloader.protocol import Spent, pack_spent

if TYPE_CHECKING:
    from rayloader.observe.stats import EpochTimes, LoaderStats, Period, Times
    from rayloader.observe.trace import Trace, Tracing

# How many answers are folded together: with fewer, NumPy's calls would cost more than the entries.
FOLD = 2048
# How many of the slowest batches are named.
SLOWEST = 3
# How many of the last epochs are kept one by one.
KEPT_EPOCHS = 8
# A batch that takes more than this many times the median is slow.
SLOW = 4.0
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


Slow = tuple[int, int, float, str]  # the fields of a `SlowBatch`


@dataclass(slots=True)
class WorkerTally:
    """Further measurements of one worker; see `WorkerStats`."""

    process: str = ""
    node: str = ""
    lane: str = ""
    arena: bool | None = None  # whether its last batch had room in one; None before the first
    settled: bool = False  # its idle time now counts from the first batch of the epoch


# Attributes of `Tally` that are added up, under the same names as in `Period`.
_SUMS = (
    *("epochs", "batches", "samples", "nbytes", "restarts", "skipped", "first_wait", "blocked", "behind", "drawing"),
    *("page_locked", "locked_bytes", "locking"),
)


class Tally:
    """The measurements of one epoch of one iterator; see `Period`.

    Args:
        num_workers: how many workers build its batches.
        depth: batches of each worker that may be under way; 0 without workers.
        epoch: its number in the run, from 0.

    Attributes:
        wait: seconds inside `next`.
        step: seconds between two calls of it.
        answers: the log of the workers' times, to be appended to with each answer: see NOTE [logs].
        slow: seconds; a batch that takes longer is one of the slowest, or is traced.
        trace: the trace in progress, if any.
    """

    def __init__(self, num_workers: int = 0, depth: int = 0, epoch: int = 0) -> None:
        self.depth, self.epoch = depth, epoch
        self.wait, self.step = Series(), Series()
        self.epochs = self.batches = self.samples = self.nbytes = self.restarts = self.skipped = 0
        self.page_locked = self.locked_bytes = 0
        self.first_wait = self.blocked = self.behind = self.drawing = self.locking = 0.0
        self.workers = [WorkerTally() for _ in range(num_workers)]
        self.slowest: list[Slow] = []
        self.slow = -1.0
        self.trace: Trace | None = None
        self._attends = True  # whether more must be done with the next batch than adding its times
        self._batch = 0  # the last one passed to `gave`, if it is traced
        # perf_counter(): when `next` returned (0: it has raised since), and when it first did.
        self._left, self._began = 0.0, math.inf
        self.fold_at = max(FOLD, 8 * num_workers)  # answers: folding takes time for each worker
        self._keep(Work.nothing(num_workers))

    def set_trace(self, trace: Trace | None) -> None:
        """Sets where to report events from now on. Any thread may call this."""
        self.trace = trace
        self._attends = True
        self.slow = self._least_slow

    # ---- in the user's thread

    def gave(self, asked: float, batch: int, samples: int, nbytes: int) -> None:
        """`next` was called at `asked` (perf_counter()), and is about to return this batch."""
        now = perf_counter()
        if self._attends:
            self._attend_to(batch, asked, now)
        else:
            self.step.add(asked - self._left)
            self.wait.add(now - asked)
        self.batches += 1
        self.samples += samples
        self.nbytes += nbytes
        self._left = now

    def raised(self, asked: float) -> None:
        """`next` was called at `asked` (perf_counter()), and returned nothing; that time is neither wait nor step."""
        if 0.0 < self._left < asked:
            self.step.add(asked - self._left)
            if self.trace is not None:
                self.trace.trainer("step", self._batch, self._left, asked)
        self._left, self._attends = 0.0, True

    def _attend_to(self, batch: int, asked: float, now: float) -> None:
        """Handles the first batch, one after an error, and each that is traced."""
        if self._left:
            self.step.add(asked - self._left)
        if self.batches:
            self.wait.add(now - asked)
        else:
            self.epochs, self.first_wait = 1, now - asked
            self.blocked = self.behind = self.drawing = 0.0  # the first batch's wait included these
            self._began = now
        self._attends = False
        if (trace := self.trace) is not None:
            self._attends = True
            if self._left:
                trace.trainer("step", self._batch, self._left, asked)
            trace.trainer("wait", batch, asked, now)
        self._batch = batch

    # ---- in the thread that receives

    def fold_answers(self) -> None:
        """To be called when there are `fold_at` of them."""
        self._keep(self.work)

    def _keep(self, folded: Work) -> None:
        self.answers: list[bytes] = []
        self._work = folded, self.answers

    def settle(self, worker: WorkerTally, spent: bytes) -> bytes:
        """`spent` without idleness before the first batch: the worker waited for others to start."""
        worker.settled = bool(self.batches)
        whole = Spent.unpack(spent)
        return pack_spent(*whole._replace(idle=max(0.0, min(whole.idle, perf_counter() - self._began))))

    def note_slow(self, slow: Slow) -> None:
        """A batch that may be one of the slowest."""
        self.slowest = sorted([*self.slowest, slow], key=lambda slow: -slow[2])[:SLOWEST]
        self.slow = self._least_slow

    @property
    def _least_slow(self) -> float:
        if self.trace is not None or len(self.slowest) < SLOWEST:
            return -1.0
        return self.slowest[-1][2]

    # ---- in any thread

    @property
    def work(self) -> Work:
        """The work of all workers."""
        folded, log = self._work
        return folded.plus(log.copy())

    @classmethod
    def of(cls, tallies: Sequence[Tally]) -> Tally:
        """The sum of several tallies."""
        whole = cls()
        work = Work.nothing(0)
        for tally in tallies:
            for name in _SUMS:
                setattr(whole, name, getattr(whole, name) + getattr(tally, name))
            whole.wait, whole.step = whole.wait.merged(tally.wait), whole.step.merged(tally.step)
            work = work.merged(tally.work)
            whole.workers += [WorkerTally() for _ in tally.workers[len(whole.workers) :]]
            for worker, other in zip(whole.workers, tally.workers, strict=False):
                worker.process, worker.node = other.process or worker.process, other.node or worker.node
                worker.lane = other.lane or worker.lane
            for slow in tally.slowest:
                whole.note_slow(slow)
        whole._keep(work)
        return whole

    def times(self) -> EpochTimes:
        """How the time was spent, for the user."""
        from rayloader.observe.stats import EpochTimes

        wait, step, number, sums = self.wait.total, self.step.total, len(self.workers), self.work.sums.sum(axis=0)
        idle, build = float(sums[0]), float(sums[1:].sum())
        busy = (wait + step) * (build / (build + idle) if build else 0.0)
        return EpochTimes(self.epoch, wait, step, busy if number else wait, number)

    def period(self) -> Period:
        """The measurements, for the user."""
        from rayloader.observe.stats import Period, SlowBatch, WorkerStats

        work = self.work
        build = Series()
        workers = []
        for worker_id, worker in enumerate(self.workers):
            own = work.of(worker_id)
            build = build.merged(own)
            idle, fetch, collate, transfer = work.sums[worker_id].tolist()
            where = worker.process, worker.node, worker.lane
            workers.append(WorkerStats(worker_id, own.times(), idle, fetch, collate, transfer, *where))
        times = build.times()
        slow, seconds = build.above(SLOW * times.median)
        return Period(
            **{name: getattr(self, name) for name in _SUMS},
            wait=self.wait.times(),
            step=self.step.times(),
            build=times,
            slow=slow,
            slow_ratio=seconds / times.median if slow else 0.0,
            workers=tuple(workers),
            slowest=tuple(SlowBatch(*slow) for slow in self.slowest),
        )


class _Kept(NamedTuple):
    """What a recorder has."""

    past: Tally  # of all that has ended.
    ended: tuple[Tally, ...]  # the last of these.
    live: tuple[tuple[weakref.ref[object], Tally], ...]  # to which iterators still write, the latest last.


class Recorder:
    """The measurements of all epochs of one loader. The loader owns it and its iterators write to their `Tally`."""

    def __init__(self) -> None:
        self._kept = _Kept(Tally(), (), ())  # replaced as a whole, because another thread may be reading it
        self._trace: Trace | None = None

    def begins(self, iterator: object, num_workers: int, depth: int = 0, epoch: int = 0) -> Tally:
        """An iterator of the loader begins an epoch; its previous one, if any, has ended. See `Tally`."""
        past, before, live = self._kept
        ended = [tally for ref, tally in live if ref() in (None, iterator)]
        others = [(ref, tally) for ref, tally in live if tally not in ended]
        new = Tally(num_workers, depth, epoch)
        new.set_trace(self._trace)
        last = tuple([*before, *(tally for tally in ended if tally.batches)][-KEPT_EPOCHS:])
        self._kept = _Kept(Tally.of([past, *ended]), last, (*others, (weakref.ref(iterator), new)))
        return new

    def traced(self, path: Path, title: str) -> Tracing:
        """Traces the iterators from now on; see `DataLoader.trace`."""
        if self._trace is not None:
            raise RayloaderError("this loader is being traced already; end that trace first")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} for the trace; make it first")
        from rayloader.observe.trace import Tracing

        return Tracing(self, path.absolute(), title)

    def set_trace(self, trace: Trace | None) -> None:
        """Sets where to report events from now on."""
        self._trace = trace
        for tally in (*self._kept.ended, *(tally for _, tally in self._kept.live)):
            tally.set_trace(trace)

    def tell(self, **of_loader: Any) -> LoaderStats:
        """The measurements, beside other fields of `LoaderStats`, of the loader itself."""
        from rayloader.observe.stats import LoaderStats, is_enough, verdict

        past, ended, live = self._kept
        writing = [tally for _, tally in live]
        epoch = recent = writing[-1] if live else past
        for tally in reversed(ended):
            if is_enough(recent.wait.count, len(epoch.workers)) or len(tally.workers) != len(epoch.workers):
                break
            recent = Tally.of([tally, recent])
        stats = LoaderStats(
            num_workers=len(epoch.workers),
            epoch=epoch.period(),
            recent=recent.period(),
            total=Tally.of([past, *writing]).period(),
            epochs=tuple([tally.times() for tally in (*ended, *writing) if tally.batches][-KEPT_EPOCHS:]),
            cpus=cpus(),
            load=load(),
            prefetch_factor=epoch.depth,
            **of_loader,
        )
        return replace(stats, verdict=verdict(stats))


def cpus() -> float:
    """How many CPUs this process may use; a container's limit may be a fraction."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(here, int(quota) / int(period))
    except (OSError, ValueError):  # no control groups of version 2, or "max": there is no limit
        return here


def load() -> float:
    """How many threads wanted a CPU in the last minute, for each that this machine has; 0 on Windows."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0
