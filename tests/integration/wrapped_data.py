"""Streams and datasets of every kind of state, to be read as they are and through rayloader's wrappers of them.

A sample is a list of numbers. What a stream gives is drawn from the global generators, or from one that it holds, so
that a resumption that forgets a generator shows.
"""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from rayloader import get_shard_info

LENGTH = 11


def places():
    """The samples of this reader's part."""
    shard = get_shard_info()
    return list(range(shard.index, LENGTH, shard.count))


def shuffled():
    """The same in a random order."""
    return [places()[number] for number in torch.randperm(len(places())).tolist()]


def sample(place, drawn):
    return [100 * place + int(drawn * 90) + number for number in range(1 + place % 4)]


class Tells:
    """Has a state of these attributes."""

    told = ()

    def state_dict(self):
        return {name: getattr(self, name) for name in self.told}

    def load_state_dict(self, state):
        vars(self).update(state)


class Fixed(IterableDataset):
    """Depends on nothing."""

    def __iter__(self):
        return iter([sample(place, 0.5) for place in places()])


class Shuffled(IterableDataset):
    """Draws its order when it begins, and each sample, from the global generators."""

    def __iter__(self):
        for place in shuffled():
            yield sample(place, (random.random() + np.random.rand()) / 2)


class HoldsGenerator(IterableDataset):
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __iter__(self):
        for place in self.generator.permutation(places()).tolist():
            yield sample(place, self.generator.random())


class TellsPosition(Tells, IterableDataset):
    """Has a position, which goes back to the start when a reading ends."""

    position, told = 0, ("position",)

    def __iter__(self):
        for place in places()[self.position :]:
            self.position += 1
            yield sample(place, torch.rand(()).item())
        self.position = 0


class TakesOverLate(TellsPosition):
    """Takes a loaded position over with the first sample, and reports the one where the last reading has ended."""

    loaded = 0

    def __iter__(self):
        self.position, self.loaded = self.loaded, 0
        for place in places()[self.position :]:
            self.position += 1
            yield sample(place, random.random())

    def load_state_dict(self, state):
        self.loaded = state["position"]


class CountsEpochs(Tells, IterableDataset):
    """Has another order in each epoch, by a count that is a part of its state."""

    epoch, position, told = 0, 0, ("epoch", "position")

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(places()).tolist()
        while self.position < len(order):
            self.position += 1
            yield sample(order[self.position - 1], np.random.rand())
        self.epoch, self.position = self.epoch + 1, 0


class Reading(Tells):
    """An iterator that tells its order and its place in it, and counts the samples of a dataset, which depend on that.

    Args:
        counts: the dataset, if there is one.
    """

    told = ("order", "position")

    def __init__(self, counts=None):
        self.counts = counts
        self.order, self.position = shuffled(), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == len(self.order):
            raise StopIteration
        self.position += 1
        drawn = sample(self.order[self.position - 1], torch.rand(()).item())
        if self.counts is None:
            return drawn
        self.counts.count += 1
        return [self.counts.count, *drawn]


class IteratorTells(IterableDataset):
    """Has a state in its iterator alone."""

    def __iter__(self):
        return Reading()


class BothTell(Tells, IterableDataset):
    """Has a state, and an iterator with another one."""

    count, told = 0, ("count",)

    def __iter__(self):
        return Reading(self)


class IsItsIterator(Reading, IterableDataset):
    """Is its own iterator, which each `iter()` begins anew."""

    def __init__(self):
        self.counts, self.order, self.position = None, [], 0

    def __iter__(self):
        self.order, self.position = shuffled(), 0
        return self


class Told(IterableDataset):
    """Its part is another one in each epoch of which it is told, and it has no state."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([sample(place, self.epoch / 10) for place in places()])


STREAMS = [
    *(Fixed, Shuffled, HoldsGenerator, TellsPosition, TakesOverLate, CountsEpochs),
    *(IteratorTells, BothTell, IsItsIterator, Told),
]


class Staged(Tells, Dataset):
    """A map-style dataset with a stage, which the program or a state sets."""

    stage, told = 0, ("stage",)

    def __len__(self):
        return LENGTH

    def __getitem__(self, place):
        return sample(place, self.stage / 10)


class Counts(Staged):
    """Counts its samples, which depend on that, and on generators: the global one, and one of its own."""

    def __init__(self):
        self.generator = random.Random(5)

    def __getitem__(self, place):
        self.stage += 1
        return [int(torch.rand(()).item() * 90), self.generator.randrange(90), *super().__getitem__(place)]
