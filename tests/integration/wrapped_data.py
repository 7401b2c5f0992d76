"""Streams and datasets of every kind of state, to be read as they are and through rayloader's wrappers of them.

A sample is a list of numbers. What a stream gives is drawn from the global generators, or from one that it holds, so
that a resumption that forgets a generator shows.
"""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from rayloader import get_shard_info

LENGTH = 11


def places():
    """The samples of this reader's part."""
    shard = get_shard_info()
    return list(range(shard.index, LENGTH, shard.count))


def sample(place, drawn):
    return [100 * place + int(drawn * 90) + number for number in range(1 + place % 4)]


class Fixed(IterableDataset):
    """Depends on nothing."""

    def __iter__(self):
        return iter([sample(place, 0.5) for place in places()])


class Shuffled(IterableDataset):
    """Draws its order when it begins, and each sample, from the global generators."""

    def __iter__(self):
        own = places()
        for number in torch.randperm(len(own)).tolist():
            yield sample(own[number], (random.random() + np.random.rand()) / 2)


class HoldsGenerator(IterableDataset):
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __iter__(self):
        own = places()
        for number in self.generator.permutation(len(own)).tolist():
            yield sample(own[number], self.generator.random())


class TellsPosition(IterableDataset):
    """Has a position, which goes back to the start when a reading ends."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for place in places()[self.position :]:
            self.position += 1
            yield sample(place, torch.rand(()).item())
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class TakesOverLate(IterableDataset):
    """Takes a loaded position over with the first sample, and reports the one where the last reading has ended."""

    def __init__(self):
        self.position = self.loaded = 0

    def __iter__(self):
        self.position, self.loaded = self.loaded, 0
        for place in places()[self.position :]:
            self.position += 1
            yield sample(place, random.random())

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.loaded = state["position"]


class CountsEpochs(IterableDataset):
    """Has another order in each epoch, by a count that is a part of its state."""

    def __init__(self):
        self.epoch = self.position = 0

    def __iter__(self):
        own = places()
        order = np.random.default_rng(self.epoch).permutation(len(own)).tolist()
        while self.position < len(order):
            self.position += 1
            yield sample(own[order[self.position - 1]], np.random.rand())
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Reading:
    """An iterator that tells its order and its place in it."""

    def __init__(self):
        own = places()
        self.order = [own[number] for number in torch.randperm(len(own)).tolist()]
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == len(self.order):
            raise StopIteration
        self.position += 1
        return sample(self.order[self.position - 1], torch.rand(()).item())

    def state_dict(self):
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state):
        self.order, self.position = state["order"], state["position"]


class IteratorTells(IterableDataset):
    """Has a state in its iterator alone."""

    def __iter__(self):
        return Reading()


class CountingReading(Reading):
    """Counts the samples that its dataset has given in all epochs, on which they depend."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __next__(self):
        place = super().__next__()
        self.counts.count += 1
        return [self.counts.count, *place]


class BothTell(IterableDataset):
    """Has a state, and an iterator with another one."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        return CountingReading(self)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class IsItsIterator(IterableDataset):
    """Is its own iterator, which each `iter()` begins anew."""

    def __init__(self):
        self.order, self.position = [], 0

    def __iter__(self):
        Reading.__init__(self)
        return self

    __next__, state_dict, load_state_dict = Reading.__next__, Reading.state_dict, Reading.load_state_dict


STREAMS = [
    Fixed,
    Shuffled,
    HoldsGenerator,
    TellsPosition,
    TakesOverLate,
    CountsEpochs,
    IteratorTells,
    BothTell,
    IsItsIterator,
]


class Staged(Dataset):
    """A map-style dataset with a stage, which the program or a state sets."""

    def __init__(self):
        self.stage = 0

    def __len__(self):
        return LENGTH

    def __getitem__(self, place):
        return sample(place, self.stage / 10)

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state):
        self.stage = state["stage"]


class Counts(Staged):
    """Counts its samples, which depend on that."""

    def __getitem__(self, place):
        self.stage += 1
        return super().__getitem__(place)


class Noisy(Dataset):
    """A map-style dataset whose samples draw from the global generators, and from one of its own."""

    def __init__(self):
        self.generator = random.Random(5)

    def __len__(self):
        return LENGTH

    def __getitem__(self, place):
        return sample(place, (torch.rand(()).item() + self.generator.random()) / 2)


class Turning(Sampler):
    """Has another order in each epoch, by a count that is its state."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(LENGTH).tolist())

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class Holding(Sampler):
    """Draws from a generator of its own."""

    def __init__(self):
        self.generator = np.random.default_rng(2)

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(self.generator.permutation(LENGTH).tolist())


class Global(Sampler):
    """Draws from the global generators."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())
