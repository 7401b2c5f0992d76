"""What reading one cached sample costs.

Motive: a cache pays where a hit costs much less than the sample; small samples are read millions of times.
Method: samples of 3, 30 and 300 kB with a label are read from `rayloader.cached` in one process, again and again; the
least time of nine passes over all of them counts, for what comes on top is other work of the machine. Beside it, what
Python takes to give the same sample from a list and to copy it, for a hit is a new object each time.
Command: python benchmarks/cache_hit.py
"""

from __future__ import annotations

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


def main() -> None:
    """Measures and prints."""
    for name, side in SIDES.items():
        photos = Photos(side)
        cached, listed = rayloader.cached(photos, max_bytes="1GB"), [photos[index] for index in range(COUNT)]
        for index in range(COUNT):
            cached[index]
        copied = microseconds(lambda index, of=listed: (of[index][0].clone(), of[index][1]))
        print(f"{name}: {microseconds(cached.__getitem__):.1f} us a hit, {copied:.1f} us to copy it from a list")


if __name__ == "__main__":
    main()
