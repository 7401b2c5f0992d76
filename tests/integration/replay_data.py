"""Runs whose batches are built again: the functions by which commands make their loaders, and the programs' seeds."""

import functools
import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

import stateful
from rayloader import DataLoader

LENGTH = 40  # samples; ten batches


class Augmented(Dataset):
    """Samples that depend on how many the worker has built before."""

    scale = 1.0

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index, self.scale, random.random(), float(np.random.rand()), torch.rand(())


def make(dataset=Augmented, num_workers=2, **options):
    """A loader of ten batches, or of seven of a stream."""
    if not isinstance(dataset, Dataset):
        dataset = dataset()
    usual = {"batch_size": 2} if isinstance(dataset, IterableDataset) else {"batch_size": 4, "shuffle": True}
    return DataLoader(dataset, num_workers=num_workers, **{**usual, **options})


def of_rank(rank, num_replicas):
    """The loader of one rank."""
    return make(rank=rank, num_replicas=num_replicas, shuffle=True)


def seed(number):
    """Seeds the program."""
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


raising = functools.partial(make, stateful.Faulty)
LOADER = make(num_workers=0)
