"""What a new worker process costs: seconds until it works, and memory of its own; with the fork server and without.

Motive: each new worker process, also one that replaces a lost one, has to have torch and Ray imported.
Method: each round runs a program twice, once for each way, one after the other. It takes the first batch of a process
on the clock, with two workers, and then that of three epochs with `fresh_processes=True`, whose workers are new each
time. It kills a worker, and notes the longest wait for one of the batches that follow. Then come the medians over the
worker processes of the resident set (RSS), the proportional one (PSS) and what is a process's own (USS). The sum of the
PSS is that of the workers, the fork server, and the processes that Ray has started for the workers. A sample is one
number.
Command: python benchmarks/new_workers.py [rounds, 1 by default]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

import harness

WAYS = "fork server", "each by itself"


def main(rounds: int) -> None:
    """Runs both ways in turn, and prints medians."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[:: -1 if number % 2 else 1]:
            done = subprocess.run([sys.executable, __file__, way], stdout=subprocess.PIPE, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(way, found[way][-1], file=sys.stderr)
    for way, results in found.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        print(f"{way:16}", *(f"{key} {value:,.2f}" for key, value in medians.items()), sep="   ")


def program(way: str) -> None:
    """One of the two."""
    import psutil
    import torch

    import rayloader
    from rayloader.actors import fork_server

    if way != WAYS[0]:
        fork_server.can_choose_workers = lambda _: False
    options: dict[str, Any] = {"batch_size": 10, "num_workers": 2, "prefetch_factor": 2, "workers": "ray"}
    loader = rayloader.DataLoader(torch.arange(2000), **options, fresh_processes=True)  # type: ignore[arg-type]
    first = [until_first(loader) for _ in range(4)]
    iterator = iter(loader)
    next(iterator)
    everything = psutil.Process().children(recursive=True)
    workers = harness.ray_workers()
    others = [process for process in everything if "--fork-server" in process.cmdline()[2:3]]
    sizes = [process.memory_full_info() for process in workers]
    together = sum(size.pss for size in sizes) + sum(process.memory_full_info().pss for process in others)
    os.kill(workers[0].pid, signal.SIGKILL)
    waits, began = [], time.perf_counter()
    for _ in iterator:
        waits.append(time.perf_counter() - began)
        began = time.perf_counter()
    answer = {
        "s to the first batch of the process": first[0],
        "of new workers": statistics.median(first[1:]),
        "after a kill": max(waits),
        "MB of a worker, RSS": statistics.median(size.rss for size in sizes) / 1e6,
        "PSS": statistics.median(size.pss for size in sizes) / 1e6,
        "USS": statistics.median(size.uss for size in sizes) / 1e6,
        "PSS of all together": together / 1e6,
    }
    rayloader.shutdown()
    print(json.dumps(answer))


def until_first(loader: Any) -> float:
    """Seconds until the first batch of an epoch, all of which is read."""
    began = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - began
    for _ in iterator:
        pass
    return seconds


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in WAYS:
        program(sys.argv[1])
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 1)
