"""Photographs that are decoded once: the epochs of a cached dataset beside those of others.

Motive: where decoding takes the time, no loader gains anything over torch's, and users cache by hand.
Method: samples are JPEG photographs, decoded and made 256 pixels high; random crops of 224 x 224 and flips come on top,
outside the cache. Each round gives each way of caching a new process, in an order that changes, which reads three
epochs, workers as usual, none persistent; the figures are milliseconds a batch in the first epoch, with everything that
caching costs, and in the third. "floor" is rayloader over samples that lie decoded in one array: it only copies and
augments. "dict" is the usual idiom: a dict in the dataset, filled by each worker, which keeps what it has with
persistent workers.
Command: python benchmarks/cache.py [--rounds N] [--workers N] [--peers torch,rayloader] [--quick]
Results, where all peers are measured: benchmarks/results/cache.json.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import harness
import tables
from harness import Figure, Options

QUESTION = "cache"
RESULTS = harness.RESULTS / "cache.json"
COMMAND = "python benchmarks/cache.py"
DOCUMENT = harness.ROOT / "docs" / "howto" / "cache.md"
PEERS = {
    "torch": "torch's DataLoader",
    "dict": "torch's, a dict in each persistent worker",
    "torch-cached": "torch's, rayloader.cached",
    "rayloader": "rayloader",
    "cached": "rayloader, rayloader.cached",
    "folder": "rayloader, rayloader.cached in a folder",
    "floor": "rayloader, only copies and augments",
}
METRICS = ("first epoch", "third epoch")
SIDE, HEIGHT = 224, 256
BATCH_SIZE = 32
LIMIT_S = 600.0  # for a program; on expiry it is an error

Sample = tuple[torch.Tensor, int]


class Photos(Dataset[Sample]):
    """The two photographs that scikit-learn ships, decoded and made 256 pixels high."""

    def __init__(self, count: int) -> None:
        folder = resources.files("sklearn.datasets.images")
        self.files = [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % 2])) as photo:
            small = photo.convert("RGB").resize((HEIGHT * photo.width // photo.height, HEIGHT))
        return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).contiguous(), index % 2


class InDict(Dataset[Sample]):
    """Keeps what it was asked for."""

    def __init__(self, dataset: Dataset[Sample], count: int) -> None:
        self.dataset, self.count = dataset, count
        self.samples: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index not in self.samples:
            self.samples[index] = self.dataset[index]
        return self.samples[index]


class InArray(Dataset[Sample]):
    """All samples in one array."""

    def __init__(self, dataset: Dataset[Sample], count: int) -> None:
        self.images = torch.stack([dataset[index][0] for index in range(count)])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        return self.images[index].clone(), index % 2


class Augmented(Dataset[Sample]):
    """A random crop, flipped at random, of a sample."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        image, label = self.samples[index]
        top = int(torch.randint(image.shape[1] - SIDE + 1, ()))
        left = int(torch.randint(image.shape[2] - SIDE + 1, ()))
        crop = image[:, top : top + SIDE, left : left + SIDE]
        return (crop.flip(-1) if torch.rand(()) < 0.5 else crop.contiguous()), label


def program(peer: str, batches: int, workers: int) -> None:
    """Runs one way of caching, and prints the milliseconds a batch of each epoch."""
    import rayloader

    count = batches * BATCH_SIZE
    photos = Photos(count)
    arguments: dict[str, Any] = {"persistent_workers": peer == "dict"}
    loader_class: Any = torch.utils.data.DataLoader
    with tempfile.TemporaryDirectory() as folder:
        samples: Any = photos
        if peer == "dict":
            samples = InDict(photos, count)
        elif peer in ("torch-cached", "cached"):
            samples = rayloader.cached(photos)
        elif peer == "folder":
            samples = rayloader.cached(photos, where=folder, key="photographs")
        elif peer == "floor":
            samples = InArray(photos, count)
        if peer in ("rayloader", "cached", "folder", "floor"):
            loader_class, arguments = rayloader.DataLoader, {"workers": "fork"}
        torch.manual_seed(0)
        milliseconds = []
        begin = time.perf_counter()
        loader = loader_class(Augmented(samples), BATCH_SIZE, shuffle=True, num_workers=workers, **arguments)
        for _ in range(3):
            seen = sum(1 for _ in loader)
            if seen != batches:
                raise RuntimeError(f"{peer} gave {seen} batches instead of {batches}")
            milliseconds.append((time.perf_counter() - begin) / batches * 1e3)
            begin = time.perf_counter()
        cache = samples.stats() if isinstance(samples, rayloader.CachedDataset) else None
    told = None if cache is None else {"built": cache.built, "nbytes": cache.nbytes}
    print(json.dumps({"milliseconds": milliseconds, "cache": told}), flush=True)


def run(peer: str, batches: int, workers: int) -> dict[str, float]:
    """The figures of a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, __file__, "--program", peer, str(batches), str(workers)]
        subprocess.run(command, env=environment, stdout=output, check=True, timeout=LIMIT_S)
        output.seek(0)
        answer = json.loads(output.read().splitlines()[-1])
    if answer["cache"] is not None and answer["cache"]["built"] != batches * BATCH_SIZE:
        raise RuntimeError(f"{peer} built {answer['cache']['built']} samples instead of {batches * BATCH_SIZE}")
    first, _, third = answer["milliseconds"]
    return {"first epoch": first, "third epoch": third}


def measure(options: Options) -> list[Figure]:
    """Both metrics, for each way."""
    peers = options.pick_peers(list(PEERS), quick=["torch", "cached", "floor"])
    batches = 10 if options.quick else 40
    answers: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    for number in range(options.rounds):
        for peer in harness.rotated(peers, number):
            harness.say(f"{QUESTION}: {peer}, round {number + 1} of {options.rounds}")
            answers[peer].append(run(peer, batches, options.workers))
    return [
        harness.figure(QUESTION, "jpeg", peer, metric, "ms", [answer[metric] for answer in answers[peer]])
        for peer in peers
        for metric in METRICS
    ]


def rows_of(figures: list[Figure]) -> list[list[str]]:
    """The table, with its header."""
    rows = [["loader and cache", *(f"{metric}, ms a batch" for metric in METRICS), "times torch"]]
    torchs = harness.find(figures, implementation="torch", metric=METRICS[-1])
    for peer in dict.fromkeys(figure["implementation"] for figure in figures):
        found = [harness.find(figures, implementation=peer, metric=metric) for metric in METRICS]
        times = harness.ratio(torchs, found[-1]) if torchs and found[-1] else None
        rows.append([PEERS[peer], *map(harness.show, found), f"{times['median']:.2g}" if times else "-"])
    return rows


def table(results: dict[str, Any]) -> str:
    """The table of the document."""
    machine, settings = results["machine"], results["settings"]
    return (
        f"Batches of 32 photographs, {settings['workers']} workers on {machine['cores']} cores, torch "
        f"{machine['torch']}, medians of {settings['rounds']} rounds.\n\n"
        f"{tables.markdown(rows_of(results['figures']))}"
    )


def main() -> None:
    """Measures, prints and writes."""
    options, machine = harness.options(__doc__), harness.machine()
    figures = measure(options)
    header, *rows = rows_of(figures)
    harness.print_table("Photographs: decoded, cropped at random", header, rows)
    if not (options.peers or options.quick):
        settings = {"rounds": options.rounds, "workers": options.workers}
        results = {"machine": machine, "settings": settings, "figures": figures}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        tables.put(DOCUMENT, COMMAND, table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        with harness.clean_exit():
            main()
