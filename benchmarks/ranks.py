"""What the ranks of torchrun on one machine pay for Ray: memory, and seconds to the first batch.

Motive: the ranks share one Ray. With RAY_ADDRESS=local each has one of its own.
Method: each round runs torchrun twice, once for each way. Every rank has one worker, makes the loader and takes one
batch, on the clock. Then rank 0 adds up the proportional set sizes (PSS) of all processes: the ranks', the workers',
Ray's and the keeper's. By how much that is more than the ranks' own before `iter()` is what the loader adds.
Command: python benchmarks/ranks.py [ranks, 2 by default] [rounds, 1 by default]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

WAYS = {"one Ray": {}, "a Ray for each rank": {"RAY_ADDRESS": "local"}}


def main(ranks: int, rounds: int) -> None:
    """Runs both ways in turn, and prints medians."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            found[way].append(launched(ranks, WAYS[way]))
            print(way, found[way][-1], file=sys.stderr)
    for way, results in found.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        print(f"{way:20}", *(f"{key} {value:,.1f}" for key, value in medians.items()), sep="   ")


def launched(ranks: int, variables: dict[str, str]) -> dict[str, float]:
    """What rank 0 has found."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    done = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "1", **variables}, stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rank() -> None:
    """One rank."""
    import psutil
    import torch
    from torch import distributed

    from rayloader import DataLoader

    distributed.init_process_group("gloo")
    loader = DataLoader(torch.zeros(4000, 784, dtype=torch.uint8), 64, num_workers=1)
    before = gathered(megabytes([psutil.Process()]))
    begin = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    seconds = gathered(time.perf_counter() - begin)

    import ray

    raylets = [process for process in psutil.process_iter(["name", "cmdline"]) if process.info["name"] == "raylet"]
    session = ray.get_runtime_context().get_session_name()
    (raylet,) = [process for process in raylets if any(session in word for word in process.info["cmdline"])]
    owners = {*map(psutil.Process, gathered(raylet.ppid())), *psutil.Process().parent().children()}
    if distributed.get_rank() == 0:
        everything = owners.union(*(owner.children(recursive=True) for owner in owners))
        added = megabytes(everything) - sum(before)
        print(json.dumps({"MB added": added, "processes": len(everything), "s to the first batch": max(seconds)}))
    distributed.barrier()
    distributed.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    """This rank's and all others'."""
    from torch import distributed

    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def megabytes(processes: Any) -> float:
    """Their proportional set sizes, added up."""
    return float(sum(process.memory_full_info().pss for process in processes) / 1e6)


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank()
    else:
        main(*([int(argument) for argument in sys.argv[1:]] + [2, 1][len(sys.argv) - 1 :]))
