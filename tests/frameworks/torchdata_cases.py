"""What torchdata's loader and ours are given, and what they make of it.

python torchdata_cases.py OUT   write to OUT, as JSON, what torchdata's loader makes of all of it
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler

from framework_data import Numbers

NUM_WORKERS = (0, 2)


class Squares(Dataset):
    """One sample raises."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.bad:
            raise ZeroDivisionError
        return torch.tensor(index**2)


class Counting(IterableDataset):
    """Tells its state."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield self.position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


DATASETS = {
    "map": lambda: {"dataset": Squares(), "sampler": SequentialSampler(range(20))},
    "stream": lambda: {"dataset": Numbers(20)},
    "stream with a state": lambda: {"dataset": Counting()},
}


def run(loader_class, case, num_workers, steps):
    """The batches of an epoch, and those that follow each state of it."""

    def make():
        return loader_class(**DATASETS[case](), batch_size=3, num_workers=num_workers, snapshot_every_n_steps=steps)

    loader = make()
    states, found = [loader.state_dict()], []
    for batch in loader:
        found.append(batch.tolist())
        states.append(loader.state_dict())
    states.append(loader.state_dict())  # between two epochs
    for state in states:
        loader = make()
        loader.load_state_dict(state)
        found.append([batch.tolist() for batch in loader])
    loader = make()
    loader.load_state_dict({})
    found.append([batch.tolist() for batch in loader])
    return found


def turns(loader_class, num_workers):
    """The batches before the one with a sample that raises."""
    iterator, found = iter(loader_class(Squares(bad=7), 3, num_workers=num_workers, snapshot_every_n_steps=2)), []
    with contextlib.suppress(ZeroDivisionError):
        while True:
            found.append(next(iterator).tolist())
    return found


if __name__ == "__main__":
    from torchdata.stateful_dataloader import StatefulDataLoader

    theirs = {
        "states": {f"{c}-{n}": run(StatefulDataLoader, c, n, 1) for c in DATASETS for n in NUM_WORKERS},
        "turns": {n: turns(StatefulDataLoader, n) for n in NUM_WORKERS},
    }
    Path(sys.argv[1]).write_text(json.dumps(theirs))
