"""What torchdata's loader and ours are given, and what they make of it.

python torchdata_cases.py OUT NAME...   write to OUT, as JSON, what torchdata's loader makes of these
"""

import json
import logging
import multiprocessing
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from framework_data import Numbers

NUM_WORKERS = (0, 2)


class Squares(Dataset):
    """One sample may raise."""

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


class Count:
    """An iterator that tells its state."""

    def __init__(self, bad=None):
        self.position, self.bad = 0, bad

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 10:
            raise StopIteration
        self.position += 1
        if self.position == self.bad:
            raise ZeroDivisionError
        return self.position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Counted(IterableDataset):
    """Has such an iterator in each epoch; one sample may raise."""

    def __init__(self, bad=None):
        self.bad = bad

    def __iter__(self):
        return Count(self.bad)


class Breaking(IterableDataset):
    """A generator, which ends where it raises."""

    def __iter__(self):
        yield from range(4)
        raise ZeroDivisionError


class Forward:
    """A sampler that begins each epoch one further than the last, and tells its state."""

    def __init__(self):
        self.first, self.given = 0, 0

    def __len__(self):
        return 20

    def __iter__(self):
        while self.given < 20:
            self.given += 1
            yield (self.first + self.given - 1) % 20
        self.first, self.given = self.first + 1, 0

    def state_dict(self):
        return {"first": self.first, "given": self.given}

    def load_state_dict(self, state):
        self.first, self.given = state["first"], state["given"]


def picky(samples):
    """Collates what does not hold the square of 7."""
    if 49 in samples:
        raise ZeroDivisionError
    return default_collate(samples)


def drawn(sampler_class, **arguments):
    return {"sampler": sampler_class(range(20), generator=torch.Generator().manual_seed(3), **arguments)}


BATCHES = [[1, 2, 3], [5], [8, 13], [4, 6, 7, 9], [0]]
CASES = {
    "map": lambda: {"dataset": Squares(), "sampler": SequentialSampler(range(20)), "batch_size": 3},
    "drawn": lambda: {"dataset": Squares(), **drawn(RandomSampler), "batch_size": 3},
    "drawn with replacement": lambda: {
        "dataset": Squares(),
        **drawn(RandomSampler, replacement=True, num_samples=17),
        "batch_size": 3,
    },
    "its own random sampler": lambda: {"dataset": Squares(), **drawn(StatefulRandomSampler), "batch_size": 3},
    "its own distributed sampler": lambda: {
        "dataset": Squares(),
        "sampler": StatefulDistributedSampler(Squares(), 2, 1),
        "batch_size": 3,
    },
    "sampler with a state": lambda: {"dataset": Squares(), "sampler": Forward(), "batch_size": 4},
    "batch sampler": lambda: {"dataset": Squares(), "batch_sampler": BATCHES},
    "single": lambda: {"dataset": Squares(), "batch_size": None},
    "drop_last": lambda: {"dataset": Squares(), "batch_size": 3, "drop_last": True},
    "stream": lambda: {"dataset": Numbers(20), "batch_size": 3},
    "stream with a state": lambda: {"dataset": Counting(), "batch_size": 3},
    "stream whose iterator has a state": lambda: {"dataset": Counted(), "batch_size": 3},
    "stream of single samples": lambda: {"dataset": Counted(), "batch_size": None},
}
PERSISTENT = ("drawn", "stream", "stream with a state", "stream whose iterator has a state")
STATES = [f"states, {case}, {number}" for case in CASES for number in NUM_WORKERS]
STATES += [f"states, {case}, persistent" for case in PERSISTENT]


def settings(name):
    """The case that is meant, and the arguments for its workers."""
    _, case, workers = name.split(", ")
    persistent = workers == "persistent"
    return case, {"num_workers": 2 if persistent else int(workers), "persistent_workers": persistent}


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epoch(loader):
    return [plain(batch) for batch in loader]


def states(loader_class, name, steps=1):
    """The batches of two epochs, and of the two that follow states of the first, by how many steps had been made."""
    case, workers = settings(name)

    def make(state=None):
        loader = loader_class(**CASES[case](), **workers, snapshot_every_n_steps=steps)
        if state is not None:
            loader.load_state_dict(state)
        return loader

    saved = [make().state_dict()]
    loader, batches = make(), []
    for batch in loader:
        batches.append(plain(batch))
        saved.append(loader.state_dict())
    saved.append(loader.state_dict())  # between two epochs
    found = {"first": batches, "second": epoch(loader), "after an empty state": epoch(make({}))}
    last = len(batches)
    for taken in (0, 1, 5, last, last + 1) if workers["num_workers"] else range(last + 2):
        if taken < len(saved):
            loader = make(saved[taken])
            found[f"after {taken}"] = [epoch(loader), epoch(loader)]
    loader = make(saved[1])
    next(iter(loader))
    loader.load_state_dict(saved[2])
    loader.load_state_dict(saved[1])
    found["loaded twice"] = epoch(loader)
    return found


ERRORS = {
    "sample": lambda: {"dataset": Squares(bad=7), "batch_size": 3},
    "single sample": lambda: {"dataset": Squares(bad=7), "batch_size": None},
    "collate": lambda: {"dataset": Squares(), "batch_size": 3, "collate_fn": picky},
    "stream": lambda: {"dataset": Counted(bad=5), "batch_size": 3},
    "stream of single samples": lambda: {"dataset": Counted(bad=5), "batch_size": None},
    "generator": lambda: {"dataset": Breaking(), "batch_size": 3},
    "nothing": lambda: {"dataset": Squares(), "batch_size": 3},
    "nothing in a stream": lambda: {"dataset": Counted(), "batch_size": 3},
}
TURNS = [f"turns, {case}, {number}" for case in ERRORS for number in NUM_WORKERS]


def turns(loader_class, name):
    """What each call of `next` gives, beyond the end, or the type of what it raises."""
    case, workers = settings(name)
    iterator = iter(loader_class(**ERRORS[case](), **workers, snapshot_every_n_steps=2))
    found = []
    for _ in range(25):
        try:
            found.append(plain(next(iterator)))
        except Exception as error:
            found.append(type(error).__name__)
    return found


def run(loader_class, name, **options):
    """As JSON gives it back."""
    what = {"states": states, "turns": turns}[name.split(", ")[0]]
    return json.loads(json.dumps(what(loader_class, name, **options)))


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    from torchdata.stateful_dataloader import StatefulDataLoader

    logging.disable()  # it tells of each stream that it reads again
    Path(sys.argv[1]).write_text(json.dumps({name: run(StatefulDataLoader, name) for name in sys.argv[2:]}))
