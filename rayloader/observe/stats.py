"""A loader's measurements, `DataLoader.stats()`, and its verdict: is it the loader or the model?

Promise: data, its text form, and a pure function of it, `verdict`, which says what follows from the numbers, or that
nothing does; no clock, no Ray, no torch. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from dataclasses import dataclass

__all__ = ["CacheStats", "LoaderStats", "Period", "SlowBatch", "Times", "WorkerStats"]

# How many workers the text describes one by one.
SHOWN_WORKERS = 16
# Longer lines are wrapped.
WIDTH = 120


@dataclass(frozen=True)
class Times:
    """How long something took, each time that it happened; seconds. The quantiles are those of the last 2,048 times."""

    count: int = 0  #: how often it happened.
    total: float = 0.0  #: all of them together.
    median: float = 0.0  #: half of them took no longer.
    p95: float = 0.0  #: 95% of them took no longer.
    p99: float = 0.0  #: 99% of them took no longer.
    longest: float = 0.0  #: the longest one.

    @property
    def mean(self) -> float:
        """Mean time in seconds."""
        return self.total / self.count if self.count else 0.0

    def __str__(self) -> str:
        return f"median {seconds(self.median)}, p95 {seconds(self.p95)}, p99 {seconds(self.p99)}"


@dataclass(frozen=True)
class WorkerStats:
    """What one worker did for the batches that it has sent. Seconds are totals over all these batches."""

    worker_id: int  #: torch's, from 0 on.
    build: Times = Times()  #: its work on a batch, the following three together.
    idle: float = 0.0  #: seconds for which its process had nothing to do, from the first batch of the epoch on.
    fetch: float = 0.0  #: seconds in the dataset.
    collate: float = 0.0  #: seconds in `collate_fn`.
    #: seconds for encoding batches, placing them in shared memory if there is any, and sending them.
    transfer: float = 0.0
    process: str = ""  #: "fork" or "Ray actor"; "" if it has sent nothing.
    node: str = ""  #: Ray's id of the node that an actor is on.
    #: how it is reached and how its batches travel: "line, arena", "line", "TCP line" or "Ray calls"; "" if it has sent
    #: nothing.
    lane: str = ""
    depth: int = 0  #: largest number of batches that were requested from it at one time.

    @property
    def busy(self) -> float:
        """The share of its time, from 0 to 1, for which it had something to do."""
        return _share(self.build.total, self.idle)

    def __str__(self) -> str:
        batches = self.build.count
        if not batches:
            return "has sent no batch"
        parts = [f"{name} {seconds(getattr(self, name) / batches)}" for name in ("fetch", "collate", "transfer")]
        where = f"{self.process}, {self.lane}, depth {self.depth}"
        return f"busy {self.busy:.0%}, {batches:,} batches: {', '.join(parts)} each; {where}"


@dataclass(frozen=True)
class SlowBatch:
    """One of the batches that took longest to build."""

    batch: int  #: its number in its epoch, from 0 on.
    worker_id: int  #: the worker that built it.
    seconds: float  #: how long this took.
    indices: str  #: of its samples, as text, shortened if there are many; "" for an iterable dataset.

    def __str__(self) -> str:
        indices = f", indices {self.indices}" if self.indices else ""
        return f"batch {self.batch} of worker {self.worker_id}: {seconds(self.seconds)}{indices}"


@dataclass(frozen=True)
class Period:
    """One epoch, or all epochs together: what the trainer got, and how its time was spent."""

    batches: int = 0  #: that the trainer got.
    samples: int = 0  #: in these batches; for each batch, as many as its worker took from the dataset and did not skip.
    #: in the memory of their tensors, arrays and other buffers. Without workers, only tensors and arrays in lists,
    #: tuples and dicts count.
    nbytes: int = 0
    #: seconds inside `next()` until the first batch of the epoch, in which workers start and the first batches are
    #: built; not part of any other figure. In all: of all epochs together.
    first_wait: float = 0.0
    #: inside `next()`, for each other batch. Without workers this is the time in which it is built.
    wait: Times = Times()
    step: Times = Times()  #: between the return of `next()` and its next call.
    #: seconds of `wait` in which nothing had come from the workers. The rest is the loader's own work.
    blocked: float = 0.0
    behind: float = 0.0  #: seconds of `blocked` in which a finished batch had to wait for an earlier one.
    drawing: float = 0.0  #: seconds of `wait` for drawing from the sampler.
    #: batches whose large tensors the workers have built in page-locked memory, from which a GPU takes them without a
    #: further copy; with `pin_memory` or `device`.
    page_locked: int = 0
    locked_bytes: int = 0  #: memory of workers that was page-locked for batches.
    locking: float = 0.0  #: seconds that this took, in which no kernel of a GPU starts.
    build: Times = Times()  #: a worker's work on a batch.
    slow: int = 0  #: batches that took more than 4 times the median to build, as far as the last 2,048 tell.
    slow_ratio: float = 0.0  #: how many times the median these took, on average.
    restarts: int = 0  #: of workers whose process died, hung or was lost.
    skipped: int = 0  #: samples that were left out, with `on_error="skip"`.
    workers: tuple[WorkerStats, ...] = ()  #: in the order of their numbers; none with `num_workers=0`.
    slowest: tuple[SlowBatch, ...] = ()  #: a handful of batches, the slowest first.

    @property
    def seconds(self) -> float:
        """Wait and step together, from the first batch of the epoch on."""
        return self.wait.total + self.step.total

    @property
    def wait_share(self) -> float:
        """The share of these seconds, from 0 to 1, that the trainer waits."""
        return _share(self.wait.total, self.step.total)

    @property
    def batches_per_s(self) -> float:
        """Batches a second, from the first one of the epoch on."""
        return self.wait.count / self.seconds if self.seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second, from the first batch of the epoch on."""
        return self.batches_per_s * self.samples / self.batches if self.batches else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second, from the first batch of the epoch on."""
        return self.batches_per_s * self.nbytes / self.batches if self.batches else 0.0

    @property
    def busy(self) -> float:
        """The share of the workers' time, from 0 to 1, for which they had something to do."""
        return _share(self.build.total, sum(worker.idle for worker in self.workers))

    def __str__(self) -> str:
        return (
            f"{self.batches:,} batches, {self.samples:,} samples, {nbytes(self.nbytes)}; {self.batches_per_s:,.1f} "
            f"batches/s, {self.samples_per_s:,.1f} samples/s, {nbytes(self.bytes_per_s)}/s"
        )


@dataclass(frozen=True)
class CacheStats:
    """What the cache of a node holds, and how often it has served; over all processes and loaders of that node."""

    samples: int = 0  #: of the dataset.
    present: int = 0  #: samples that are in the cache.
    nbytes: int = 0  #: that these take.
    max_bytes: int = 0  #: that they may take, or could be had.
    hits: int = 0  #: samples that were read from it.
    built: int = 0  #: samples that were built, because they were not there.
    full: bool = False  #: whether a sample has found no room.

    @property
    def missing(self) -> int:
        """Samples that are not there yet, or find no room."""
        return self.samples - self.present

    @property
    def hit_rate(self) -> float:
        """The share of all samples, from 0 to 1, that were read and not built."""
        return _share(self.hits, self.built)

    def __str__(self) -> str:
        full = ", full" if self.full else ""
        return (
            f"{self.present:,} of {self.samples:,} samples in {nbytes(self.nbytes)}{full}; {self.hits:,} were read and "
            f"{self.built:,} built: {self.hit_rate:.0%}"
        )


@dataclass(frozen=True)
class LoaderStats:
    """A loader's measurements: see `DataLoader.stats()`. Its `str()` is a table for reading."""

    num_workers: int = 0  #: of the last iterator; 0 without workers, and before the first `iter()`.
    epoch: Period = Period()  #: the epoch in progress, or else the last one.
    total: Period = Period()  #: all epochs of all iterators of this loader object.
    processes: int = 0  #: how many host these workers.
    #: bytes of batches that the workers have sent and the trainer has not taken. The size of batches that are still
    #: being built is not known.
    bytes_under_way: int = 0
    #: bytes of the memory for batches that the trainer was given and still refers to: shared memory of the workers, and
    #: reusable memory for batches from the network. Tensors of 64 KiB and less, and pinned ones, have memory of their
    #: own and do not count. Both are 0 when an epoch has ended, unless workers are persistent.
    bytes_held: int = 0
    cpus: float = 1.0  #: that this process may use.
    #: the share of them, from 0 to 1, that all processes have used since the first batch of the epoch; None if the
    #: system does not report it.
    cpu_use: float | None = None
    dynamic: bool = False  #: whether `scheduling="dynamic"`.
    in_order: bool = True  #: whether batches are delivered in order.
    iterable: bool = False  #: whether the dataset is iterable-style.
    prefetch_factor: int | None = None  #: batches of each worker that may be under way; None if the depth is automatic.
    cache: CacheStats | None = None  #: of `rayloader.cached`, if the dataset is one, or holds one.
    verdict: str = ""  #: whether the loader or the trainer is the bottleneck, and what to do, in one sentence.

    def __str__(self) -> str:
        epoch = self.epoch
        lines = [("verdict", self.verdict), ("this epoch", str(epoch)), ("in all", str(self.total))]
        if epoch.batches:
            lines.append(("first batch", f"after {seconds(epoch.first_wait)}"))
            lines.append(("wait", f"{epoch.wait_share:.0%} of the time; {epoch.wait}"))
            lines.append(("step", f"{1 - epoch.wait_share:.0%} of the time; {epoch.step}"))
        if epoch.build.count:
            lines.append(("building", f"{epoch.build} of a worker's time a batch"))
        for worker in epoch.workers[:SHOWN_WORKERS]:
            lines.append((f"worker {worker.worker_id}", str(worker)))
        if len(epoch.workers) > SHOWN_WORKERS:
            lines.append(("", f"and {len(epoch.workers) - SHOWN_WORKERS} more; all together busy {epoch.busy:.0%}"))
        if self.num_workers:
            waiting = f"{nbytes(self.bytes_under_way)} of batches wait for the trainer"
            held = f"; it still holds {nbytes(self.bytes_held)} of those it was given" if self.bytes_held else ""
            lines.append(("memory", waiting + held))
        if self.total.page_locked or self.total.locked_bytes:
            share = epoch.page_locked / epoch.batches if epoch.batches else 0.0
            lines.append(
                (
                    "page-locked",
                    f"{share:.0%} of this epoch's batches were built in page-locked memory; in it "
                    f"{nbytes(epoch.locked_bytes)} were locked, in {seconds(epoch.locking)}; in all "
                    f"{nbytes(self.total.locked_bytes)}",
                )
            )
        if self.cache is not None:
            lines.append(("cache", str(self.cache)))
        if self.cpu_use is not None:
            lines.append(("CPUs", f"{self.cpu_use:.0%} of {self.cpus:g} in use"))
        if self.total.restarts or self.total.skipped:
            total = f"in all {self.total.restarts} and {self.total.skipped}"
            lines.append(
                ("failures", f"restarts of workers: {epoch.restarts}, skipped samples: {epoch.skipped}; {total}")
            )
        lines += [("slowest" if not place else "", str(slow)) for place, slow in enumerate(epoch.slowest)]
        return "\n".join(textwrap.fill(f"{name:<11} {text}", WIDTH, subsequent_indent=" " * 12) for name, text in lines)


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else 0.0


def seconds(value: float) -> str:
    """A time, as text."""
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def nbytes(value: float) -> str:
    """A size, as text."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"


# With fewer batches than this, and fewer than two of each worker, chance has too large a part in the numbers.
ENOUGH_BATCHES = 20
# A trainer that waits less than this share of its time does not wait enough to matter.
WAIT_SHARE = 0.05
# A trainer whose steps take less than this share of the time does next to nothing: it waits whatever the loader does.
STEP_SHARE = 0.05
# Workers that are busy for this share of their time are the bottleneck; otherwise something keeps them from working.
BUSY = 0.75
# If this share of the CPUs is in use, more workers would only compete with each other.
CPUS_IN_USE = 0.9
# A worker that takes this many times as long as the others is called slow.
SLOW_WORKER = 2.0
# Batches count as stragglers if they are at most this share of all.
STRAGGLER_SHARE = 0.25
# Work varies: recommend this many times the number of workers that would suffice on average.
MARGIN = 1.2


def verdict(stats: LoaderStats) -> str:
    """The sentence."""
    enough = max(ENOUGH_BATCHES, 2 * stats.num_workers)
    period = next((period for period in (stats.epoch, stats.total) if period.wait.count >= enough), None)
    if period is None:
        return f"too little to say: only {_count(stats.total.batches, 'batch', 'batches')} so far"
    said = _said(stats, period) + _of_cache(stats.cache, period)
    return said if period is stats.epoch else f"{said} (over all epochs)"


def _of_cache(cache: CacheStats | None, period: Period) -> str:
    """What a cache could do for a trainer that waits."""
    if cache is None or not cache.full or period.wait_share < WAIT_SHARE:
        return ""
    return (
        f"; the cache is full, and {cache.missing / cache.samples:.0%} of the samples are built each time: raise its "
        "max_bytes"
    )


def _said(stats: LoaderStats, period: Period) -> str:
    if period.wait_share < WAIT_SHARE:
        return _trainer_bound(stats, period)
    waits = f"the trainer waits {period.wait_share:.0%} of the time"
    if idle_trainer := period.step.total < STEP_SHARE * period.seconds:
        waits += ", for it does next to nothing with a batch"
    if not period.workers:
        return _without_workers(stats, period, waits, idle_trainer)
    if period.blocked < period.wait.total / 2:
        return _own_work(period, waits)
    if period.busy >= BUSY:
        return _more_workers(stats, period, waits, idle_trainer)
    return _held_up(stats, period, waits)


def _trainer_bound(stats: LoaderStats, period: Period) -> str:
    waits = f"the trainer waits only {period.wait_share:.1%} of the time"
    if not period.workers:
        return f"nothing to mend: {waits}"
    needed = max(1, math.ceil(MARGIN * period.build.mean * period.batches_per_s))  # not `total`: some are built ahead
    if needed < stats.processes:
        return f"the trainer is the bottleneck: {needed} of {_count(stats.processes, 'worker')} would do ({waits})"
    return f"nothing to mend: {waits}"


def _without_workers(stats: LoaderStats, period: Period, waits: str, idle_trainer: bool) -> str:
    said = f"input-bound: {waits}, in which it builds its batches itself"
    if _cpus_are_in_use(stats):
        return f"{said}; {_no_use(stats)}"
    if idle_trainer:
        return f"{said}; num_workers=1 or more would build them in other processes"
    needed = math.ceil(MARGIN * period.wait.total / period.step.total)
    return f"{said}; num_workers={needed} would build them meanwhile"


def _own_work(period: Period, waits: str) -> str:
    each = seconds((period.wait.total - period.blocked) / period.wait.count)
    if period.drawing > (period.wait.total - period.blocked) / 2:
        return (
            f"the sampler is the bottleneck: {waits}, mostly while the sampler draws indices; a cheaper sampler or "
            "larger batches would help, more workers would not"
        )
    return (
        f"input-bound: {waits}, mostly for the loader's own work in its process ({each} a batch); fewer, larger "
        "batches would help, more workers would not"
    )


def _more_workers(stats: LoaderStats, period: Period, waits: str, idle_trainer: bool) -> str:
    said = f"input-bound: {waits}, and the workers are busy {period.busy:.0%} of theirs"
    near = sum(worker.lane.startswith("line") for worker in period.workers) * 2 >= len(period.workers)
    if near and _cpus_are_in_use(stats):
        return f"{said}; {_no_use(stats)}"
    if idle_trainer:
        return f"{said}; each further worker would raise the rate"
    own = (period.wait.total - period.blocked + period.step.total) / period.wait.count
    needed = math.ceil(MARGIN * period.build.mean / own)
    more = max(1, needed - stats.processes)
    said = f"{said}; about {_count(more, 'more worker')} would end it"
    if near and stats.processes + more > stats.cpus:
        said += f", if they need less than a CPU each: this machine has {stats.cpus:g}"
    return said


def _cpus_are_in_use(stats: LoaderStats) -> bool:
    return stats.cpu_use is not None and stats.cpu_use >= CPUS_IN_USE


def _no_use(stats: LoaderStats) -> str:
    return (
        f"all CPUs of this machine ({stats.cpus:g}) are in use already, so that more workers on it would not help: "
        "cheaper samples would, or workers on other machines"
    )


def _held_up(stats: LoaderStats, period: Period, waits: str) -> str:
    """What keeps workers from working while the trainer waits."""
    idle = f"though the workers are busy only {period.busy:.0%} of theirs"
    behind = period.behind >= period.blocked / 2
    slow = _slow_worker(period.workers)
    dynamic = "" if stats.dynamic or stats.iterable else ": scheduling='dynamic' (with seeding='batch')"
    if behind and slow is not None:
        return f"worker {slow.worker_id} is the bottleneck: {waits}, mostly for its batches, which take " + (
            f"{slow.build.median / _others(period.workers, slow):.1f} times as long as the others'{dynamic}"
        )
    if behind and 0 < period.slow <= STRAGGLER_SHARE * period.build.count:
        often = round(period.build.count / period.slow)
        return (
            f"slow batches are the bottleneck: {waits}, {idle}; one batch in {often} takes {period.slow_ratio:.0f} "
            f"times the median, and the others wait for it{dynamic}"
        )
    if period.restarts:
        return f"input-bound: {waits}, {idle}; workers were restarted {_count(period.restarts, 'time')} meanwhile"
    if stats.prefetch_factor is not None:
        return (
            f"input-bound: {waits}, {idle}; at most {stats.prefetch_factor} batches of each are under way: a larger "
            "prefetch_factor may help"
        )
    if any(worker.lane == "Ray calls" for worker in period.workers):
        return f"input-bound: {waits}, {idle}; batches spend the rest of the time on their way through Ray"
    return f"input-bound: {waits}, {idle}; the numbers do not tell why"


def _slow_worker(workers: tuple[WorkerStats, ...]) -> WorkerStats | None:
    """The worker for which the others wait, if there is one."""
    if len(workers) < 2 or any(worker.build.count < ENOUGH_BATCHES / 2 for worker in workers):
        return None
    slowest = max(workers, key=lambda worker: worker.build.median)
    if slowest.busy < BUSY or slowest.build.median < SLOW_WORKER * _others(workers, slowest):
        return None
    return slowest


def _others(workers: tuple[WorkerStats, ...], without: WorkerStats) -> float:
    """How long a batch takes the other workers, in seconds."""
    return statistics.median(worker.build.median for worker in workers if worker is not without)


def _count(number: int, what: str, several: str = "") -> str:
    return f"{number:,} {what if number == 1 else several or what + 's'}"
