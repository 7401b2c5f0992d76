"""What a batch costs the trainer's process as its workers grow more.

Motive: a GPU machine has dozens of cores; whatever the loader does for each worker in every batch shows only there.
Method: tiny samples with labels, by 2 to 128 forks, and a trainer that sleeps 4 ms a batch, or takes the next one at
once. Counted are the CPU time of the trainer's process, all threads, and the median time of `next`, over batches that
begin when every worker has answered. Far more workers than cores compute, so that the rate says nothing; with a trainer
that takes the next batch at once, the time of `next` is mostly the workers'.
Command: python benchmarks/many_workers.py [--rounds N] [--peers torch,rayloader-fork] [--quick] [--write]
Results: the table in docs/scaling.md, by --write.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset

import harness
import tables
from harness import Figure, Options
from processes import Peer

QUESTION = "many workers"
COMMAND = "python benchmarks/many_workers.py --write"
DOCUMENT = harness.ROOT / "docs" / "scaling.md"
PEERS = ["torch", "rayloader-fork"]
NAMES = {"torch": "torch", "rayloader-fork": "rayloader, forks"}
COUNTS = (2, 8, 32, 128)
STEPS = {"sleeps 4 ms": 0.004, "takes at once": 0.0}
METRICS = {"cpu": "CPU a batch", "next": "median of next()"}
BATCHES = 1000
BATCH_SIZE = 16


class Samples(Dataset[Any]):
    """Samples with labels."""

    def __len__(self) -> int:
        return BATCH_SIZE * 1_000_000

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(16), index % 10


def run(name: str, workers: int, step: float, batches: int) -> dict[str, float]:
    """Microseconds of the process's CPU for a batch, and of the median `next`."""
    import rayloader

    kind, own = (torch.utils.data.DataLoader, {}) if name == "torch" else (rayloader.DataLoader, {"workers": "fork"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores, on purpose
        iterator = iter(kind(Samples(), BATCH_SIZE, num_workers=workers, **own))  # type: ignore[arg-type]
    for _ in range(4 * workers):
        next(iterator)
    times = []
    cpu = time.process_time()
    for _ in range(batches):
        time.sleep(step)
        asked = time.perf_counter()
        next(iterator)
        times.append(time.perf_counter() - asked)
    return {"cpu": 1e6 * (time.process_time() - cpu) / batches, "next": 1e6 * statistics.median(times)}


def measure(options: Options) -> list[Figure]:
    """The figures of each trainer, number of workers and loader."""
    counts, batches = (COUNTS[:-1], 300) if options.quick else (COUNTS, BATCHES)
    found = []
    with contextlib.ExitStack() as stack:
        peers = {name: stack.enter_context(Peer(name)) for name in options.pick_peers(PEERS)}
        for (case, step), workers in itertools.product(STEPS.items(), counts):
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
            for number in range(options.rounds):
                harness.say(f"{QUESTION}: {case}, {workers} workers, round {number + 1} of {options.rounds}")
                for name in harness.rotated(list(peers), number):
                    asked = {"workers": workers, "step": step, "batches": batches}
                    rounds[name].append(peers[name].call("many_workers:run", **asked))
            for name, (key, metric) in itertools.product(peers, METRICS.items()):
                values = [answer[key] for answer in rounds[name]]
                found.append(harness.figure(QUESTION, case, name, metric, "us", values, workers=workers))
    return found


def table(figures: list[Figure]) -> str:
    """A row for each trainer, measure and loader."""
    counts = sorted({f["workers"] for f in figures})
    rows = [["the trainer", "microseconds", "loader", *(f"{count} workers" for count in counts)]]
    for case, metric, name in itertools.product(STEPS, METRICS.values(), NAMES):
        of = {"case": case, "metric": metric, "implementation": name}
        if found := [f for f in figures if all(f[key] == value for key, value in of.items())]:
            cells = [harness.show(harness.find(found, workers=count)) for count in counts]
            rows.append([case, metric, NAMES[name], *cells])
    return f"2 cores, {harness.today()[:10]}.\n\n{tables.markdown(rows)}"


if __name__ == "__main__":
    with harness.clean_exit():
        tables.tell(DOCUMENT, COMMAND, lambda: table(measure(harness.options(__doc__))))
