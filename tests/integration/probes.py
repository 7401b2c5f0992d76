"""Datasets that let a test run its own code in the workers."""

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from rayloader import DataLoader


class Calls:
    """Sample i is what `function(i)` returns."""

    def __init__(self, function, length=2):
        self.function = function
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


class Stream(IterableDataset):
    """Each worker iterates over what `function(worker_id)` returns."""

    def __init__(self, function):
        self.function = function

    def __iter__(self):
        return iter(self.function(get_worker_info().id))


def as_is(batch):
    return batch


def in_each_worker(function, num_workers=2, **options):
    """What `function(worker_id)` returns in each worker."""
    return list(load(function, num_workers, **options))


def load(function, length=2, num_workers=None, **options):
    """A loader of unbatched calls of `function(index)`, as many workers as calls unless said otherwise."""
    return DataLoader(
        Calls(function, length),
        batch_size=None,
        num_workers=length if num_workers is None else num_workers,
        collate_fn=as_is,
        **options,
    )


# For more workers than this machine may have cores: torch warns of it, and so do we.
oversubscribed = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
