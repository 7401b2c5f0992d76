"""Batches a second beside torch's own loader, and the time to the first batch.

Motive: what does it cost, or bring, to change the import?
Method: for each case the same dataset and arguments with two workers. torch's loader runs in a process of its own that
never sees Ray; the two alternate, one measured epoch each a round, after one unmeasured. Figures are medians over the
rounds; the ratio is the median of the rounds' ratios. The consumer touches nothing. First batch: `iter()` and one
`next()`; cold is the first of a process (with Ray's start for rayloader), warm a later epoch's.
Command: python benchmarks/throughput.py [--rounds N] [--cases tiny,medium,large]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch.utils.data import Dataset

WORKERS = 2


class Stored(Dataset[Any]):
    """Samples that are there already: what is measured is the loader."""

    def __init__(self, num_samples: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.samples = torch.zeros((min(num_samples, 256), *shape), dtype=dtype)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.samples[index % len(self.samples)], index


# name: batch size, batches an epoch, sample shape, dtype
CASES: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {
    "tiny": (64, 1000, (1, 28, 28), torch.uint8),
    "medium": (32, 200, (3, 224, 224), torch.uint8),
    "large": (128, 30, (3, 224, 224), torch.float32),
}


def make_loader(cls: type, case: str) -> Any:
    """A loader of either class for a case."""
    batch_size, num_batches, shape, dtype = CASES[case]
    return cls(Stored(batch_size * num_batches, shape, dtype), batch_size=batch_size, num_workers=WORKERS)


def serve(cls: type) -> None:
    """Answers each line of standard input, a case's name, with one epoch's times, as JSON."""
    loaders: dict[str, Any] = {}
    for line in sys.stdin:
        case = line.strip()
        loader = loaders.setdefault(case, make_loader(cls, case))
        begin = time.perf_counter()
        batches = iter(loader)
        next(batches)
        first = time.perf_counter()
        count = sum(1 for _ in batches)
        end = time.perf_counter()
        print(json.dumps({"first_s": first - begin, "batches_per_s": count / (end - first)}), flush=True)


class Side:
    """One implementation, in a process of its own."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, case: str) -> dict[str, float]:
        """One epoch of a case."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        """Ends the process."""
        self.process.communicate()


def measure(case: str, rounds: int) -> dict[str, float]:
    """Medians over the rounds."""
    sides = {name: Side(name) for name in ("torch", "rayloader")}
    cold = {name: side.run(case)["first_s"] for name, side in sides.items()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            runs[name].append(side.run(case))
    for side in sides.values():
        side.close()
    rates = {name: [run["batches_per_s"] for run in results] for name, results in runs.items()}
    return {
        **{f"{name} batches/s": statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(*reversed(rates.values()), strict=True)),
        **{f"{name} first batch cold s": seconds for name, seconds in cold.items()},
        **{
            f"{name} first batch warm s": statistics.median(run["first_s"] for run in results)
            for name, results in runs.items()
        },
    }


def main() -> None:
    """Prints one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--serve", choices=["torch", "rayloader"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == "torch":
        from torch.utils.data import DataLoader

        serve(DataLoader)
        assert "ray" not in sys.modules
    elif arguments.serve == "rayloader":
        from rayloader import DataLoader as RayDataLoader

        serve(RayDataLoader)
    else:
        for case in arguments.cases.split(","):
            print(
                case, json.dumps({key: float(f"{value:.4g}") for key, value in measure(case, arguments.rounds).items()})
            )


if __name__ == "__main__":
    main()
