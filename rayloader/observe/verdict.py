"""The verdict of `DataLoader.stats()`: is it the loader or the model?

Promise: a pure function of measurements, which says what follows from the numbers of the last epochs, or that nothing
does. Each figure that it names is one that the text of the measurements shows below it.
"""

from __future__ import annotations

import math
import statistics

from rayloader.observe.recorder import ENOUGH_BATCHES, is_enough
from rayloader.observe.stats import CacheStats, LoaderStats, Period, WorkerStats, count, figure, percent, seconds

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
    period = stats.recent
    if not is_enough(period.wait.count, stats.num_workers):
        few = count(period.wait.count, "batch", "batches")
        return f"too little to say: only {few} so far, without the first of each epoch"
    return _said(stats, period) + _of_cache(stats.cache, period)


def _of_cache(cache: CacheStats | None, period: Period) -> str:
    """What a cache could do for a trainer that waits."""
    if cache is None or not cache.full or period.wait_share < WAIT_SHARE:
        return ""
    return "; the cache is full: raise max_bytes"


def _said(stats: LoaderStats, period: Period) -> str:
    if period.wait_share < WAIT_SHARE:
        return _trainer_bound(stats, period)
    waits = f"the trainer waits {percent(period.wait_share)} of the time"
    if not period.workers:
        return _without_workers(stats, period, waits)
    if period.blocked < period.wait.total / 2:
        return _own_work(period, waits)
    if period.busy >= BUSY:
        return _more_workers(stats, period, waits)
    return _held_up(stats, period, waits)


def _is_idle(period: Period) -> bool:
    """Whether the trainer does next to nothing with a batch."""
    return period.step.total < STEP_SHARE * period.seconds


def _trainer_bound(stats: LoaderStats, period: Period) -> str:
    waits = f"the trainer waits only {percent(period.wait_share)} of the time"
    if not period.workers:
        return f"nothing to mend: {waits}"
    needed = max(1, math.ceil(MARGIN * period.build.mean * period.batches_per_s))  # not `total`: some are built ahead
    if needed < stats.processes:
        return f"the trainer is the bottleneck: {needed} of {count(stats.processes, 'worker')} would do ({waits})"
    return f"nothing to mend: {waits}"


def _without_workers(stats: LoaderStats, period: Period, waits: str) -> str:
    said = f"input-bound: {waits}, in which it builds its batches itself"
    if _cpus_are_in_use(stats):
        return f"{said}; {_no_use(stats)}"
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
    near = sum(worker.lane.startswith("line") for worker in period.workers) * 2 >= len(period.workers)
    if near and _cpus_are_in_use(stats):
        return f"{said}; {_no_use(stats)}"
    if _is_idle(period):
        return f"{said}; each further worker would raise the rate of a trainer that does next to nothing with a batch"
    own = (period.wait.total - period.blocked + period.step.total) / period.wait.count
    needed = math.ceil(MARGIN * period.build.mean / own)
    more = max(1, needed - stats.processes)
    said = f"{said}; about {count(more, 'more worker')} would end it"
    if near and stats.processes + more > stats.cpus:
        said += f", if they need less than a CPU each: this machine has {stats.cpus:g}"
    return said


def _cpus_are_in_use(stats: LoaderStats) -> bool:
    return stats.cpu_use is not None and stats.cpu_use >= CPUS_IN_USE


def _no_use(stats: LoaderStats) -> str:
    return (
        f"all CPUs of this machine ({stats.cpus:g}) are in use already: cheaper samples would help, or workers on "
        "other machines"
    )


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
