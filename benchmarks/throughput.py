"""Batches a second, beside torch's own loader, other loaders, and the floor.

Motive: what does it cost, or bring, to change the import? And how much is left to gain?
Method: for each case the same dataset and arguments for all. Each implementation runs in a process of its own, torch's
and every other that is not built on Ray in one that never sees Ray. They alternate, one measured epoch each a round, in
an order that rotates, after one unmeasured epoch. The clock runs from the first batch to the end of the epoch; the
first batch is a question of its own (`first_batch.py`). The consumer touches nothing. Everybody has OMP_NUM_THREADS=1.
Figures are medians over the rounds; ratios are of medians. The floor is the time that one worker process needs to fetch
and collate the same batches into reused memory, divided by min(workers, cores): what is left to gain.
Command: python benchmarks/throughput.py [--rounds N] [--cases tiny,medium] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "throughput".
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import harness
import peers
import processes
from cases import CASES
from harness import Figure, Options
from processes import Missing

QUESTION = "throughput"
PEERS = ["torch", "torchdata", "spdl", "spdl-threads", "grain", "ray-data", "rayloader", "floor"]
QUICK_PEERS = ["torch", "rayloader", "floor"]
RATE = "batches/s"

_loader: dict[tuple[Any, ...], Any] = {}  # the last one, in an implementation's process


def epoch(name: str, case: str, batches: int, workers: int) -> dict[str, float]:
    """One epoch in this process: its rate, and the seconds of CPU that this process spent on a batch."""
    key = (case, batches, workers)
    if key not in _loader:
        _loader.clear()
        gc.collect()
        _loader[key] = peers.make(name, CASES[case], batches, workers)
    iterator = iter(_loader[key])
    next(iterator)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    count = sum(1 for _ in iterator)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    if count != batches - 1:
        raise RuntimeError(f"{name} gave {count + 1} batches of {case} instead of {batches}")
    return {"batches_per_s": count / seconds, "cpu_s_per_batch": cpu_seconds / count}


def measure(options: Options) -> list[Figure]:
    """Rates, ratios to torch and shares of the floor, for each case."""
    names = options.pick_peers(PEERS, quick=QUICK_PEERS)
    figures = []
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(processes.Peer(name, peers.FLOOR_ENV if name == "floor" else None))
            for name in names
        }
        for case in options.pick_cases(list(CASES)):
            figures += _measure_case(case, sides, options)
    return figures


def _measure_case(case: str, sides: dict[str, processes.Peer], options: Options) -> list[Figure]:
    batches = CASES[case].epoch_length(options.quick)
    size = {"batches": batches, "workers": options.workers}
    rounds: dict[str, list[float]] = {}
    missing: dict[str, Missing] = {}
    for name, side in sides.items():
        harness.say(f"{QUESTION}: {case}, {name}, warming up")
        try:
            first = side.call(f"{QUESTION}:epoch", case=case, **size)
        except processes.PeerDied as died:
            if name in peers.REQUIRED:
                raise
            harness.say(str(died))
            side.restart()
            first = Missing("its process died, as when a machine runs out of memory")
        if isinstance(first, Missing):
            missing[name] = first
        else:
            rounds[name] = []
    for number in range(options.rounds):
        harness.say(f"{QUESTION}: {case}, round {number + 1} of {options.rounds}")
        for name in harness.rotated(list(rounds), number):
            rounds[name].append(sides[name].call(f"{QUESTION}:epoch", case=case, **size)["batches_per_s"])
    if "floor" in rounds:
        parallel = min(options.workers, len(os.sched_getaffinity(0)))
        rounds["floor"] = [parallel * rate for rate in rounds["floor"]]
    rates = {
        name: harness.figure(
            QUESTION, case, name, RATE, "1/s", missing.get(name) or rounds[name], **size, title=CASES[case].title
        )
        for name in sides
    }
    return [*rates.values(), *_ratios(case, rates)]


def _ratios(case: str, rates: dict[str, Figure]) -> list[Figure]:
    """Everybody's to torch; rayloader's to the floor."""
    target = {"target": CASES[case].target} if CASES[case].target else {}
    floor_target = {"target": CASES[case].floor_target} if CASES[case].floor_target else {}
    found = [
        harness.ratio(rate, rates["torch"], metric="ratio to torch", **(target if name == "rayloader" else {}))
        for name, rate in rates.items()
        if "torch" in rates and name not in ("torch", "floor")
    ]
    if {"rayloader", "floor"} <= set(rates):
        found.append(harness.ratio(rates["rayloader"], rates["floor"], metric="of the floor", **floor_target))
    return [ratio for ratio in found if ratio is not None]


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    names = list(dict.fromkeys(f["implementation"] for f in figures))
    cases = list(dict.fromkeys(f["case"] for f in figures))
    ratios = [{"metric": "ratio to torch"}, {"metric": "of the floor"}] if "rayloader" in names else []
    rows = []
    for case in cases:
        of_case = [f for f in figures if f["case"] == case]
        cells = [harness.find(of_case, implementation=name, metric=RATE) for name in names]
        cells += [harness.find(of_case, implementation="rayloader", **ratio) for ratio in ratios]
        rows.append([CASES[case].title, *map(harness.show, cells)])
    harness.print_table(
        "Batches a second", ["case", *names, *("rayloader " + ratio["metric"] for ratio in ratios)], rows
    )
    for name in names:
        print(f"- {name}: {peers.NOTES[name]}")
    harness.print_missing(figures)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__)))
