"""What the multi-node tests load; importable in each of their processes."""

import os
import random

import numpy as np
import ray
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rayloader import DataLoader, get_shard_info

AWAY = {"num_cpus": 0, "resources": {"away": 0.01}}  # options of workers on the node that the driver is not on
ON_EACH = {"num_cpus": 0, "resources": {"single": 1}}  # of two workers, one on each node


class Calls(Dataset):
    """Sample i is what `function(i)` returns, called in the worker."""

    def __init__(self, function, length):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


def as_is(sample):
    return sample


def calls(function, length=4, num_workers=1, **options):
    """A loader of what a function returns in the workers, sample by sample."""
    return DataLoader(Calls(function, length), None, num_workers=num_workers, collate_fn=as_is, **options)


def origin(_=None):
    """The Ray node and the process that this is called in."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


def augmented(index):
    """A sample of several kinds, with noise from every generator that a worker has."""
    return {
        "image": index + torch.rand(3, 4),
        "noise": np.random.rand(2),
        "flip": random.random() < 0.5,
        "worker": (get_worker_info().id, get_worker_info().seed),
    }


def big(index):
    """1.5 MB: a batch of four takes the object store and several chunks of a transfer between nodes."""
    return torch.randn(256, 1024), np.random.randint(0, 1000, (512, 512), dtype=np.int16), index


class Stream(IterableDataset):
    """The part of forty numbers that is due here, with noise."""

    def __iter__(self):
        shard = get_shard_info()
        return ((number, torch.randn(3)) for number in range(shard.index, 40, shard.count))


CASES = {
    "samples": lambda: {"dataset": Calls(augmented, 22), "batch_size": 4, "shuffle": True},
    "big": lambda: {"dataset": Calls(big, 12), "batch_size": 4, "shuffle": True},
    "stream": lambda: {"dataset": Stream(), "batch_size": 3, "num_replicas": 2, "rank": 1},
}


def made(case, **options):
    """The loader of a case."""
    return DataLoader(**CASES[case](), num_workers=2, **options)


def epochs(loader):
    """All batches of two epochs from a fixed seed, and where the main process's generator ends."""
    torch.manual_seed(11)
    return [list(loader) for _ in range(2)], torch.get_rng_state()


def check_batches(found, case):
    """They are those of forks, which the conformance tests compare with torch's."""
    torch.testing.assert_close(found, epochs(made(case, workers="fork")), rtol=0, atol=0)
