"""Seconds that a changed dataset of 1 GB costs at `iter()`.

Motive: workers must see what the trainer changed between epochs, as torch's do, which it forks anew; here the dataset
is shipped again.
Method: in one process per implementation, each round has an epoch over the dataset as it was and one after every byte
of it has changed, in turns the one first or the other, without persistent workers. The figure is the difference of the
times from `iter()` to the first batch. A first batch without the dataset's present content is an error.
Command: python benchmarks/shipping.py [--rounds N] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "shipping".
"""

from __future__ import annotations

import time
from typing import Any

import harness
import peers
import processes
from cases import Case, Stored
from harness import Figure, Options
from processes import Missing

QUESTION = "shipping"
CASE = "1 GB, changed"
PEERS = ["torch", "rayloader"]
BATCHES = 4
SAMPLE_BYTES = 5_000_000
METRICS = ("unchanged", "changed", "difference")
TARGETS = {("rayloader", "difference"): {"target": 0.5, "at_most": True}}


def first_batches(name: str, gigabytes: float, rounds: int, workers: int) -> dict[str, list[float]]:
    """Seconds to the first batch, of each round."""
    import torch

    dataset = Stored(int(gigabytes * 1e9 / SAMPLE_BYTES), (SAMPLE_BYTES,), torch.uint8)
    dataset.length = BATCHES  # an epoch reads the first samples only; what is shipped is all of them
    loader = peers.make_for(name, Case(QUESTION, Stored, 1, BATCHES), dataset, BATCHES, workers)
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for number in range(-1, rounds):  # one unmeasured
        seconds = {}
        # The other way round every other round: what one epoch leaves behind must not weigh on the same side always.
        for metric in METRICS[:2] if number % 2 else METRICS[1::-1]:
            if metric == "changed":
                dataset.samples.whole.bitwise_not_()
            seconds[metric] = _seconds(loader, dataset)
        if number >= 0:
            for metric in seconds:
                found[metric].append(seconds[metric])
            found["difference"].append(seconds["changed"] - seconds["unchanged"])
    return found


def _seconds(loader: Any, dataset: Stored) -> float:
    begin = time.perf_counter()
    iterator = iter(loader)
    batch = next(iterator)
    seconds = time.perf_counter() - begin
    if not batch[0][0].equal(dataset[0][0]):
        raise RuntimeError("the workers have not seen the dataset's change")
    for _ in iterator:
        pass
    return seconds


def measure(options: Options) -> list[Figure]:
    """Unchanged, changed, and the difference."""
    gigabytes = 0.2 if options.quick else 1.0
    found = []
    for name in options.pick_peers(PEERS):
        harness.say(f"{QUESTION}: {name}")
        size = {"gigabytes": gigabytes, "rounds": options.rounds, "workers": options.workers}
        answer = processes.ask(name, "shipping:first_batches", **size)
        for metric in METRICS:
            target = TARGETS.get((name, metric), {}) if gigabytes == 1.0 else {}
            values = answer if isinstance(answer, Missing) else answer[metric]
            found.append(harness.figure(QUESTION, CASE, name, metric, "s", values, gigabytes=gigabytes, **target))
    return found


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    rows = [
        [name, *(harness.show(harness.find(figures, implementation=name, metric=metric)) for metric in METRICS)]
        for name in dict.fromkeys(f["implementation"] for f in figures)
    ]
    size = figures[0]["gigabytes"] if figures else 1.0
    harness.print_table(f"Seconds from iter() to the first batch, {size:g} GB", ["loader", *METRICS], rows)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__)))
