"""What the multi-node tests load; importable with Ray and without."""

import itertools
import os
import random

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

EPOCHS = 3
AWAY = {"num_cpus": 0, "resources": {"away": 0.01}}  # options of workers on the node that the driver is not on
ON_EACH = {"num_cpus": 0, "resources": {"single": 1}}  # of two workers, one on each node


class Augmented(Dataset):
    """Small samples of many kinds, each with random augmentation from every generator a worker has."""

    def __init__(self, length=22):
        self.base = torch.arange(length * 12, dtype=torch.float32).reshape(length, 3, 4)

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        return {
            "image": self.base[index] + torch.rand(3, 4),
            "noise": np.random.rand(2),
            "flip": random.random() < 0.5,
            "name": f"sample {index}",
            "worker": (get_worker_info().id, get_worker_info().seed),
        }


class Big(Dataset):
    """Samples of 1.5 MB: a batch of four takes the object store and several chunks of a transfer between nodes."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randn(256, 1024), np.random.randint(0, 1000, (512, 512), dtype=np.int16), index


class Stream(IterableDataset):
    """Ends at another moment in each worker."""

    def __iter__(self):
        worker_id = get_worker_info().id
        for position in range(7 + 6 * worker_id):
            yield worker_id, position, torch.randn(3)


def rank(rank):
    dataset = Augmented()
    sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
    return {"dataset": dataset, "batch_size": 4, "sampler": sampler, "num_workers": 1}


CASES = {
    "augmented": lambda: {"dataset": Augmented(), "batch_size": 4, "shuffle": True, "num_workers": 2},
    "big": lambda: {"dataset": Big(), "batch_size": 4, "shuffle": True, "num_workers": 2},
    "stream": lambda: {"dataset": Stream(), "batch_size": 3, "num_workers": 2},
    "persistent": lambda: {
        "dataset": Augmented(),
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
    },
    "rank 0": lambda: rank(0),
    "rank 1": lambda: rank(1),
    "long": lambda: {"dataset": Augmented(80), "batch_size": 4, "shuffle": True, "num_workers": 2},
    "three workers": lambda: {"dataset": Augmented(), "batch_size": 4, "shuffle": True, "num_workers": 3},
}


def epochs(loader):
    """All batches of `EPOCHS` epochs from a fixed seed, and where the main process's generator ends."""
    torch.manual_seed(11)
    return [list(loader) for _ in range(EPOCHS)], torch.get_rng_state()


class Traced:
    """A dataset's samples, each with the Ray node and the process that it came from."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index], origin()


class TracedStream(Traced, IterableDataset):
    """The same for an iterable dataset."""

    def __iter__(self):
        return ((sample, origin()) for sample in self.dataset)


def traced(case):
    options = CASES[case]()
    kind = TracedStream if isinstance(options["dataset"], IterableDataset) else Traced
    return {**options, "dataset": kind(options["dataset"])}


def origin():
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


def untraced(recorded):
    """Splits what a traced loader gave into the batches and, for each epoch, the (node, process) pairs seen."""
    batches, state = recorded
    origins = [
        {(node_id, pid) for _, (node_ids, pids) in epoch for node_id, pid in zip(node_ids, pids.tolist(), strict=True)}
        for epoch in batches
    ]
    return ([[batch for batch, _ in epoch] for epoch in batches], state), origins


def difference(ours, theirs, where="batches"):
    """Where two recorded values first differ, bit for bit; None where they do not."""
    if type(ours) is not type(theirs):
        return f"{where}: {type(ours)} is not {type(theirs)}"
    if isinstance(ours, torch.Tensor):
        same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        return None if same else f"{where}: {ours} is not {theirs}"
    if isinstance(ours, np.ndarray):
        same = ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
        return None if same else f"{where}: {ours} is not {theirs}"
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{where}: {ours.keys()} are not {theirs.keys()}"
        found = (difference(ours[key], theirs[key], f"{where}[{key!r}]") for key in ours)
    elif isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} items, not {len(theirs)}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        found = (difference(mine, other, f"{where}[{at}]") for at, (mine, other) in pairs)
    else:
        return None if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"
    return next(filter(None, found), None)


def tensors(batch):
    """Every tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        return tensors(list(batch.values()))
    if isinstance(batch, (list, tuple)):
        return list(itertools.chain.from_iterable(map(tensors, batch)))
    return []


class Calls(Dataset):
    """Sample i is what `function(i)` returns, called in the worker."""

    def __init__(self, function, length):
        self.function = function
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


def as_is(sample):
    return sample
