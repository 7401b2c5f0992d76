"""Streams and datasets with states that those of stateful.py do not have, to be read through rayloader's wrappers."""

from torch.utils.data import Dataset, IterableDataset

import stateful
from rayloader import get_shard_info


def places():
    """The numbers of this reader's part."""
    shard = get_shard_info()
    return range(shard.index, 20, shard.count)


class Told(IterableDataset):
    """Its part is another one in each epoch of which it is told, and it has no state."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([[place, self.epoch] for place in places()])


class CountsSamples(stateful.StatefulIterator):
    """An iterator with a state that counts the samples of its dataset, too."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def __next__(self):
        drawn = super().__next__()
        self.dataset.position += 1
        return [self.dataset.position, *drawn]


class BothTell(stateful.Positioned, IterableDataset):
    """Has a state, and an iterator with another one."""

    def __iter__(self):
        return CountsSamples(self)


STREAMS = [
    *(stateful.Shuffled, stateful.StatefulStream, stateful.LateStream, stateful.StreamOfStatefulIterators),
    *(stateful.OwnIterator, BothTell, Told),
]


class Salted(stateful.Positioned, Dataset):
    """A map-style dataset with a salt, which the program or a state sets."""

    def __len__(self):
        return stateful.LENGTH

    def __getitem__(self, place):
        return [place, self.salt]
