"""Seconds from `iter()` to the first batch: in a new process, in the second epoch, and later.

Motive: starting workers is what an epoch of a small dataset, or a validation run every few steps, mostly pays for.
Method: each round gives each implementation a new process, which runs a few short epochs of a case to their end; the
clock runs over `iter()` and one `next()`. Cold is the first epoch, with everything that only it pays (imports of the
loader's own at `iter()`, Ray's start); torch itself and the dataset are there already. Second is the second epoch; warm
the median of those after it. The dataset is small (tiny: 0.2 MB) or persistent workers are asked for (medium: 39 MB).
Command: python benchmarks/first_batch.py [--rounds N] [--cases tiny,medium] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "first batch".
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import harness
import peers
import processes
from cases import CASES
from harness import Figure, Options
from processes import Missing

QUESTION = "first batch"
PEERS = ["torch", "torch-spawn", "torchdata", "spdl", "grain", "rayloader", "rayloader-fork"]
QUICK_PEERS = ["torch", "torch-spawn", "rayloader", "rayloader-fork"]
ARGUMENTS: dict[str, dict[str, Any]] = {"tiny": {}, "medium": {"persistent_workers": True}}
TITLES = {"tiny": "tiny, 0.2 MB", "medium": "medium, 39 MB, persistent workers"}
EPOCHS = 6
BATCHES = 12
METRICS = ("cold", "second epoch", "warm")


def first_batches(name: str, case: str, workers: int) -> list[float]:
    """Seconds to the first batch of each epoch in this process."""
    loader = peers.make(name, CASES[case], BATCHES, workers, **ARGUMENTS[case])
    seconds = []
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        seconds.append(time.perf_counter() - begin)
        count = 1 + sum(1 for _ in iterator)
        if count != BATCHES:
            raise RuntimeError(f"{name} gave {count} batches of {case} instead of {BATCHES}")
    return seconds


def measure(options: Options) -> list[Figure]:
    """Cold, second and warm, for each case."""
    names = options.pick_peers(PEERS, quick=QUICK_PEERS)
    rounds = 1 if options.quick else options.rounds
    found: list[Figure] = []
    for case in options.pick_cases(list(ARGUMENTS), quick=["tiny"]):
        answers: dict[str, list[Any]] = {name: [] for name in names}
        for number in range(rounds):
            harness.say(f"{QUESTION}: {case}, round {number + 1} of {rounds}")
            for name in harness.rotated(names, number):
                answers[name].append(
                    processes.ask(name, "first_batch:first_batches", case=case, workers=options.workers)
                )
        for name, of_name in answers.items():
            found += _figures(case, name, of_name)
    return found


def _figures(case: str, name: str, answers: list[Any]) -> list[Figure]:
    missing = next((answer for answer in answers if isinstance(answer, Missing)), None)
    if missing is None:
        answers = [(first, second, statistics.median(others)) for first, second, *others in answers]
    return [
        harness.figure(
            QUESTION, case, name, metric, "s", missing or [answer[place] for answer in answers], title=TITLES[case]
        )
        for place, metric in enumerate(METRICS)
    ]


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    rows = [
        [
            TITLES[case],
            name,
            *(harness.show(harness.find(figures, case=case, implementation=name, metric=metric)) for metric in METRICS),
        ]
        for case, name in dict.fromkeys((f["case"], f["implementation"]) for f in figures)
    ]
    harness.print_table("Seconds from iter() to the first batch", ["dataset", "loader", *METRICS], rows)
    harness.print_missing(figures)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__)))
