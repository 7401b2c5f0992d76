"""Runs whose batches are built again: their datasets, and the functions by which commands make their loaders."""

import functools
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from rayloader import DataLoader

LENGTH = 40  # samples; ten batches


class Augmented(Dataset):
    """Samples that depend on how many the worker has built before."""

    scale = 1.0

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, self.scale, random.random(), float(np.random.rand()), torch.rand(())


class Indices(Augmented):
    """Samples without randomness."""

    def __getitem__(self, index):
        return index


class WithGenerator(Augmented):
    """Draws from a generator of its own, which no seeding reaches."""

    def __init__(self):
        self.generator = random.Random(7)

    def __getitem__(self, index):
        return index, self.generator.random()


class Raising(Augmented):
    """Raises for one sample, after it has drawn."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 13:
            raise ValueError(f"no sample {index}")
        return sample


class KillsOnce(Augmented):
    """Ends a worker's process once, in mid-epoch."""

    def __init__(self, mark):
        self.mark = mark

    def __getitem__(self, index):
        if index == 17 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class DrawsOneByOne(Sampler):
    """Draws each index from a global generator, when it is asked for it."""

    def __iter__(self):
        return (random.randrange(LENGTH) for _ in range(LENGTH))

    def __len__(self):
        return LENGTH


class Stream(IterableDataset):
    """A stream with a state, whose workers end at different times."""

    number = 0

    def length(self):
        info = get_worker_info()
        return 12 + 8 * (0 if info is None else info.id)

    def __iter__(self):
        while self.number < self.length():
            self.number += 1
            yield self.number, random.random()
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class StreamWithoutState(Stream):
    """The same, without a state."""

    state_dict = load_state_dict = None


def make(dataset=Augmented, num_workers=2, **options):
    """A loader, whose program has another seed than any other program's."""
    if not isinstance(dataset, Dataset):
        dataset = dataset()
    usual = {"batch_size": 4} if isinstance(dataset, IterableDataset) else {"batch_size": 4, "shuffle": True}
    return DataLoader(dataset, num_workers=num_workers, **{**usual, **options})


def of_rank(rank, num_replicas):
    """The loader of one rank."""
    return make(rank=rank, num_replicas=num_replicas, shuffle=True)


def seed(number):
    """Seeds the program."""
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


plain = make
raising = functools.partial(make, Raising)


LOADER = make(num_workers=0)
