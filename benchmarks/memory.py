"""Memory of the workers: what a dataset takes once they have read all of it, and what they take without one.

Motive: with torch each worker ends up with a copy of whatever has reference counts, and with spawn of everything.
Method: a new process for each figure. Every worker reads every sample, and is kept; then the proportional set sizes
(PSS) of the process and all its descendants, Ray's own included, are added up. From that the same with an empty dataset
is taken off, and the trainer's own original (by how much its PSS grew when the dataset was made): what remains is what
the loader's workers cost in memory. PSS misses shared memory that no process maps. What the workers of an empty dataset
take is told as well, with Ray's own processes and whatever the trainer imports for them.
Datasets: 1 GB of arrays on the heap or in a mapped file; a million strings in a list, and in a `rayloader.SharedList`.
Command: python benchmarks/memory.py [--rounds N] [--cases arrays,strings] [--peers torch,rayloader] [--quick]
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import harness
import peers
import processes
from cases import Case, stored_samples
from harness import Figure, Options
from processes import Missing

QUESTION = "memory"
PEERS = ["torch", "rayloader", "rayloader-fork"]
WORKERS = (1, 2, 4, 8)
ARRAY_BYTES, STRINGS = 1_000_000_000, 1_000_000
NOTHING = "nothing"
TITLES = {
    NOTHING: "no dataset",
    "arrays": "1 GB of arrays",
    "file": "1 GB of arrays in a mapped file",
    "strings": "a million strings in a list",
    "shared list": "a million strings in a SharedList",
}
METRIC = "workers' memory"
BATCHES = 100  # that each worker reads
_made: list[Any] = []  # what must outlive the call


class Reads(Dataset[int]):
    """Samples that touch every byte of their row, and weigh nothing themselves."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        row = self.rows[index]
        return len(row) if isinstance(row, str) else int(row.sum())


def _arrays(name: str, share: float) -> Any:
    return stored_samples(int(share * ARRAY_BYTES / 100_000), (25_000,), torch.float32)


def _file(name: str, share: float) -> Any:
    import numpy as np

    folder = tempfile.TemporaryDirectory()
    _made.append(folder)
    path, array = Path(folder.name) / "array", _arrays(name, share).numpy()
    array.tofile(path)
    mapped = np.memmap(path, dtype=array.dtype, mode="r", shape=array.shape)
    mapped.sum()  # the trainer has read it
    return mapped


def _strings(name: str, share: float) -> list[str]:
    return [f"/data/train/{index % 1000:04d}/{index:09d}.jpg" for index in range(int(share * STRINGS))]


def _shared_list(name: str, share: float) -> Any:
    if not name.startswith("rayloader"):
        raise peers.Unavailable("SharedList is rayloader's")
    import rayloader

    return rayloader.SharedList(_strings(name, share))


MAKERS: dict[str, Callable[[str, float], Any]] = {
    "arrays": _arrays,
    "file": _file,
    "strings": _strings,
    "shared list": _shared_list,
}


def held(name: str, case: str, share: float, workers: int) -> dict[str, float]:
    """Bytes held after all workers have read all; `share`: of the full size."""
    before = harness.pss(descendants=False)
    rows = MAKERS[case](name, share) if case != NOTHING else torch.zeros((BATCHES, 1))
    gc.collect()
    alone = harness.pss(descendants=False)
    dataset = Reads(rows)
    size = -(-len(dataset) // BATCHES)
    # Batch i goes to worker i mod W: each is there once for each worker.
    starts = range(0, len(dataset), size)
    batches = [range(start, min(start + size, len(dataset))) for start in starts for _ in range(workers)]
    arguments = {"batch_size": 1, "batch_sampler": batches, "persistent_workers": True}
    loader = peers.make_for(name, Case(QUESTION, Reads, 1, 1), dataset, len(batches), workers, **arguments)
    _made.append(loader)
    if sum(1 for _ in loader) != len(batches):
        raise RuntimeError(f"{name} did not give {len(batches)} batches")
    return {"total": harness.pss(descendants=True), "original": alone - before, "alone": alone}


def measure(options: Options) -> list[Figure]:
    """Gigabytes for each dataset, implementation and number of workers; one round, for memory hardly varies."""
    share = 0.2 if options.quick else 1.0
    counts = (options.workers,) if options.quick else WORKERS
    found = []
    for name in options.pick_peers(PEERS):
        for workers in counts:
            empty = _ask(name, NOTHING, share, workers)
            for case in options.pick_cases(list(TITLES), quick=[NOTHING, "arrays"]):
                if (case, name) == ("shared list", "torch"):
                    continue
                values = answer = empty if case == NOTHING else _ask(name, case, share, workers)
                if not isinstance(answer, Missing):
                    without = empty["alone"] if case == NOTHING else answer["original"] + empty["total"]
                    values = [(answer["total"] - without) / 1e9]
                more = {"title": TITLES[case], "workers": workers, "share": share}
                found.append(harness.figure(QUESTION, case, name, METRIC, "GB", values, **more))
    return found


def _ask(name: str, case: str, share: float, workers: int) -> Any:
    harness.say(f"{QUESTION}: {name}, {case}, {workers} workers")
    return processes.ask(name, "memory:held", case=case, share=share, workers=workers)


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    counts = sorted({f["workers"] for f in figures})
    rows = [
        [
            TITLES[case],
            name,
            *(harness.show(harness.find(figures, case=case, implementation=name, workers=count)) for count in counts),
        ]
        for case, name in sorted({(f["case"], f["implementation"]) for f in figures})
    ]
    share = figures[0]["share"] if figures else 1.0
    size = "" if share == 1.0 else f", of {share:.0%} of the dataset"
    header = ["dataset", "loader", *(f"{count} workers" for count in counts)]
    harness.print_table(f"Memory of the workers, GB{size}", header, rows)
    harness.print_missing(figures)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__, needs=("rich", "psutil"))))
