"""What reading one cached sample costs, and what a run pays for comparing samples that it finds in a folder.

Motive: a cache pays where a hit costs much less than the sample; small samples are read millions of times.
Method: samples of 3, 30 and 300 kB with a label are read from `rayloader.cached` in one process, again and again; the
least time of nine passes over all of them counts, for what comes on top is other work of the machine. Beside it, what
Python takes to give the same sample from a list and to copy it, for a hit is a new object each time. Of the samples
that a run finds in a folder, 300 are built again within the first eight epochs: what these epochs take more than eight
later ones, in CPU time for each of the 300; the building itself is a part of it.
Command: python benchmarks/cache_hit.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

import rayloader

SIDES = {"3 kB": 32, "30 kB": 100, "300 kB": 316}
COUNT = 500


class Photos(Dataset[Any]):
    """Tensors of bytes, with a label."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, self.side, self.side), index % 255, dtype=torch.uint8), index % 10


def microseconds(read: Callable[[int], object]) -> float:
    """For one sample."""
    took = []
    for _ in range(9):
        began = time.perf_counter()
        for index in range(COUNT):
            read(index)
        took.append((time.perf_counter() - began) / COUNT * 1e6)
    return min(took)


def comparison(photos: Photos) -> float:
    """Microseconds for one sample; the median of three runs."""
    with tempfile.TemporaryDirectory() as folder:
        list(rayloader.cached(photos, max_bytes="1GB", where=folder))
        return statistics.median(difference(photos, folder) for _ in range(3)) / 300 * 1e6


def difference(photos: Photos, folder: str) -> float:
    """Seconds of CPU that the first epochs of a run take more than later ones."""
    found, took = rayloader.cached(photos, max_bytes="1GB", where=folder), []
    for _ in range(2):
        began = time.process_time()
        for _ in range(8):
            list(found)
        took.append(time.process_time() - began)
    return took[0] - took[1]


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)  # as in workers
    for name, side in SIDES.items():
        photos = Photos(side)
        cached, listed = rayloader.cached(photos, max_bytes="1GB"), [photos[index] for index in range(COUNT)]
        for index in range(COUNT):
            cached[index]
        copied = microseconds(lambda index, of=listed: (of[index][0].clone(), of[index][1]))
        compared, built = comparison(photos), microseconds(photos.__getitem__)
        print(f"{name}: {microseconds(cached.__getitem__):.1f} us a hit, {copied:.1f} us to copy it from a list;")
        print(f"    {compared:.0f} us of CPU to compare one that was found, {built:.0f} us of which to build it")


if __name__ == "__main__":
    main()
