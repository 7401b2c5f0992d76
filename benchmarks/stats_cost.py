"""What it costs that a loader measures itself.

Motive: `DataLoader.stats()` has no switch, so measuring must cost next to nothing.
Method: one loader of the tiny case, whose batches are the cheapest there are, runs epoch after epoch in one process.
Every other epoch the driver's measuring is replaced by functions that do nothing; which kind comes first changes from
round to round. Compared are the CPU time of the driver and the time that passes, both for a batch: the medians over the
epochs of either kind, and the median of the ratios of neighbours. Then what is added to a batch is timed alone, in a
loop: what the driver counts, and what the worker notes, packs and unpacks.
Command: python benchmarks/stats_cost.py [--rounds N] [--batches N] [--workers N]
Last results: docs/decisions.md, "A loader always measures itself".
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cases import CASES
from harness import report_compared
from rayloader import DataLoader, shutdown
from rayloader.epoch.engine import Engine
from rayloader.epoch.iterator import EpochIterator
from rayloader.observe.recorder import Tally
from rayloader.protocol import Answer, pack_spent

LOOPS = 20_000
UNANSWERED = [None] * 10
SPENT = pack_spent(0, 1.0, 0.0, 1e-4, 1e-4, 1e-4)  # of a worker that is never idle


def nothing(*_: Any) -> None:
    """Instead of measuring."""


MEASURING: dict[tuple[type, str], Any] = {
    (owner, name): vars(owner)[name] for owner, name in ((Tally, "gave"), (Engine, "_record"))
}


def switch(on: bool) -> None:
    """Measures from here on, or no longer."""
    for (owner, name), method in MEASURING.items():
        setattr(owner, name, method if on else nothing)


def epoch(loader: Any) -> tuple[float, float]:
    """Seconds of CPU time and of time for a batch, without the first one."""
    iterator: EpochIterator = iter(loader)
    next(iterator)
    began, cpu_began = time.perf_counter(), time.process_time()
    count = sum(1 for _ in iterator)
    return (time.process_time() - cpu_began) / count, (time.perf_counter() - began) / count


def alone(work: Callable[[], object]) -> float:
    """Microseconds of CPU time of one call."""
    took = []
    for _ in range(9):
        began = time.process_time()
        for _ in range(LOOPS):
            work()
        took.append((time.process_time() - began) / LOOPS)
    return min(took) * 1e6


def in_the_driver() -> float:
    """Of a batch: what is noted as `next` begins and ends and as its answer comes, and the drawing of its indices."""
    tally, engine = Tally(2), Engine.__new__(Engine)
    engine._tally = tally
    engine.schedule = SimpleNamespace(unanswered=lambda _: UNANSWERED)  # type: ignore[assignment]
    tally.gave(time.perf_counter(), 0, 64, 50_000)
    tally.slow, worker = 1.0, tally.workers[0]
    worker.depth, worker.lane, worker.arena, worker.settled = 100, "line, arena", True, True
    one: Any = SimpleNamespace(worker_id=0)
    task: Any = SimpleNamespace(lent=object())
    answer = Answer(None, 3e-4, spent=SPENT)

    def work() -> None:
        engine._record(one, task, answer)
        began = time.perf_counter()
        tally.drawing += time.perf_counter() - began
        tally.gave(time.perf_counter(), 0, 64, 50_000)

    return alone(work) - alone(nothing)


def in_the_worker() -> float:
    """The clock is read four times more than without, and six numbers travel."""
    answer = b"x" * 200, 1e-4, (0, 0), None, None, False, ""

    def work() -> None:
        for _ in range(4):
            time.perf_counter()
        pickle.dumps((*answer, pack_spent(0, 1.1, 2.2, 3.3, 4.4, 5.5)), pickle.HIGHEST_PROTOCOL)

    return alone(work) - alone(lambda: pickle.dumps((*answer, b""), pickle.HIGHEST_PROTOCOL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, default=3600)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    case = CASES["tiny"]
    loader: Any = DataLoader(
        case.make(arguments.batches * case.batch_size),
        batch_size=case.batch_size,
        num_workers=arguments.workers,
        persistent_workers=True,
    )
    for _ in range(2):
        epoch(loader)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(arguments.rounds):
        for on in (True, False) if number % 2 else (False, True):
            switch(on)
            found[on].append(epoch(loader))
    switch(True)
    report_compared(found, ("CPU time of the driver", "time"))
    shutdown()
    print(f"alone: {in_the_driver():.2f} us in the driver, {in_the_worker():.2f} us in the worker")


if __name__ == "__main__":
    main()
