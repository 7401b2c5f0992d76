"""On which steps the user's thread spends its CPU time, while rayloader loads.

The functions of the steps are the library's own, and none of them calls another; within `stepwise` each is timed by the
thread's own clock, and its calls are counted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rayloader.epoch import engine
from rayloader.epoch.draws import Draws
from rayloader.epoch.schedule import Schedule
from rayloader.workers.connection import Mailbox
from rayloader.workers.fleet import Fleet, Worker

STEPS = {
    "draw": [(Draws, "next")],
    "schedule": [(Schedule, "handle")],
    "send": [(Worker, "give"), (Mailbox, "flush")],
    "wait": [(Fleet, "wait")],
    "receive": [(Fleet, "receive")],
    "open": [(engine, "opened")],
}


@dataclass
class Spent:
    """CPU time of the thread, time in which it did not run, and the number of calls."""

    seconds: float = 0.0
    blocked: float = 0.0
    calls: int = 0


@contextlib.contextmanager
def stepwise() -> Iterator[dict[str, Spent]]:
    """What each step took of the CPU, of all that is loaded within."""
    spent: dict[str, Spent] = defaultdict(Spent)
    before = [(owner, name, getattr(owner, name)) for places in STEPS.values() for owner, name in places]
    for step, places in STEPS.items():
        for owner, name in places:
            setattr(owner, name, _timed(getattr(owner, name), step, spent))
    try:
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _timed(function: Callable[..., Any], step: str, spent: dict[str, Spent]) -> Callable[..., Any]:
    def timed(*args: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **named)
        wall_began, began = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **named)
        finally:
            seconds = time.thread_time() - began
            spent[step].seconds += seconds
            spent[step].blocked += time.perf_counter() - wall_began - seconds
            spent[step].calls += 1

    return timed
