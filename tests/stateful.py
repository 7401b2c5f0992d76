"""Datasets and samplers that have a state of their own, in every place where one may be; nothing here knows rayloader.

`salt` is known to nobody but an object's `state_dict`: the object that goes on has another one, so that the same
batches come only if its state was loaded. No global here ever changes: whatever is random comes from the generators
that a worker is seeded with, or from an object's own.
"""

import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

LENGTH = 22  # samples, in batches of three: eight, the last of one


class PlannedError(Exception):
    """Raised by a dataset."""


def noise():
    """Numbers from all global generators; of Gaussians each of them keeps a second one in store."""
    numpys = np.random.rand(), np.random.standard_normal()
    return [random.random(), random.gauss(0, 1), *numpys, torch.rand(()), torch.randn(())]


def own_id():
    """Of the worker; without workers this process is another one."""
    info = get_worker_info()
    return 2 if info is None else info.id


def stream_length():
    """Unequal ones: batches of three end short in each worker, at another time."""
    return 4 + 5 * own_id()


class Sized(Dataset):
    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length


class Indices(Sized):
    def __getitem__(self, index):
        return index


class Noise(Sized):
    def __getitem__(self, index):
        return [index, *noise()]


class Augmented(Noise):
    """Tells what its worker is, too."""

    def __getitem__(self, index):
        info = get_worker_info()
        return [*super().__getitem__(index), *((info.id, info.num_workers, info.seed) if info else ())]


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
            raise PlannedError
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
            yield [own_id(), samples[index], *noise(), self.generator.random()]


class Buffered(IterableDataset):
    """Shuffles in a buffer, by a generator that only its iterator knows."""

    def __iter__(self):
        generator = random.Random(torch.initial_seed())
        buffer = [0, 1, 2]
        for index in range(3, stream_length() + 3):
            slot = generator.randrange(3)
            yield [own_id(), buffer[slot], generator.random()]
            buffer[slot] = index


class Positioned:
    """Tells its salt and its position, of which the first is 0."""

    def __init__(self, salt=0):
        self.salt, self.position = salt, 0

    def state_dict(self):
        return {"salt": self.salt, "position": self.position}

    def load_state_dict(self, state):
        self.salt, self.position = state["salt"], state["position"]


class StatefulStream(Positioned, IterableDataset):
    """Goes on where its state says."""

    def __iter__(self):
        while self.position < stream_length():
            self.position += 1
            yield [own_id(), self.position, self.salt, *noise()]
        self.position = 0


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
            yield [own_id(), self.position, self.salt, *noise()]
        if not self.keeps:
            self.position = 0

    def load_state_dict(self, state):
        self.salt, self.loaded = state["salt"], state["position"]


class StatefulIterator(Positioned):
    """Of `StreamOfStatefulIterators`."""

    faulty = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == stream_length():
            raise StopIteration
        self.position += 1
        if self.faulty and self.position in (2, 4, 5, 6, 11):
            raise PlannedError
        return [own_id(), self.position, self.salt, *noise()]


class OwnIterator(StatefulIterator, IterableDataset):
    """Its own iterator, which starts again at each `__iter__`: what was loaded counts after it."""

    def __iter__(self):
        self.position = 0
        return self


class StreamOfStatefulIterators(IterableDataset):
    """Its iterators have a state; some of their samples raise, if told so."""

    def __init__(self, salt=0, faulty=False):
        self.salt, self.faulty = salt, faulty

    def __iter__(self):
        iterator = StatefulIterator(self.salt)
        iterator.faulty = self.faulty
        return iterator


class AsksHowMany:
    """Like MosaicML's streaming dataset: its `state_dict` is told what the loader has given; so it counts as none."""

    def state_dict(self, num_samples, from_beginning):
        return {"count": num_samples}

    def load_state_dict(self, state):
        raise AssertionError("nothing was saved")


class StreamThatAsks(AsksHowMany, Shuffled):
    pass


class MapThatAsks(AsksHowMany, Noise):
    pass


class SamplerThatAsks(AsksHowMany, RandomSampler):
    pass


class BatchSamplerThatAsks(AsksHowMany, BatchSampler):
    pass


class Reseeds(Sized):
    """Seeds the global generators itself, in the midst of an epoch."""

    def __getitem__(self, index):
        if index in (4, 7):
            random.seed(index), np.random.seed(index), torch.manual_seed(index)
        return [index, *noise()]


class CountsEpochs(IterableDataset):
    """Its order depends on how often its object was iterated over, which nobody can see."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        samples = list(range(stream_length()))
        random.Random(self.epoch).shuffle(samples)
        self.epoch += 1
        yield from ([sample] for sample in samples)


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
        return 7  # 1 + 2 + ... + 6 samples, and one more

    def __iter__(self):
        if self.position == 0:
            self.chance.shuffle(self.order)
        while self.position < LENGTH:
            begin = self.position
            size = int((2 * begin + 1) ** 0.5 + 0.5)
            self.position = min(begin + size, LENGTH)
            yield self.order[begin : self.position]
        self.position = 0


class IndexIterator(Positioned):
    """Of `SamplerOfStatefulIterators`."""

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == LENGTH:
            raise StopIteration
        self.position += 1
        return (self.position * 5 + self.salt) % LENGTH


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
