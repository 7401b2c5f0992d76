"""What a call of `state_dict()` costs a program that makes one before every batch, as Accelerate does.

Motive: most programs save a state once in thousands of batches, but some frameworks ask for one before each of them,
and throw it away.
Method: an epoch of small batches, once at automatic depth and once at `prefetch_factor=2`, with a call before each
batch. Counted is the CPU time of the calling thread (`time.thread_time`) from call to return: median and mean over each
quarter of the epoch, so that a cost which grows with the batches taken shows. A copy of a dict of ten numbers is timed
in between, for machines differ, and one machine from minute to minute. Only what users call is called, so that any two
versions can be compared by turns.
Command: python benchmarks/state_cost.py [--workers N] [--batches N]
Results of its kind: docs/decisions.md, "A state is a few records, checked where it is loaded".
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

from rayloader import DataLoader, shutdown

BATCH_SIZE = 4
NUMBERS = {str(number): number for number in range(10)}


def spent(call: Any) -> float:
    """Microseconds of this thread's CPU time."""
    began = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - began)


def epoch(loader: Any, batches: int) -> list[tuple[float, float]]:
    """Of each batch: of the state before it, and of the dict's copy."""
    iterator = iter(loader)
    next(iterator)
    times = []
    for _ in itertools.islice(iterator, batches):
        times.append((spent(loader.state_dict), spent(lambda: copy.deepcopy(NUMBERS))))
    return times


def main() -> None:
    """Measures and prints a line a quarter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int, default=2000)
    arguments = parser.parse_args()
    dataset = TensorDataset(torch.arange(BATCH_SIZE * (arguments.batches + 1)))
    for depth in (None, 2):
        loader: Any = DataLoader(
            dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=arguments.workers, prefetch_factor=depth
        )
        times = epoch(loader, arguments.batches)
        print(f"prefetch_factor={depth}, {arguments.workers} workers, {len(times)} batches; us a call")
        for quarter in range(4):
            part = times[quarter * len(times) // 4 : (quarter + 1) * len(times) // 4]
            states, copies = zip(*part, strict=True)
            median, copied = statistics.median(states), statistics.median(copies)
            print(
                f"  quarter {quarter + 1}: median {median:6.1f}, mean {statistics.mean(states):6.1f}; "
                f"copy of ten numbers {copied:4.1f}: {median / copied:5.1f} times"
            )
    shutdown()


if __name__ == "__main__":
    main()
