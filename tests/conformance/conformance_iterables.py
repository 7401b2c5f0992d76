"""Iterable-style datasets of the conformance cases. The promises of conformance_datasets.py hold here too."""

import os
import random
import tempfile
import weakref

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from conformance_datasets import fail


def worker_and_count():
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Sharded(IterableDataset):
    """Worker k takes every W-th sample from k on: the shards' lengths differ by one."""

    def __init__(self, length=19):
        self.length = length

    def __iter__(self):
        worker, count = worker_and_count()
        for i in range(worker, self.length, count):
            yield {"value": torch.tensor([i, worker]), "name": f"{worker}/{i}"}


class NoisyStream(Sharded):
    """Shards with draws, and a count of how often this copy was iterated."""

    def __init__(self, length=19):
        super().__init__(length)
        self.iterations = 0

    def __iter__(self):
        self.iterations += 1
        for sample in super().__iter__():
            yield sample["value"], random.random(), torch.rand(2), self.iterations


def remove(path, pid):
    """Removes a file of the process that has made it; forks have the same objects."""
    if os.getpid() == pid:
        os.unlink(path)


class SharesAgain(Sharded):
    """Gives the epoch that the trainer has set in a shared tensor, which `__setstate__` shares once more."""

    def __init__(self, kind):
        super().__init__()
        if kind == "file":
            file, path = tempfile.mkstemp()
            os.close(file)
            weakref.finalize(self, remove, path, os.getpid())
            self.epoch = torch.from_file(path, shared=True, size=1, dtype=torch.int64)
            self.epoch.zero_()
        else:
            self.epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __setstate__(self, state):
        vars(self).update(state)
        self.epoch = self.epoch.share_memory_()

    def set_epoch(self, epoch):
        self.epoch[0] = epoch

    def __iter__(self):
        for sample in super().__iter__():
            yield sample["value"], self.epoch.clone(), self.epoch.is_shared()


def hugging_face():
    """A stream of `datasets`, whose order depends on an epoch that it holds in a shared tensor."""
    from datasets import Dataset

    rows = Dataset.from_dict({"number": list(range(24))})
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=5).with_format("torch")


class Located(Sharded):
    """Tells which worker gave the sample."""

    def __iter__(self):
        for sample in super().__iter__():
            yield tuple(sample["value"].tolist())


class Uneven(IterableDataset):
    """Worker k gives 3 * (k + 1) samples, or as told: workers end at different times, some at once."""

    def __init__(self, lengths=(3, 6, 9)):
        self.lengths = lengths

    def __iter__(self):
        worker, _ = worker_and_count()
        yield from ((worker, i) for i in range(self.lengths[worker]))


class Declared(Sharded):
    """Says a length, which may be wrong."""

    def __init__(self, length=19, declared=19, sharded=True):
        super().__init__(length)
        self.declared = declared
        self.sharded = sharded

    def __len__(self):
        return self.declared

    def __iter__(self):
        if self.sharded:
            return (sample["value"] for sample in super().__iter__())
        return iter(range(self.length))


class Endless(IterableDataset):
    def __iter__(self):
        worker, _ = worker_and_count()
        i = 0
        while True:
            yield worker, i, random.random()
            i += 1


def datapipe():
    """One of torch's old datapipes: sharded and shuffled by the loader, which draws a seed for that; with a lambda."""
    return IterableWrapper(range(19)).shuffle().sharding_filter().map(lambda number: number + 1)


class ShardedByInit(IterableDataset):
    """The example of torch's documentation: worker_init_fn tells each copy its part."""

    def __init__(self, start=3, end=20):
        self.start = start
        self.end = end

    def __iter__(self):
        return iter(range(self.start, self.end))


class FailingGenerator(IterableDataset):
    """Fails in the middle; a generator that failed has ended."""

    def __init__(self, how="value"):
        self.how = how

    def __iter__(self):
        worker, count = worker_and_count()
        for i in range(worker, 19, count):
            if i == 6:
                fail(self.how)
            yield i, random.random()


class FailingIterator(IterableDataset):
    """Fails in the middle and goes on: an iterator class is not ended by what it raises."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        self.position = worker_and_count()[0]
        return self

    def __next__(self):
        self.position += worker_and_count()[1]
        if self.position in (6, 7):
            fail("key")
        if self.position > 19:
            raise StopIteration
        return self.position


class FailingStart(IterableDataset):
    def __iter__(self):
        fail("value")
