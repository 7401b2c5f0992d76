"""What users of a Python whose workers are not forked gain: the wait for a first batch, and the memory of a worker.

Motive: from Python 3.14 on torch's loader starts its workers by "forkserver": each imports what the program imports,
and gets a copy of the dataset. rayloader's remain forks.
Method: each round gives each loader a new process, in an order that changes. The program makes 400 MB in one array,
which is not counted, and reads it twice with two workers; a sample is the sum of a row. The clock runs over `iter()`
and one `next()`. The memory is measured when nine tenths of the second epoch are read: what is a process's own (USS),
and that with its share of what it has in common with others (PSS). Medians over workers and rounds.
Command: python benchmarks/start_methods.py [rounds, 3 by default]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import harness

LOADERS = "torch, the default", "torch, fork", "rayloader, forks"
WORKERS, ROWS, COLUMNS, BATCH_SIZE = 2, 1000, 100_000, 10


class Rows:
    """400 MB, of which a worker tells the sum of a row, and who it is."""

    def __init__(self) -> None:
        import numpy as np

        self.rows = np.ones((ROWS, COLUMNS), dtype=np.float32)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(self.rows[index].sum()), os.getpid()


def program(name: str) -> dict[str, Any]:
    """The figures of one loader in this process."""
    import psutil
    import torch.utils.data

    import rayloader

    dataset: Any = Rows()
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": WORKERS}
    loader: Any
    if name.startswith("torch"):
        context = "fork" if name.endswith("fork") else None
        loader = torch.utils.data.DataLoader(dataset, **options, multiprocessing_context=context)
    else:
        loader = rayloader.DataLoader(dataset, **options, workers="fork")
    found: dict[str, Any] = {}
    for epoch in "first batch s", "second epoch s":
        begin = time.perf_counter()
        iterator = iter(loader)
        _, pids = next(iterator)
        found[epoch] = time.perf_counter() - begin
        workers = {*pids.tolist()}
        for number, (_, pids) in enumerate(iterator):
            workers |= {*pids.tolist()}
            if number == ROWS // BATCH_SIZE * 9 // 10:
                sizes = [psutil.Process(pid).memory_full_info() for pid in workers]
                found["PSS MB"] = statistics.median(size.pss for size in sizes) / 1e6
                found["USS MB"] = statistics.median(size.uss for size in sizes) / 1e6
        if len(workers) != WORKERS:
            raise RuntimeError(f"{name} had the workers {workers}")
    return found


def main(rounds: int) -> None:
    """Runs the loaders in turn, and prints medians."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
    for number in range(rounds):
        for name in harness.rotated(LOADERS, number):
            done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout))
            print(name, found[name][-1], file=sys.stderr)
    print(f"Python {sys.version.split()[0]}, whose default is {multiprocessing.get_all_start_methods()[0]!r}")
    for name, results in found.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        print(f"{name:18}", *(f"{key} {value:,.3g}" for key, value in medians.items()), sep="   ")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LOADERS:
        print(json.dumps(program(sys.argv[1])))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
