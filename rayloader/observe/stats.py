"""A loader's measurements: `DataLoader.stats()`.

Promise: data, and its text form; no clock, no Ray, no torch. Times are in seconds, sizes in bytes. `verdict.py` derives
the verdict from these numbers alone.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

# How many workers the text describes one by one.
SHOWN_WORKERS = 16
# Longer lines are wrapped.
WIDTH = 120


@dataclass(frozen=True)
class Times:
    """How long something took, each time that it happened; seconds. The quantiles are exact to 6%."""

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
        return f"busy {self.busy:.0%}, {batches:,} batches: {', '.join(parts)} each; {self.lane}, depth {self.depth}"


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
    build: Times = Times()  #: a worker's work on a batch.
    slow: int = 0  #: batches that took more than 4 times the median to build.
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
