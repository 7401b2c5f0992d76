"""Datasets and samplers of the conformance cases that have a state of their own, in every place where one may be.

`salt` is known to nobody but an object's `state_dict`: the object that goes on has another one, so that the same
batches come only if its state was loaded. The promises of conformance_datasets.py hold here too.
"""

import random

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler

from conformance_datasets import LENGTH, Sized, fail
from conformance_iterables import worker_and_count


def noise():
    """Numbers from all global generators; of Gaussians each of them keeps a second one in store."""
    numpys = np.random.rand(), np.random.standard_normal()
    return [random.random(), random.gauss(0, 1), *numpys, torch.rand(()), torch.randn(())]


def stream_length():
    """Unequal ones: batches of three end short in each worker, at another time."""
    return 4 + 5 * worker_and_count()[0]


class OwnGenerators(Sized):
    """Draws from generators of its own, of every kind."""

    def __init__(self):
        super().__init__()
        self.python = random.Random(1)
        self.others = {"numpy": [np.random.default_rng(2), np.random.RandomState(3)]}
        self.torch = torch.Generator().manual_seed(4)

    def __getitem__(self, index):
        numpys = [generator.normal() for generator in self.others["numpy"]]
        return [index, self.python.gauss(0, 1), *numpys, torch.randn((), generator=self.torch)]


class Counting(Sized):
    """Counts its calls, and holds a generator where nobody finds it."""

    def __init__(self, salt=0):
        super().__init__()
        self.salt = salt
        self.calls = 0
        self.draw = np.random.RandomState(5).normal

    def __getitem__(self, index):
        self.calls += 1
        return [index, self.calls, self.salt, self.draw(), *noise()]

    def state_dict(self):
        return {"salt": torch.tensor(self.salt), "calls": self.calls, "generator": self.draw.__self__.get_state()}

    def load_state_dict(self, state):
        self.salt, self.calls = state["salt"].item(), state["calls"]
        self.draw.__self__.set_state(state["generator"])


class LateMap(Counting):
    """Takes over what was loaded when it is asked for its first sample."""

    loaded = None

    def __getitem__(self, index):
        if self.loaded is not None:
            super().load_state_dict(self.loaded)
            self.loaded = None
        return super().__getitem__(index)

    def load_state_dict(self, state):
        self.loaded = state


class Faulty(Sized):
    """Some samples raise, among them all of a batch."""

    def __getitem__(self, index):
        drawn = noise()
        if index in (1, 6, 7, 8, 13):
            fail("value")
        return [index, *drawn]


class Shuffled(IterableDataset):
    """Shuffles in `__iter__`, by global generators and by one of its own; no state_dict."""

    def __init__(self):
        self.generator = random.Random(6)

    def __iter__(self):
        samples = list(range(stream_length()))
        random.shuffle(samples)
        self.generator.shuffle(samples)
        for index in torch.randperm(len(samples)).tolist():
            yield [worker_and_count()[0], samples[index], *noise(), self.generator.random()]


class Buffered(IterableDataset):
    """Shuffles in a buffer, by a generator that only its iterator knows."""

    def __iter__(self):
        generator = random.Random(torch.initial_seed())
        buffer = [0, 1, 2]
        for index in range(3, stream_length() + 3):
            slot = generator.randrange(3)
            yield [worker_and_count()[0], buffer[slot], generator.random()]
            buffer[slot] = index


class StatefulStream(IterableDataset):
    """Goes on where its state says."""

    def __init__(self, salt=0):
        self.salt = salt
        self.position = 0

    def __iter__(self):
        while self.position < stream_length():
            self.position += 1
            yield [worker_and_count()[0], self.position, self.salt, *noise()]
        self.position = 0

    def state_dict(self):
        return {"salt": self.salt, "position": self.position}

    def load_state_dict(self, state):
        self.salt, self.position = state["salt"], state["position"]


class LateStream(StatefulStream):
    """A generator: it takes over what was loaded when it is asked for its first sample, and restarts otherwise.

    Args:
        salt: see above.
        keeps: after its end it still tells where that was.
    """

    def __init__(self, salt=0, keeps=False):
        super().__init__(salt)
        self.keeps, self.loaded = keeps, None

    def __iter__(self):
        self.position, self.loaded = self.loaded or 0, None
        while self.position < stream_length():
            self.position += 1
            yield [worker_and_count()[0], self.position, self.salt, *noise()]
        if not self.keeps:
            self.position = 0

    def load_state_dict(self, state):
        self.salt, self.loaded = state["salt"], state["position"]


class StatefulIterator:
    """Of `StreamOfIterators`."""

    def __init__(self, salt, faulty):
        self.salt, self.faulty = salt, faulty
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == stream_length():
            raise StopIteration
        self.position += 1
        if self.faulty and self.position in (2, 4, 5, 6, 11):
            fail("value")
        return [worker_and_count()[0], self.position, self.salt, *noise()]

    def state_dict(self):
        return {"salt": self.salt, "position": self.position}

    def load_state_dict(self, state):
        self.salt, self.position = state["salt"], state["position"]


class StreamOfIterators(IterableDataset):
    """Its iterators have a state; some of their samples raise, if told so."""

    def __init__(self, salt=0, faulty=False):
        self.salt, self.faulty = salt, faulty

    def __iter__(self):
        return StatefulIterator(self.salt, self.faulty)


class StatefulSampler(Sampler):
    """Shuffles anew in each pass."""

    def __init__(self, salt=0):
        self.chance = random.Random(salt)
        self.order = list(range(LENGTH))
        self.position = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        if self.position == 0:
            self.chance.shuffle(self.order)
        while self.position < LENGTH:
            self.position += 1
            yield self.order[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"generator": self.chance.getstate(), "order": list(self.order), "position": self.position}

    def load_state_dict(self, state):
        self.chance.setstate(state["generator"])
        self.order, self.position = list(state["order"]), state["position"]


class StatefulBatchSampler(StatefulSampler):
    """Batches of one, two, three samples and so on."""

    def __len__(self):
        return 6  # 1 + 2 + ... + 5 samples, and two more

    def __iter__(self):
        if self.position == 0:
            self.chance.shuffle(self.order)
        while self.position < LENGTH:
            begin = self.position
            size = int((2 * begin + 1) ** 0.5 + 0.5)
            self.position = min(begin + size, LENGTH)
            yield self.order[begin : self.position]
        self.position = 0


class IndexIterator:
    """Of `SamplerOfStatefulIterators`."""

    def __init__(self, salt):
        self.salt = salt
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == LENGTH:
            raise StopIteration
        self.position += 1
        return (self.position * 5 + self.salt) % LENGTH

    def state_dict(self):
        return {"salt": self.salt, "position": self.position}

    def load_state_dict(self, state):
        self.salt, self.position = state["salt"], state["position"]


class SamplerOfStatefulIterators(Sampler):
    """Its iterators have a state."""

    def __init__(self, salt=0):
        self.salt = salt

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return IndexIterator(self.salt)


class Counts(Sampler):
    """Counts its epochs, as many a sampler does, and shuffles by that."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(LENGTH), LENGTH))


class Lazy(Sampler):
    """Draws each index from the global generators when it is asked."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        for _ in range(LENGTH):
            drawn = random.random(), np.random.rand(), torch.rand(1).item()
            yield int(sum(drawn) * 1000) % LENGTH
