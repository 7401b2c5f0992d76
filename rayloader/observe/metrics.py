"""The loaders' measurements, as metrics for Prometheus, in a Ray that exports metrics.

Promise: does not import Ray, whose classes are passed in. If metrics are off, nothing is reported or computed. If they
are on, `tell` takes some tenths of a millisecond for each loader, once in `INTERVAL_S`, in the janitor's thread;
batches cost nothing more.

Values are labelled with the loader's name. Loaders with the same name are added up.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayloader.interrupts import new_lock
from rayloader.observe.recorder import Recorder
from rayloader.observe.stats import Period

logger = logging.getLogger("rayloader")

# How often metrics are reported, in seconds. By default, Ray itself passes them on every 10 s.
INTERVAL_S = 1.0

LABELS = ("loader",)

# Totals since the start of the loader: description, and where to find the value.
COUNTERS: dict[str, tuple[str, Callable[[Period], float]]] = {
    "rayloader_batches": ("Batches that the trainer got.", lambda period: period.batches),
    "rayloader_samples": ("Samples in these batches.", lambda period: period.samples),
    "rayloader_bytes": ("Bytes of these batches' tensors and arrays.", lambda period: period.nbytes),
    "rayloader_wait_seconds": (
        "Seconds that the trainer waited inside next(), without the first batch of each epoch.",
        lambda period: period.wait.total,
    ),
    "rayloader_first_wait_seconds": (
        "Seconds that the trainer waited for the first batch of each epoch.",
        lambda period: period.first_wait,
    ),
    "rayloader_step_seconds": ("Seconds between two calls of next().", lambda period: period.step.total),
    "rayloader_worker_busy_seconds": (
        "Seconds for which the workers had something to do, all together.",
        lambda period: period.build.total,
    ),
    "rayloader_worker_idle_seconds": (
        "Seconds for which the workers' processes had nothing to do, all together.",
        lambda period: sum(worker.idle for worker in period.workers),
    ),
    "rayloader_worker_restarts": ("Workers that were given another process.", lambda period: period.restarts),
    "rayloader_skipped_samples": ("Samples that were left out.", lambda period: period.skipped),
}

# Current values.
GAUGES = {
    "rayloader_workers": "Processes that work for the loader.",
    "rayloader_bytes_under_way": "Bytes of batches that the workers have sent and the trainer has not taken.",
    "rayloader_bytes_held": "Bytes of memory for batches that the trainer was given and still refers to in an epoch.",
}


class Metrics:
    """The metrics of all loaders of one Ray session.

    Args:
        is_on: whether metrics are exported; asked once, in `tell`.
        counter: Ray's class of counters, which are made from a name, a description and label names.
        gauge: Ray's class of gauges, made from the same.
    """

    def __init__(self, is_on: Callable[[], bool], counter: Callable[..., Any], gauge: Callable[..., Any]) -> None:
        self._is_on = is_on
        self._on: bool | None = None  # not asked yet
        self._counter, self._gauge = counter, gauge
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._reported: tuple[_Reported, ...] = ()  # replaced as a whole
        self._lock = new_lock(reentrant=False)
        self._due = 0.0  # time.monotonic(): when to report next

    def watch(self, loader: Any) -> bool:
        """Reports this loader's metrics from now on, until it is gone; returns whether `tell` must be called for that.

        Args:
            loader: a `DataLoader`.
        """
        if self._on is False:
            return False
        with self._lock:
            if any(one.loader() is loader for one in self._reported):
                return False
            self._reported += (_Reported(loader._label, loader._recorder, weakref.ref(loader)),)
        return True

    def tell(self, *, at_once: bool = False) -> float | None:
        """Reports new values, if due; returns the seconds until the next time, None if there is nothing to report.

        Runs in the janitor's thread.
        """
        if not self._reported or self._on is False:
            return None
        wait = self._due - time.monotonic()
        if wait > 0 and not at_once:
            return wait
        try:
            if self._on is None:
                self._on = self._is_on()
                if self._on:
                    self._counters = {name: self._counter(name, text, LABELS) for name, (text, _) in COUNTERS.items()}
                    self._gauges = {name: self._gauge(name, text, LABELS) for name, text in GAUGES.items()}
            if self._on:
                self._tell()
        except Exception:  # any error of Ray's: the janitor has more to do, and the training goes on
            logger.warning("rayloader: Ray has refused the metrics of loaders, and is told no more", exc_info=True)
            self._on = False
        self._due = time.monotonic() + INTERVAL_S
        with self._lock:
            self._reported = tuple(one for one in self._reported if self._on and not one.ended)
        return INTERVAL_S if self._reported else None

    def _tell(self) -> None:
        now: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(GAUGES))
        for one in self._reported:
            one.ended = one.loader() is None  # first: what follows is its last report
            self._count(one)
            now[one.label] = [old + new for old, new in zip(now[one.label], one.gauges(), strict=True)]
        for label, values in now.items():
            for gauge, value in zip(self._gauges.values(), values, strict=True):
                gauge.set(value, {"loader": label})

    def _count(self, one: _Reported) -> None:
        period = one.recorder.tell()[1].period()
        for name, (_, value_of) in COUNTERS.items():
            value = value_of(period)
            more = value - one.counted.get(name, 0.0)
            if more > 0:
                one.counted[name] = value
                self._counters[name].inc(more, {"loader": one.label})


@dataclass(eq=False, slots=True)
class _Reported:
    """A loader, and what Ray knows of it. Its recorder outlives it, so that the last batches are reported too."""

    label: str
    recorder: Recorder
    loader: weakref.ref[Any]
    counted: dict[str, float] = field(default_factory=dict)
    ended: bool = False

    def gauges(self) -> list[float]:
        """The values of `GAUGES`."""
        loader = self.loader()
        iterator = loader._live_iterator if loader is not None else None
        if iterator is None:
            return [0.0] * len(GAUGES)
        return [self.recorder.latest.processes, iterator.bytes_under_way, iterator.bytes_held]
