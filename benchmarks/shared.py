"""What k consumers of one shared loader pay, against k loaders.

Motive: trainers that need the same batches can build them each for itself, or share a loader (`rayloader.share`).
Method: k trainers are actors of one Ray. In each round, in alternating order, an epoch is read in four ways: by one
trainer with a loader of its own, by one consumer of a share, by k consumers of a share, by k trainers with a loader of
their own each. Loaders and shares live through all rounds; the first is not measured. All trainers of an epoch begin
together, and the last one's seconds count. Every loader, shared or not, has the same number of workers. Beside the
seconds stand the ratios to one loader, of the same round.
Cases: "work" has batches of 0.6 MB, each of which costs its worker 20 ms of CPU; "tiny" and "large" have batches of 4
KB and of 10 MB that cost nothing to build: what they take is the way.
Command: python benchmarks/shared.py [--consumers 4] [--rounds 5] [--workers 1] [--cases work,tiny,large]
Results, where all cases are measured: benchmarks/results/shared.json, and the table in docs/howto/sharing.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import ray
import torch

import harness
import rayloader
import tables

COMMAND = "python benchmarks/shared.py"
RESULTS = harness.RESULTS / "shared.json"
DOCUMENT = harness.ROOT / "docs" / "howto" / "sharing.md"
CASES = {
    "plain": (500, 1_200_000, 0.0),
    "work": (200, 600_000, 0.02),
    "tiny": (2000, 4_000, 0.0),
    "large": (60, 10_000_000, 0.0),
}


class Batches:
    """So many batches of so many bytes, each of which costs so many seconds of CPU."""

    def __init__(self, length: int, nbytes: int, seconds: float) -> None:
        self.length, self.nbytes, self.seconds = length, nbytes, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return torch.full((self.nbytes,), index % 251, dtype=torch.uint8)


def make(case: str, workers: int) -> rayloader.DataLoader[Any]:
    """The loader of a case."""
    return rayloader.DataLoader(Batches(*CASES[case]), batch_size=None, num_workers=workers)


class Trainer:
    """Reads epochs."""

    def __init__(self) -> None:
        self._sources: dict[str, Any] = {}

    def own(self, case: str, workers: int) -> None:
        """Makes a loader of its own."""
        self._sources["own"] = make(case, workers)

    def consume(self, way: str, shared: rayloader.SharedLoader, rank: int) -> None:
        """Connects to a share."""
        self._sources[way] = shared.consumer(rank)

    def read(self, way: str, begin: float) -> float:
        """Reads an epoch from the time `begin` on, and gives the time of its end."""
        while time.time() < begin:
            time.sleep(0.001)
        for number, batch in enumerate(self._sources[way]):
            if batch[0] != number % 251:
                raise ValueError(f"batch {number} of {way} is another one")
        return time.time()


def measure(case: str, count: int, rounds: int, workers: int) -> dict[str, list[float]]:
    """Seconds of an epoch in each way, of each round."""
    trainers = [ray.remote(Trainer).options(num_cpus=0).remote() for _ in range(count)]  # type: ignore[attr-defined]
    ways = {"one loader": 1, "one consumer": 1, f"{count} consumers": count, f"{count} loaders": count}
    found: dict[str, list[float]] = {way: [] for way in ways}
    ray.get([trainer.own.remote(case, workers) for trainer in trainers])
    loader = make(case, workers)
    with rayloader.share(loader, consumers=1) as alone, rayloader.share(loader, consumers=count) as together:
        ray.get(trainers[0].consume.remote("one consumer", alone, 0))
        ray.get([t.consume.remote(f"{count} consumers", together, rank) for rank, t in enumerate(trainers)])
        for number in range(-1, rounds):
            for way in list(ways)[:: -1 if number % 2 else 1]:
                begin = time.time() + 0.5
                source = "own" if "loader" in way else way
                seconds = max(ray.get([t.read.remote(source, begin) for t in trainers[: ways[way]]])) - begin
                print(case, way, f"{seconds:.3f} s", "" if number >= 0 else "(not counted)", flush=True)
                if number >= 0:
                    found[way].append(seconds)
    for trainer in trainers:
        ray.kill(trainer)
    return found


def table(document: dict[str, Any]) -> str:
    """In Markdown: what was measured on, and a row for each case."""
    machine, settings = document["machine"], document["settings"]
    caption = (
        f"Seconds of an epoch, and in brackets the ratio to one loader in the same round, on {machine['cores']} cores; "
        f"both are medians of {settings['rounds']} rounds, {machine['date'][:10]}."
    )
    first = next(iter(document["seconds"].values()))
    rows = [["batches", *first]]
    for case, found in document["seconds"].items():
        count, nbytes, cost = CASES[case]
        ratios = [
            statistics.median(a / b for a, b in zip(seconds, found["one loader"], strict=True))
            for seconds in found.values()
        ]
        cells = [
            f"{statistics.median(seconds):.2f} ({ratio:.2f})"
            for seconds, ratio in zip(found.values(), ratios, strict=True)
        ]
        rows.append([f"{case}: {count} of {nbytes / 1e6:g} MB, {1000 * cost:g} ms of CPU each", *cells])
    return f"{caption}\n\n{tables.markdown(rows)}"


def main() -> None:
    """Measures the cases, prints and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--consumers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    machine = harness.machine()
    rayloader.init()
    rayloader.DataLoader(range(1), num_workers=1).__iter__()  # Ray runs from here on
    seconds = {
        case: measure(case, arguments.consumers, arguments.rounds, arguments.workers)
        for case in arguments.cases.split(",")
    }
    settings = {"rounds": arguments.rounds, "workers": arguments.workers, "consumers": arguments.consumers}
    document = {"machine": machine, "settings": settings, "seconds": seconds}
    print(f"\n{table(document)}")
    if [*seconds] == [*CASES]:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        tables.put(DOCUMENT, COMMAND, table(document))


if __name__ == "__main__":
    main()
