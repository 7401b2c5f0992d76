"""A program that does not know of Ray, and two datasets by the default kind of workers, in epochs in turn.

    python script_moving.py FOLDER

One can be pickled: its workers move to actors. The other stays with forks. Each epoch is twice as long as the one
before, until both are settled, and some more follow. All batches are torch's. Prints what rayloader has logged, and for
each dataset the kinds of processes in which its workers were.
"""

import json
import logging
import math
import multiprocessing
import sys
import time
from pathlib import Path

import torch
import torch.utils.data

from rayloader import DataLoader
from rayloader.workers import takeover

LIMIT = 500.0  # seconds until both are settled; on expiry the program fails
AFTER = 2  # further epochs


class Numbers:
    """Notes in which kind of process each worker is, where no batch shows it."""

    def __init__(self, folder):
        self.folder = folder

    def __getitem__(self, index):
        is_actor = Path("/proc/self/comm").read_text().startswith("ray::")
        worker = torch.utils.data.get_worker_info().id
        (self.folder / f"{worker}").write_text("actor" if is_actor else "fork")
        return index, torch.rand(())

    def kinds(self):
        return [path.read_text() for path in sorted(self.folder.iterdir())]


class Signalled(Numbers):
    def __init__(self, folder):
        super().__init__(folder)
        self.epoch = multiprocessing.Value("i", 1)


def epoch(loader_class, dataset, length):
    torch.manual_seed(length)
    loader = loader_class(dataset, 4, sampler=range(length), num_workers=2)
    return [[part.tolist() for part in batch] for batch in loader]


def main(folder):
    takeover.MOVE_S = math.inf  # the machine may have other work to do
    lines, kinds = [], {"Numbers": [], "Signalled": []}
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.name, record.levelname, record.getMessage()))
    logging.getLogger("rayloader").setLevel(logging.INFO)
    logging.getLogger("rayloader").addHandler(handler)
    datasets = [Numbers(folder / "numbers"), Signalled(folder / "signalled")]
    unshared = Numbers(folder / "torch")
    for dataset in (*datasets, unshared):
        dataset.folder.mkdir(parents=True)
    length, until, more = 32, time.monotonic() + LIMIT, AFTER
    while more:
        assert time.monotonic() < until, (kinds, lines)
        expected = epoch(torch.utils.data.DataLoader, unshared, length)
        for dataset in datasets:
            assert epoch(DataLoader, dataset, length) == expected
            kinds[type(dataset).__name__].append(dataset.kinds())
        if ["actor"] * 2 in kinds["Numbers"] and lines:
            more, length = more - 1, 32
        else:
            length *= 2
    print(json.dumps({"lines": lines, "kinds": kinds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
