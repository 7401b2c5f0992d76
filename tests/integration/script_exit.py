"""A user's script: classes and lambdas of `__main__`, a module beside it, and at the end much that is still alive.

    python script_exit.py FOLDER [ray]

With `ray` its workers are actors in a Ray of its own. It must end by itself, with status 0 and its last line printed.
"""

import enum
import os
import sys
from pathlib import Path

import pytest
import torch.utils.data

import rayloader
from latches import Gate, Mail  # found in the script's own folder, by workers too

StockLoader = torch.utils.data.DataLoader
torch.utils.data.DataLoader = rayloader.DataLoader  # before anything was iterated


class Colour(enum.Enum):
    RED = 1


class Batch:
    def __init__(self, samples):
        self.samples = samples
        self.colour = Colour.RED


class Squares:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.compute(index)

    def compute(self, index):
        return index * index


class Stuck(Squares):
    def __init__(self, mail, gate):
        self.mail = mail
        self.gate = gate

    def __getitem__(self, index):
        self.mail.send(index)
        self.gate.wait()


class Pids(Squares):
    def __getitem__(self, index):
        return os.getpid()


def main(folder, *asked):
    if asked:
        rayloader.init()
    loader = torch.utils.data.DataLoader(Squares(), 2, num_workers=2, collate_fn=Batch)
    assert isinstance(loader, StockLoader)
    batches = list(loader)
    assert {type(batch) for batch in batches} == {Batch}, "the class is this script's own"
    assert all(batch.colour is Colour.RED for batch in batches)
    assert [batch.samples for batch in batches] == [[0, 1], [4, 9], [16, 25], [36, 49]]

    Squares.compute = lambda self, index: -index  # as when a notebook's cell is run again
    assert [batch.samples for batch in loader] == [[0, -1], [-2, -3], [-4, -5], [-6, -7]]
    assert list(rayloader.DataLoader(range(2), None, num_workers=1, collate_fn=lambda x: x + 0.5)) == [0.5, 1.5]

    pids = rayloader.DataLoader(Pids(), None, num_workers=2)
    print("workers:", *{*pids})

    # Alive at the end: persistent workers after `break`, an iterator after an error, one that waits for a stuck worker.
    persistent = rayloader.DataLoader(Squares(), num_workers=1, persistent_workers=True)
    for _ in persistent:
        break
    failing = iter(rayloader.DataLoader(Squares(), num_workers=1, collate_fn=lambda batch: 1 // 0))
    try:
        next(failing)
    except ZeroDivisionError as caught:
        error = caught
    mail, gate = Mail(folder / "mail"), Gate(folder / "gate")
    stuck = iter(rayloader.DataLoader(Stuck(mail, gate), None, num_workers=1, timeout=1))
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(stuck)
    assert mail.receive() == ["0"]
    globals().update(keep=(persistent, failing, error, stuck, gate))
    print("the end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
