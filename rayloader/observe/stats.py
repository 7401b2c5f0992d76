"""The measurements of `DataLoader.stats()`, the verdict on them, and how they are shown: as text, picture and dict.

Promise: data only; no clock, no Ray, no torch. Times are in seconds, sizes in bytes. The text has at most 12 lines of
100 columns, whatever the loader: the verdict three, the slowest batches three, and all else one line each. The verdict
says what follows from the numbers of the last epochs, or that nothing does, and names only figures that the text shows.
"""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

__all__ = ["CacheStats", "EpochTimes", "LoaderStats", "Period", "SlowBatch", "Times", "WorkerStats"]

# Columns of the text, and of the names on its left.
WIDTH, NAMES = 100, 12


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

    @property
    def busy(self) -> float:
        """The share of its time, from 0 to 1, for which it had something to do."""
        return _share(self.build.total, self.idle)


@dataclass(frozen=True)
class SlowBatch:
    """One of the batches that took longest to build."""

    batch: int  #: its number in its epoch, from 0 on.
    worker_id: int  #: the worker that built it.
    seconds: float  #: how long this took.
    indices: str  #: of its first six samples, as text; "" for an iterable dataset.

    def __str__(self) -> str:
        indices = f", indices {self.indices}" if self.indices else ""
        return f"batch {self.batch}: {seconds(self.seconds)}{indices}"


@dataclass(frozen=True)
class Period:
    """One epoch, or several together: what the trainer got, and how its time was spent."""

    epochs: int = 0  #: in which the trainer got a batch.
    batches: int = 0  #: that the trainer got.
    samples: int = 0  #: in these batches; for each batch, as many as its worker took from the dataset and did not skip.
    #: in the memory of their tensors, arrays and other buffers. Without workers, only tensors and arrays in lists,
    #: tuples and dicts count.
    nbytes: int = 0
    #: seconds inside `next()` until the first batch of the epoch, in which workers start and the first batches are
    #: built; not part of any other figure. Of several epochs: all of these together.
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
    slowest: tuple[SlowBatch, ...] = ()  #: three batches at most, the slowest first.

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
            f"{_held(self)}; {figure(self.batches_per_s)} batches/s, {figure(self.samples_per_s)} samples/s, "
            f"{nbytes(self.bytes_per_s)}/s"
        )


@dataclass(frozen=True)
class EpochTimes:
    """How the time of one epoch was spent, from its first batch on; in seconds."""

    epoch: int  #: its number in the run, from 0.
    wait: float  #: inside `next()`.
    step: float  #: between two calls of `next()`.
    #: of wait and step together, those in which a worker had something to do, on average over the workers; without
    #: workers those of `wait`, in which the trainer builds its batches itself.
    build: float
    workers: int  #: how many there were.


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
            f"{figure(self.present)} of {figure(self.samples)} samples in {nbytes(self.nbytes)}{full}; "
            f"{figure(self.hits)} were read and {figure(self.built)} built: {self.hit_rate:.0%}"
        )


@dataclass(frozen=True, repr=False)
class LoaderStats:
    """A loader's measurements: see `DataLoader.stats()`. Its `str()` and `repr()` are a text for reading.

    A notebook shows that text below a picture of the last epochs.
    """

    num_workers: int = 0  #: of the last iterator; 0 without workers, and before the first `iter()`.
    epoch: Period = Period()  #: the epoch in progress, or else the last one.
    #: what the verdict is of: this epoch, and where it has too few batches to tell, as many before it as it takes.
    recent: Period = Period()
    total: Period = Period()  #: all epochs of all iterators of this loader object.
    epochs: tuple[EpochTimes, ...] = ()  #: the last eight at most, in their order.
    #: bytes of batches that the workers have sent and the trainer has not taken. The size of batches that are still
    #: being built is not known.
    bytes_under_way: int = 0
    #: bytes of the memory for batches that the trainer was given and still refers to: shared memory of the workers, and
    #: reusable memory for batches from the network. Tensors of 64 KiB and less, and pinned ones, have memory of their
    #: own and do not count. Both are 0 when an epoch has ended, unless workers are persistent.
    bytes_held: int = 0
    cpus: float = 1.0  #: that this process may use.
    #: how many threads wanted a CPU in the last minute, for each that the machine has: its load average; 0 on Windows.
    load: float = 0.0
    dynamic: bool = False  #: whether `scheduling="dynamic"`.
    iterable: bool = False  #: whether the dataset is iterable-style.
    prefetch_factor: int = 0  #: batches of each worker that may be under way; 0 without workers.
    cache: CacheStats | None = None  #: of `rayloader.cached`, if the dataset is one, or holds one.
    verdict: str = ""  #: whether the loader or the trainer is the bottleneck, and what to do, in one sentence.

    def __str__(self) -> str:
        recent, total = self.recent, self.total
        several = f"{recent.epochs} epochs, " if recent.epochs > 1 else ""
        lines = [("last epochs" if several else "last epoch", f"{several}{recent}")]
        if recent.batches:
            lines.append(("trainer", _of_trainer(recent)))
        if recent.workers:
            lines.append(("workers", _of_workers(recent)))
        of_cpus = f"CPUs {self.cpus:g}, load {self.load:.0%}" * bool(recent.batches)
        lines.append(("machine", "; ".join(filter(None, [of_cpus, self._of_memory()]))))
        if self.cache is not None:
            lines.append(("cache", str(self.cache)))
        failures = f"; restarts {figure(total.restarts)}, skipped samples {figure(total.skipped)}"
        of_all = f"{count(total.epochs, 'epoch')}, {_held(total)}"
        lines.append(("in all", of_all + failures * bool(total.restarts or total.skipped)))
        lines += [("slowest" * (not place), str(slow)) for place, slow in enumerate(recent.slowest)]
        wide = WIDTH - NAMES
        said = textwrap.wrap(self.verdict, wide, max_lines=3, placeholder=" ...") or [""]
        lines = [("verdict" * (not place), line) for place, line in enumerate(said)] + lines
        return "\n".join(f"{name:<{NAMES}}{_cut(_printable(text), wide)}".rstrip() for name, text in lines if text)

    __repr__ = __str__

    def _of_memory(self) -> str:
        if not self.num_workers:
            return ""
        locked = ""
        if self.total.page_locked or self.total.locked_bytes:
            share = self.recent.page_locked / max(1, self.recent.batches)
            locked = f", {share:.0%} in {nbytes(self.total.locked_bytes)} page-locked"
        return f"batches: {nbytes(self.bytes_under_way)} wait, {nbytes(self.bytes_held)} held{locked}"

    def _repr_html_(self) -> str:
        return f"<div>{_picture(self.epochs)}<pre>{html.escape(str(self))}</pre></div>"

    def as_dict(self) -> dict[str, Any]:
        """All fields, and the shares and rates that follow from them, as plain types, for whoever exports them.

        Returns:
            Numbers, texts, lists and dicts, by the names of the attributes; what is None is left out. Totals that grow
            with each batch are those of `total`.
        """
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    """A dataclass as a dict of its fields and properties, a tuple as a list."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not dataclasses.is_dataclass(value):
        return value
    names = [field.name for field in dataclasses.fields(value)]
    names += [name for name, found in vars(type(value)).items() if isinstance(found, property)]
    return {name: _plain(found) for name in names if (found := getattr(value, name)) is not None}


# ---- the verdict: is it the loader or the model?

# With fewer batches than this, and fewer than two of each worker, chance has too large a part in the numbers.
ENOUGH_BATCHES = 20
# A trainer that waits less than this share of its time does not wait enough to matter.
WAIT_SHARE = 0.05
# A trainer whose steps take less than this share of the time does next to nothing: it waits whatever the loader does.
STEP_SHARE = 0.05
# Workers that are busy for this share of their time are the bottleneck; otherwise something keeps them from working.
BUSY = 0.75
# With such a load of the machine, more workers would only compete with each other.
FULL_LOAD = 0.9
# A worker that takes this many times as long as the others is called slow.
SLOW_WORKER = 2.0
# Batches count as stragglers if they are at most this share of all.
STRAGGLER_SHARE = 0.25
# Work varies: recommend this many times the number of workers that would suffice on average.
MARGIN = 1.2


def is_enough(batches: int, num_workers: int) -> bool:
    """Whether so many batches, without the first of each epoch, tell what limits the rate."""
    return batches >= max(ENOUGH_BATCHES, 2 * num_workers)


def verdict(stats: LoaderStats) -> str:
    """The sentence."""
    period = stats.recent
    if not is_enough(period.wait.count, stats.num_workers):
        few = count(period.wait.count, "batch", "batches")
        return f"too little to say: only {few} so far, without the first of each epoch"
    if period.wait_share < WAIT_SHARE:
        return _trainer_bound(period)
    waits = f"the trainer waits {percent(period.wait_share)} of the time"
    if not period.workers:
        said = _without_workers(stats, period, waits)
    elif period.blocked < period.wait.total / 2:
        said = _own_work(period, waits)
    elif period.busy >= BUSY:
        said = _more_workers(stats, period, waits)
    else:
        said = _held_up(stats, period, waits)
    is_full = stats.cache is not None and stats.cache.full
    return said + "; the cache is full: raise max_bytes" * is_full


def _trainer_bound(period: Period) -> str:
    waits = f"the trainer waits only {percent(period.wait_share)} of the time"
    needed = max(1, math.ceil(MARGIN * period.build.mean * period.batches_per_s))  # not `total`: some are built ahead
    if needed < len(period.workers):
        return f"the trainer is the bottleneck: {needed} of {count(len(period.workers), 'worker')} would do ({waits})"
    return f"nothing to mend: {waits}"


def _is_idle(period: Period) -> bool:
    """Whether the trainer does next to nothing with a batch."""
    return period.step.total < STEP_SHARE * period.seconds


def _no_cpu(stats: LoaderStats) -> str:
    """That further workers would find no CPU, if that is so."""
    all_in_use = "; all CPUs of this machine are in use already: cheaper samples or other machines would help"
    return all_in_use if stats.load >= FULL_LOAD else ""


def _without_workers(stats: LoaderStats, period: Period, waits: str) -> str:
    said = f"input-bound: {waits}, in which it builds its batches itself"
    if no_cpu := _no_cpu(stats):
        return said + no_cpu
    if _is_idle(period):
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


def _more_workers(stats: LoaderStats, period: Period, waits: str) -> str:
    said = f"input-bound: {waits}, and the workers are busy {period.busy:.0%} of theirs"
    number = len(period.workers)
    near = sum(worker.lane.startswith("line") for worker in period.workers) * 2 >= number
    if near and (no_cpu := _no_cpu(stats)):
        return said + no_cpu
    if _is_idle(period):
        return f"{said}; each further worker would raise the rate of a trainer that does next to nothing with a batch"
    own = (period.wait.total - period.blocked + period.step.total) / period.wait.count
    more = max(1, math.ceil(MARGIN * period.build.mean / own) - number)
    said = f"{said}; about {count(more, 'more worker')} would end it"
    if near and number + more > stats.cpus:
        said += f", if they need less than a CPU each: this machine has {stats.cpus:g}"
    return said


def _held_up(stats: LoaderStats, period: Period, waits: str) -> str:
    """What keeps workers from working while the trainer waits."""
    idle = f"though the workers are busy {period.busy:.0%} of theirs"
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
            f"slow batches are the bottleneck: {waits}, mostly for one batch in {figure(often)}, which takes "
            f"{figure(round(period.slow_ratio))} times the median{dynamic}"
        )
    if period.restarts:
        return f"input-bound: {waits}, {idle}; workers were restarted {count(period.restarts, 'time')} meanwhile"
    if any(worker.lane == "Ray calls" for worker in period.workers):
        return f"input-bound: {waits}, {idle}; batches spend the rest of the time on their way through Ray"
    return (
        f"input-bound: {waits}, {idle}; at most {stats.prefetch_factor} batches of each are under way: a larger "
        "prefetch_factor may help"
    )


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


# ---- lines of the text


def _held(period: Period) -> str:
    return f"{count(period.batches, 'batch', 'batches')}, {count(period.samples, 'sample')}, {nbytes(period.nbytes)}"


def _of_trainer(period: Period) -> str:
    wait, step = period.wait, period.step
    return (
        f"waits {percent(period.wait_share)}: median {seconds(wait.median)}, p99 {seconds(wait.p99)}, first "
        f"{seconds(period.first_wait)}; steps {percent(1 - period.wait_share)}: median {seconds(step.median)}"
    )


def _of_workers(period: Period) -> str:
    kinds = {worker.process for worker in period.workers if worker.process}
    lanes = {worker.lane for worker in period.workers if worker.lane}
    what = count(len(period.workers), *(kinds if len(kinds) == 1 else ("worker",)))
    how = f" ({[*lanes, 'several lanes'][0 if len(lanes) == 1 else -1]})" if lanes else ""
    batches = max(1, period.build.count)
    parts = [
        f"{name} {figure(sum(getattr(worker, name) for worker in period.workers) / batches * 1e3)}"
        for name in ("fetch", "collate", "transfer")
    ]
    return f"{what}{how}, busy {period.busy:.0%}: {', '.join(parts)} ms"


def _cut(text: str, wide: int) -> str:
    """The text, without the words at its end for which there is no room."""
    if len(text) <= wide:
        return text
    whole, _, part = text[: wide - 4].rpartition(" ")
    return f"{whole if len(part) < wide // 2 else text[: wide - 4]} ..."


def _printable(text: str) -> str:
    """The text as one line, without what moves a terminal's cursor, or is not valid in XML."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


# ---- the picture

# Each is readable on black and on white, and none is told from another by red and green alone.
_COLOURS = {"wait": "#e0702a", "step": "#8a8f98", "build": "#3f8fd2"}
_LEGEND = {"wait": "the trainer waits", "step": "its step", "build": "batches are built"}
_LEFT, _LONG, _HIGH = 70, 360, 14  # where bars begin, how long and how high they are, in pixels


def _picture(epochs: tuple[EpochTimes, ...]) -> str:
    """A bar of the trainer's time for each epoch, and below it one of its workers'; an SVG."""
    longest = max((one.wait + one.step for one in epochs), default=0.0)
    if not longest:
        return ""
    drawn, top = [], 0
    for place, (name, words) in enumerate(_LEGEND.items()):
        left = _LEFT + 130.0 * place
        drawn += [_bar(left, top, _HIGH, _COLOURS[name]), _words(left + _HIGH + 4, top, words)]
    for one in epochs:
        top += 2 * _HIGH + 6
        spent = one.wait + one.step
        drawn.append(_words(0, top, f"epoch {one.epoch}"))
        lanes = [[("wait", one.wait), ("step", one.step)], [("build", one.build)]]
        if not one.workers:
            lanes = [[("build", one.wait), ("step", one.step)]]
        for lane, parts in enumerate(lanes):
            left, y = float(_LEFT), top + lane * _HIGH
            for name, part in parts:
                drawn.append(_bar(left, y, part / longest * _LONG, _COLOURS[name]))
                left += part / longest * _LONG
            said = ", ".join(f"{name} {part / (spent or 1.0):.0%}" for name, part in parts)
            drawn.append(_words(_LEFT + _LONG + 8, y, said + f" of {seconds(spent)}" * (not lane)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _LONG + 220}" height="{top + 2 * _HIGH + 4}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor">{"".join(drawn)}</svg>'
    )


def _bar(left: float, top: float, length: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{top}" width="{length:.1f}" height="{_HIGH - 1}" fill="{colour}"/>'


def _words(left: float, top: float, text: str) -> str:
    return f'<text x="{left:g}" y="{top + _HIGH - 3}">{text}</text>'


# ---- numbers


def _share(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest > 0 else 0.0


def percent(share: float) -> str:
    """A share, as text; with a decimal where it is nearly nothing or nearly all."""
    return f"{share:.0%}" if 0.1 <= share <= 0.9 or not 0.0005 <= share < 0.9995 else f"{share:.1%}"


def figure(value: float) -> str:
    """A number, as text of at most five characters."""
    if value < 9999.5:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    for unit in ("k", "M", "G"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g}{unit}"
    return f"{value / 1000:.3g}T"


def count(number: int, what: str, several: str = "") -> str:
    """How many there are of something, as text."""
    return f"{figure(number)} {what if number == 1 else several or what + 's'}"


def seconds(value: float) -> str:
    """A time, as text."""
    if value >= 0.9995:
        return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} us"


def nbytes(value: float) -> str:
    """A size, as text."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} PB"
