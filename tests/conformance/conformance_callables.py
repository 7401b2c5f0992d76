"""Samplers, collate functions and worker_init_fns of the conformance cases."""

import random

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate, get_worker_info

from conformance_datasets import Money, Sample


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class LazyRandom(Sampler):
    """Draws each index from the global generator when it is asked for: shows when the loader asks."""

    def __init__(self, length, count):
        self.length = length
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            yield int(torch.randint(self.length, ()))

    def __len__(self):
        return self.count


class EagerRandom(Sampler):
    """Draws all indices in `__iter__` itself: shows how often and when the loader calls that."""

    def __init__(self, length):
        self.length = length
        self.started = 0

    def __iter__(self):
        self.started += 1
        return iter(torch.randperm(self.length).tolist())

    def __len__(self):
        return self.length


class EagerBatches(EagerRandom):
    """A batch sampler of batches of changing sizes, shuffled in `__iter__`."""

    def __iter__(self):
        self.started += 1
        order = torch.randperm(self.length).tolist()
        random.shuffle(order)
        return iter([order[start : start + size] for start, size in ((0, 3), (3, 5), (8, 1), (9, 4))])

    def __len__(self):
        return 4


class FailingSampler(Sampler):
    """Gives some indices and raises; iterating it again begins anew."""

    def __init__(self, length, good):
        self.length = length
        self.good = good

    def __iter__(self):
        yield from range(self.good)
        raise LookupError(f"no index after {self.good}")

    def __len__(self):
        return self.length


class RaisesOnce(FailingSampler):
    """An iterator class that raises in the middle and goes on when it is asked again."""

    def __iter__(self):
        self.position = -1
        return self

    def __next__(self):
        self.position += 1
        if self.position == self.good:
            raise LookupError(f"not at {self.good}")
        if self.position >= self.length:
            raise StopIteration
        return self.position


class OverwritesItsIndices(Sampler):
    """Gives the same object for every batch, with other indices in it; torch's loader may send what comes later."""

    def __init__(self, indices):
        self.indices = indices  # of one batch: a list, an array or a tensor

    def __iter__(self):
        for batch in range(len(self)):
            for place in range(len(self.indices)):
                self.indices[place] = batch + 3 * place
            yield self.indices
        for place in range(len(self.indices)):
            self.indices[place] = 0

    def __len__(self):
        return 10


class NoLength:
    """A sampler without a length."""

    def __iter__(self):
        return iter(range(0, 17, 2))


def as_is(batch):
    return batch


def to_samples(batch):
    """A batch as a dataclass."""
    return Sample(torch.tensor([item["index"] for item in batch]), len(batch), repr(batch[0]["python"]))


def to_tuple(batch):
    return tuple(batch), {"last": batch[-1], "count": len(batch), "noise": random.random()}


def with_options(batch, *, scale):
    return default_collate([sample["torch"] * scale for sample in batch])


class Scaling:
    """A callable object with state that changes from call to call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        return default_collate(batch), self.calls


def views_of_one(batch):
    """One big tensor and views of it: aliasing inside a batch, far less payload than storage."""
    stacked = torch.stack([sample[0] for sample in batch])
    big = torch.zeros(64, 64)
    big[: len(batch), :3] = stacked
    return {"views": [big[i, :3] for i in range(len(batch))], "first": big[0], "column": big[: len(batch), 1]}


def fail_on_seven(batch):
    if any(int(sample["index"]) == 7 for sample in batch):
        raise ArithmeticError("seven")
    return default_collate(batch)


def collate_money(batch, *, collate_fn_map=None):
    return torch.tensor([money.cents for money in batch], dtype=torch.int16)


def collate_tensors_doubled(batch, *, collate_fn_map=None):
    return torch.stack(batch) * 2


MAP_EXTENSION = {Money: collate_money, torch.Tensor: collate_tensors_doubled}


def reseed(worker_id):
    """Each worker gets a seed of the user's own."""
    random.seed(worker_id)
    np.random.seed(worker_id + 10)
    torch.manual_seed(worker_id + 20)


def draw_once(worker_id):
    """Moves the worker's generators before the first sample."""
    random.random(), np.random.rand(), torch.rand(())


def split_range(worker_id):
    """The example of torch's documentation."""
    info = get_worker_info()
    dataset = info.dataset
    start, end = dataset.start, dataset.end
    share = -(-(end - start) // info.num_workers)
    dataset.start = start + worker_id * share
    dataset.end = min(dataset.start + share, end)


def fail_to_start(worker_id):
    raise OSError(f"worker {worker_id} can't start")
