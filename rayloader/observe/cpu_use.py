"""How much of the CPUs available to this process is in use, by any process.

Promise: reads two small files of the kernel at the beginning and at the end. Without these files the use is unknown.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# A container's share of the machine, and its use of it (control groups, version 2).
_QUOTA, _USAGE = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu.stat")
_MACHINE = Path("/proc/stat")


def cpus() -> float:
    """How many CPUs this process may use; a container's limit may be a fraction."""
    quota = _quota()
    available = len(_allowed())
    return available if quota is None else min(quota, available)


class CpuUse:
    """Measures from its creation to `end`; until then, to the moment when it is asked."""

    def __init__(self) -> None:
        self._began = _used()
        self._end: tuple[float, float] | None = None

    def end(self) -> None:
        """Ends the measurement."""
        self._end = _used()

    @property
    def share(self) -> float | None:
        """From 0 to 1; None if it is unknown."""
        now = self._end or _used()
        if self._began is None or now is None or now[1] <= self._began[1]:
            return None
        return min(1.0, (now[0] - self._began[0]) / (now[1] - self._began[1]))


def _used() -> tuple[float, float] | None:
    """CPU time used, and CPU time available, in the same unit and counted from the same moment."""
    try:
        quota = _quota()
        if quota is not None and quota < len(_allowed()):
            usage = dict(line.split() for line in _USAGE.read_text().splitlines())
            return int(usage["usage_usec"]) / 1e6, time.monotonic() * quota
        used = total = 0
        allowed = _allowed()
        for line in _MACHINE.read_text().splitlines():
            name, *counts = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
                user, nice, system, idle, iowait, irq, softirq, steal = map(int, counts[:8])
                used += user + nice + system + irq + softirq + steal
                total += user + nice + system + irq + softirq + steal + idle + iowait
        return (used, total) if total else None
    except (OSError, KeyError, ValueError):  # another kernel, or no permission to read
        return None


def _quota() -> float | None:
    try:
        quota, period = _QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max": there is no limit
        return None


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
