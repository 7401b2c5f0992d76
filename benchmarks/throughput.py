"""Batches a second, beside torch's own loader, other loaders, and the floor.

Motive: what does it cost, or bring, to change the import? And how much is left to gain?
Method: for each case the same dataset and arguments for all. Each implementation runs in a process of its own, torch's
and every other that is not built on Ray in one that never sees Ray. They alternate, one measurement each a round, in an
order that rotates, after one that does not count. The clock runs from the first batch to the end of the epoch, for
the first batch is a question of its own (`first_batch.py`); cases of several short epochs are timed whole, beginnings
included. The consumer touches nothing. Everybody has OMP_NUM_THREADS=1. Figures are medians over the rounds; ratios are
of medians. The floor is what is left to gain: as many processes as there are workers, all at once, that fetch and
collate the same batches into four buffers in turn. Loaders beside these three have shorter epochs (`LONG`), for some
take minutes.
Command: python benchmarks/throughput.py [--rounds N] [--cases tiny,medium] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "throughput".
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import harness
import peers
import processes
from cases import CASES, Case
from harness import Figure, Options
from processes import Missing

QUESTION = "throughput"
PEERS = ["torch", "torchdata", "spdl", "grain", "ray-data", "rayloader", "rayloader-fork", "floor"]
QUICK_PEERS = ["torch", "rayloader", "rayloader-fork", "floor"]
NEEDS = ("rich", "PIL", "sklearn")
# The others have epochs of a sixth of the length, or two in place of several.
LONG = {"torch", "rayloader", "rayloader-fork", "floor"}
QUICK_CASES = ("tiny", "tiny-short", "medium", "large", "text", "stream")
RATE, RATIO, OF_FLOOR = "batches/s", "ratio to torch", "of the floor"
CPU = "trainer's CPU a batch"

_loader: dict[tuple[Any, ...], Any] = {}  # the last one, in an implementation's process


def epoch(name: str, case: str, batches: int, workers: int, *, epochs: int = 0) -> dict[str, float]:
    """One measurement in this process: the rate, and the seconds of CPU that it spent on a batch, all threads.

    `epochs` is in place of the case's number of them, where that is more than one.
    """
    epochs = epochs or CASES[case].epochs
    key = (case, batches, workers)
    if key not in _loader:
        _loader.clear()
        gc.collect()
        _loader[key] = peers.make(name, CASES[case], batches, workers)
    loader = _loader[key]
    if isinstance(loader, peers.Floor):
        count, seconds, cpu_seconds = batches * epochs, loader.seconds(), 0.0
    elif CASES[case].epochs > 1:
        count, seconds, cpu_seconds = _whole_epochs(name, CASES[case], loader, batches, epochs)
    else:
        iterator = iter(loader)
        next(iterator)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        count = sum(1 for _ in iterator)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        _check(name, case, count + 1, batches)
    return {"batches_per_s": count / seconds, "cpu_s_per_batch": cpu_seconds / count}


def _whole_epochs(name: str, case: Case, loader: Any, batches: int, epochs: int) -> tuple[int, float, float]:
    """Batches, seconds and seconds of CPU of several epochs, from the first `iter()` on."""
    count = 0
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(epochs):
        taken = sum(1 for _ in loader)
        _check(name, case.title, taken, batches)
        count += taken
    return count, time.perf_counter() - begin, time.process_time() - cpu_begin


def _check(name: str, case: str, count: int, batches: int) -> None:
    if count != batches:
        raise RuntimeError(f"{name} gave {count} batches of {case} instead of {batches}")


def measure(options: Options) -> list[Figure]:
    """Rates, ratios to torch and shares of the floor, for each case."""
    names = options.pick_peers(PEERS, quick=QUICK_PEERS)
    figures = []
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(processes.Peer(name, peers.FLOOR_ENV if name == "floor" else None))
            for name in names
        }
        for case in options.pick_cases(list(CASES), quick=QUICK_CASES):
            figures += _measure_case(case, sides, options)
    return figures


def _measure_case(case: str, sides: dict[str, processes.Peer], options: Options) -> list[Figure]:
    sizes = {name: _size(name, CASES[case], options) for name in sides}
    rounds: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, Missing] = {}
    for name, side in sides.items():
        harness.say(f"{QUESTION}: {case}, {name}, warming up")
        first = side.call(f"{QUESTION}:epoch", case=case, **sizes[name])
        if isinstance(first, Missing):
            missing[name] = first
        else:
            rounds[name] = []
    for number in range(options.rounds):
        harness.say(f"{QUESTION}: {case}, round {number + 1} of {options.rounds}")
        for name in harness.rotated(list(rounds), number):
            rounds[name].append(sides[name].call(f"{QUESTION}:epoch", case=case, **sizes[name]))

    def figure(name: str, metric: str, unit: str, answers: list[dict[str, float]] | Missing, key: str) -> Figure:
        scale = 1e6 if unit == "us" else 1
        values = answers if isinstance(answers, Missing) else [scale * answer[key] for answer in answers]
        return harness.figure(QUESTION, case, name, metric, unit, values, **sizes[name], title=CASES[case].title)

    rates = {name: figure(name, RATE, "1/s", missing.get(name) or rounds[name], "batches_per_s") for name in sides}
    spent = [figure(name, CPU, "us", rounds[name], "cpu_s_per_batch") for name in rounds if name != "floor"]
    return [*rates.values(), *_ratios(rates), *spent]


def _size(name: str, case: Case, options: Options) -> dict[str, int]:
    """Of an epoch; see `LONG`."""
    is_short = options.quick or (name not in LONG and case.epochs == 1)
    epochs = case.epochs if name in LONG else min(case.epochs, 2)
    return {"batches": case.epoch_length(is_short), "epochs": epochs, "workers": options.workers}


def _ratios(rates: dict[str, Figure]) -> list[Figure]:
    """Everybody's to torch; rayloader's to the floor, by both kinds of workers."""
    pairs = [(name, "torch", RATIO) for name in rates if name not in ("torch", "floor")]
    pairs += [(name, "floor", OF_FLOOR) for name in ("rayloader", "rayloader-fork")]
    found = [
        harness.ratio(rates[name], rates[beside], metric=metric)
        for name, beside, metric in pairs
        if {name, beside} <= rates.keys()
    ]
    return [ratio for ratio in found if ratio is not None]


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    names = list(dict.fromkeys(f["implementation"] for f in figures))
    cases = list(dict.fromkeys(f["case"] for f in figures))
    ours = [name for name in names if name.startswith("rayloader")]
    more = [("torch", CPU), *((name, metric) for name in ours for metric in (RATIO, OF_FLOOR, CPU))]
    rows = []
    for case in cases:
        of_case = [f for f in figures if f["case"] == case]
        cells = [harness.find(of_case, implementation=name, metric=RATE) for name in names]
        cells += [harness.find(of_case, implementation=name, metric=metric) for name, metric in more]
        rows.append([CASES[case].title, *map(harness.show, cells)])
    header = ["case", *names, *(f"{name}: {metric}" for name, metric in more)]
    harness.print_table("Batches a second; CPU in microseconds", header, rows)
    for name in names:
        print(f"- {name}: {peers.NOTES[name]}")
    harness.print_missing(figures)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__, needs=NEEDS)))
