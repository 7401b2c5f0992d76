"""Memory of the workers: what a dataset takes once they have read all of it, and what one worker is by itself.

Motive: with torch each worker ends up with a copy of whatever has reference counts, and with spawn of everything.
Method: a new process for each figure. Every worker reads every sample, and is kept; then the proportional set sizes
(PSS) of the process and all its descendants, Ray's own included, are added up. From that the same with an empty dataset
is taken off, and the trainer's own original (by how much its PSS grew when the dataset was made): what remains is what
the loader's workers cost in memory. PSS misses shared memory that no process maps; so the growth of the machine's
shared memory stands beside it in the JSON (`shmem_gb`, of use on a quiet machine only).
What one worker is by itself is what users see in `top`: the resident set of each worker process (RSS), and what of it
is its own (USS), medians over the workers, after the first batch of the medium case and after an epoch of it.
Datasets: 1 GB of arrays on the heap, in a mapped file, in torch's shared memory; a million strings in a list, and in a
`rayloader.SharedList` where rayloader has it.
Command: python benchmarks/memory.py [--rounds N] [--cases arrays,strings] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "memory".
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import harness
import peers
import processes
from cases import CASES, Case, stored_samples
from harness import Figure, Options
from processes import Missing

QUESTION = "memory"
PEERS = ["torch", "rayloader", "rayloader-fork"]
WORKERS = (1, 2, 4, 8)
ARRAY_BYTES, STRINGS = 1_000_000_000, 1_000_000
TITLES = {
    "arrays": "1 GB of arrays",
    "file": "1 GB of arrays in a mapped file",
    "shared": "1 GB of arrays in shared memory",
    "strings": "a million strings in a list",
    "shared list": "a million strings in a SharedList",
}
TARGETS = {"arrays": 1.1, "file": 0.1, "shared": 0.1}  # GB, rayloader with 2 workers
METRIC = "workers' memory"
PROCESS = "medium"  # the case whose worker processes are looked at
PROCESS_METRICS = {
    "rss_begin": "RSS at the first batch",
    "uss_begin": "USS at the first batch",
    "rss_end": "RSS after an epoch",
    "uss_end": "USS after an epoch",
}
PROCESS_BATCHES = 200
PROCESS_TITLE = "one worker process"
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


def _shared(name: str, share: float) -> Any:
    return _arrays(name, share).share_memory_()


def _strings(name: str, share: float) -> list[str]:
    return [f"/data/train/{index % 1000:04d}/{index:09d}.jpg" for index in range(int(share * STRINGS))]


def _shared_list(name: str, share: float) -> Any:
    if not name.startswith("rayloader"):
        raise peers.Unavailable("SharedList is rayloader's")
    import rayloader

    if not hasattr(rayloader, "SharedList"):
        raise peers.Unavailable("this rayloader has no SharedList")
    return rayloader.SharedList(_strings(name, share))


MAKERS: dict[str, Callable[[str, float], Any]] = {
    "arrays": _arrays,
    "file": _file,
    "shared": _shared,
    "strings": _strings,
    "shared list": _shared_list,
}


def held(name: str, case: str | None, share: float, workers: int) -> dict[str, float]:
    """Bytes held after all workers have read all; `case` None: an empty dataset, `share`: of the full size."""
    before = harness.pss(descendants=False)
    rows = MAKERS[case](name, share) if case is not None else torch.zeros((BATCHES, 1))
    gc.collect()
    original = harness.pss(descendants=False) - before
    dataset = Reads(rows)
    size = -(-len(dataset) // BATCHES)
    # Batch i goes to worker i mod W: each is there once for each worker.
    starts = range(0, len(dataset), size)
    batches = [range(start, min(start + size, len(dataset))) for start in starts for _ in range(workers)]
    arguments = {"batch_size": 1, "batch_sampler": batches, "persistent_workers": True}
    loader = peers.make_for(name, Case(QUESTION, Reads, 1, 1), dataset, len(batches), workers, **arguments)
    _made.append(loader)
    shmem = _shmem()
    if sum(1 for _ in loader) != len(batches):
        raise RuntimeError(f"{name} did not give {len(batches)} batches")
    return {"total": harness.pss(descendants=True), "original": original, "shmem": _shmem() - shmem}


def process_sizes(name: str, workers: int) -> dict[str, float]:
    """Bytes of one worker process, at the first batch and after an epoch."""
    loader = peers.make(name, CASES[PROCESS], PROCESS_BATCHES, workers, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    begin = _worker_sizes(name, workers)
    for _ in iterator:
        pass
    end = _worker_sizes(name, workers)
    return {"rss_begin": begin[0], "uss_begin": begin[1], "rss_end": end[0], "uss_end": end[1]}


def _worker_sizes(name: str, workers: int) -> tuple[float, float]:
    """RSS and USS, medians over the worker processes."""
    import psutil

    children = psutil.Process().children(recursive=True)
    if name == "rayloader":
        children = harness.ray_workers()
    elif name == "rayloader-fork":  # without the zygote, whose children they are
        children = [child for child in children if child.ppid() != psutil.Process().pid]
    below = children
    if len(below) != workers:
        raise RuntimeError(f"{name} has {len(below)} worker processes instead of {workers}")
    sizes = [process.memory_full_info() for process in below]
    return statistics.median(size.rss for size in sizes), statistics.median(size.uss for size in sizes)


def _shmem() -> float:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return float(line.split()[1]) * 1024


def measure(options: Options) -> list[Figure]:
    """Gigabytes for each dataset, implementation and number of workers; one round, for memory hardly varies."""
    share = 0.2 if options.quick else 1.0
    counts = (options.workers,) if options.quick else WORKERS
    found = []
    for name in options.pick_peers(PEERS):
        for workers in counts:
            empty = _ask(name, None, share, workers)
            for case in options.pick_cases(list(TITLES), quick=["arrays"]):
                if (case, name) == ("shared list", "torch"):
                    continue
                answer = _ask(name, case, share, workers)
                target = {"target": TARGETS[case], "at_most": True} if _aimed_at(name, case, workers, share) else {}
                values: Any = answer
                if not isinstance(answer, Missing):
                    values = [(answer["total"] - answer["original"] - empty["total"]) / 1e9]
                    target["shmem_gb"] = round((answer["shmem"] - empty["shmem"]) / 1e9, 3)
                    target["original_gb"] = round(answer["original"] / 1e9, 3)
                more = {"title": TITLES[case], "workers": workers, "share": share, **target}
                found.append(harness.figure(QUESTION, case, name, METRIC, "GB", values, **more))
        if not options.cases:
            found += _measure_process(name, options.workers)
    return found


def _measure_process(name: str, workers: int) -> list[Figure]:
    harness.say(f"{QUESTION}: {name}, a worker process")
    answer = processes.ask(name, "memory:process_sizes", workers=workers)
    return [
        harness.figure(QUESTION, "process", name, metric, "GB", [answer[key] / 1e9], title=PROCESS_TITLE)
        for key, metric in PROCESS_METRICS.items()
    ]


def _aimed_at(name: str, case: str, workers: int, share: float) -> bool:
    return name == "rayloader" and case in TARGETS and workers == 2 and share == 1.0


def _ask(name: str, case: str | None, share: float, workers: int) -> Any:
    harness.say(f"{QUESTION}: {name}, {case or 'nothing'}, {workers} workers")
    return processes.ask(name, "memory:held", case=case, share=share, workers=workers)


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    of_process = [f for f in figures if f["case"] == "process"]
    figures = [f for f in figures if f["case"] != "process"]
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
    sizes = [
        [
            name,
            *(harness.show(harness.find(of_process, implementation=name, metric=m)) for m in PROCESS_METRICS.values()),
        ]
        for name in dict.fromkeys(f["implementation"] for f in of_process)
    ]
    if sizes:
        harness.print_table("One worker process, GB", ["loader", *PROCESS_METRICS.values()], sizes)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__)))
