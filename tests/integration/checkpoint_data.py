"""What the checkpoint tests load, an undisturbed run of it with all its states, and what comes after a state.

Datasets and samplers keep state in every place where they may. `salt` is known to nobody but an object's `state_dict`:
the object that goes on has another one, so that the same batches come only if its state was loaded.
"""

import io
import itertools
import os
import random
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

from rayloader import DataLoader

WORKERS = 3
LENGTH = 22  # samples, in batches of three: eight, the last of one
EPOCHS = 3


def noise():
    """Numbers from all global generators; of Gaussians each of them keeps a second one in store."""
    numpys = np.random.rand(), np.random.standard_normal()
    return [random.random(), random.gauss(0, 1), *numpys, torch.rand(()), torch.randn(())]


def own_id():
    """Of the worker; without workers this process is another one."""
    info = get_worker_info()
    return 2 if info is None else info.id


def stream_length(worker_id):
    """Unequal ones: batches of three end short in each worker, at another time."""
    return 4 + 5 * worker_id


class PlannedError(Exception):
    """Raised by a dataset."""


class Sized(Dataset):
    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length


class Indices(Sized):
    def __getitem__(self, index):
        return index


of_the_module = random.Random(5)


class OfTheModule(Sized):
    """Draws from a generator of its module, which all workers of a process share."""

    def __getitem__(self, index):
        return index, of_the_module.random()


class Augmented(Sized):
    def __getitem__(self, index):
        info = get_worker_info()
        return [index, *noise(), *((info.id, info.num_workers, info.seed) if info else ())]


class Noise(Sized):
    """Like `Augmented`, of whatever number of workers."""

    def __getitem__(self, index):
        return [index, *noise()]


def without_worker_info(case):
    """The arguments of a case whose samples are of `Noise`."""
    return {**case(), "dataset": Noise()}


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
        worker_id = own_id()
        samples = list(range(stream_length(worker_id)))
        random.shuffle(samples)
        self.generator.shuffle(samples)
        for index in torch.randperm(len(samples)).tolist():
            yield [worker_id, samples[index], *noise(), self.generator.random()]


class Buffered(IterableDataset):
    """Shuffles in a buffer, by a generator that only its iterator knows."""

    def __iter__(self):
        generator = random.Random(torch.initial_seed())
        worker_id = own_id()
        buffer = [0, 1, 2]
        for index in range(3, stream_length(worker_id) + 3):
            slot = generator.randrange(3)
            yield [worker_id, buffer[slot], generator.random()]
            buffer[slot] = index


class StatefulStream(IterableDataset):
    """Goes on where its state says."""

    def __init__(self, salt=0):
        self.salt = salt
        self.position = 0

    def __iter__(self):
        worker_id = own_id()
        while self.position < stream_length(worker_id):
            self.position += 1
            yield [worker_id, self.position, self.salt, *noise()]
        self.position = 0

    def state_dict(self):
        return {"salt": self.salt, "position": self.position}

    def load_state_dict(self, state):
        self.salt, self.position = state["salt"], state["position"]


class LateStream(StatefulStream):
    """A generator: it takes over what was loaded when it is asked for its first sample, and restarts otherwise.

    Args:
        keeps: after its end it still tells where that was.
    """

    def __init__(self, salt=0, keeps=False):
        super().__init__(salt)
        self.keeps, self.loaded = keeps, None

    def __iter__(self):
        self.position, self.loaded = self.loaded or 0, None
        while self.position < stream_length(own_id()):
            self.position += 1
            yield [own_id(), self.position, self.salt, *noise()]
        if not self.keeps:
            self.position = 0

    def load_state_dict(self, state):
        self.salt, self.loaded = state["salt"], state["position"]


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


class StatefulIterator:
    """Some samples raise, if told so."""

    def __init__(self, salt, faulty):
        self.salt, self.faulty = salt, faulty
        self.worker_id = own_id()
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == stream_length(self.worker_id):
            raise StopIteration
        self.position += 1
        if self.faulty and self.position in (2, 4, 5, 6, 11):
            raise PlannedError
        return [self.worker_id, self.position, self.salt, *noise()]

    def state_dict(self):
        return {"salt": self.salt, "position": self.position}

    def load_state_dict(self, state):
        self.salt, self.position = state["salt"], state["position"]


class AsksHowMany:
    """Like MosaicML's streaming dataset: its `state_dict` is told what the loader has given."""

    def state_dict(self, num_samples, from_beginning):
        return {"count": num_samples}

    def load_state_dict(self, state):
        raise AssertionError("nothing was saved")


class StreamThatAsks(AsksHowMany, Shuffled):
    pass


class ThatAsks(AsksHowMany, Augmented):
    pass


class SamplerThatAsks(AsksHowMany, RandomSampler):
    pass


class BatchSamplerThatAsks(AsksHowMany, BatchSampler):
    pass


class StreamOfStatefulIterators(IterableDataset):
    def __init__(self, salt=0, faulty=False):
        self.salt, self.faulty = salt, faulty

    def __iter__(self):
        return StatefulIterator(self.salt, self.faulty)


class Entropy(IterableDataset):
    """Comes out of nowhere."""

    def __iter__(self):
        for _ in range(stream_length(own_id())):
            yield list(os.urandom(8))


class Unseeded(IterableDataset):
    def __iter__(self):
        generator = np.random.default_rng()
        for _ in range(stream_length(own_id())):
            yield [generator.random()]


class CountsEpochs(IterableDataset):
    """Its order depends on how often its object was iterated over, which nobody can see."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        samples = list(range(stream_length(own_id())))
        random.Random(self.epoch).shuffle(samples)
        self.epoch += 1
        yield from ([sample] for sample in samples)


class StatefulSampler(Sampler):
    """Shuffles anew in each pass."""

    def __init__(self, seed):
        self.generator = random.Random(seed)
        self.order = list(range(LENGTH))
        self.position = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        if self.position == 0:
            self.generator.shuffle(self.order)
        while self.position < LENGTH:
            self.position += 1
            yield self.order[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"generator": self.generator.getstate(), "order": list(self.order), "position": self.position}

    def load_state_dict(self, state):
        self.generator.setstate(state["generator"])
        self.order, self.position = list(state["order"]), state["position"]


class StatefulBatchSampler(StatefulSampler):
    """Batches of one, two, three samples and so on."""

    def __len__(self):
        return 7  # 1 + 2 + ... + 6 samples, and one more

    def __iter__(self):
        if self.position == 0:
            self.generator.shuffle(self.order)
        while self.position < LENGTH:
            begin = self.position
            size = int((2 * begin + 1) ** 0.5 + 0.5)
            self.position = min(begin + size, LENGTH)
            yield self.order[begin : self.position]
        self.position = 0


class IndexIterator:
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
    def __init__(self, salt=0):
        self.salt = salt

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return IndexIterator(self.salt)


class GrowingBatches(Sampler):
    """Batches of one, two, three samples and so on; no state."""

    def __len__(self):
        return 6

    def __iter__(self):
        indices = iter(range(21))
        for size in range(1, 7):
            yield list(itertools.islice(indices, size))


class UnseededSampler(Sampler):
    """Another order each time, from a generator that nobody can see."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(np.random.default_rng().permutation(LENGTH).tolist())


class TensorBatches(Sampler):
    """Gives its batches as tensors, views of one permutation; of another seed another one."""

    def __init__(self, seed, kind=torch.Tensor):
        self.seeds = [seed]  # in a list: only the indices show that it is another
        self.kind = kind

    def __len__(self):
        return 7

    def __iter__(self):
        order = torch.randperm(LENGTH - 1, generator=torch.Generator().manual_seed(*self.seeds))
        return iter((order.numpy() if self.kind is np.ndarray else order).reshape(7, 3))


# ---- runs

EVERY = pytest.param(slice(None), id="every", marks=pytest.mark.full)


def some(first, step):
    """Every point of a run in a full run of the tests, otherwise a sample."""
    return pytest.mark.parametrize("which", [pytest.param(slice(first, None, step), id="some"), EVERY])


def make(arguments, num_workers=WORKERS, kind=DataLoader, seed=1, **options):
    """A loader, of batches of three unless said otherwise, and the driver's generator seeded.

    Args:
        arguments: makes the loader's arguments, all objects anew.
        num_workers: of the loader.
        kind: its class.
        seed: of the driver's global generator.
        options: further arguments.
    """
    torch.manual_seed(seed)
    given = {**arguments(), **options}
    batch_size = {} if "batch_sampler" in given else {"batch_size": 3}
    return kind(**{**batch_size, "num_workers": num_workers, **given})


class Hosted(DataLoader):
    """A loader that has `processes` as its number of workers only where it goes on in the midst of an epoch."""

    processes = WORKERS

    def _get_iterator(self):
        place, own = self._state and self._state.position, self.num_workers
        if place is not None and not place.finished:
            self.num_workers = self.processes
        iterator = super()._get_iterator()
        self.num_workers = own
        return iterator


def hosted(arguments, processes, of=WORKERS, **options):
    """A loader that goes on with `of` workers, and has `processes` as its number; seeded otherwise than a run."""
    loader = make(arguments, of, Hosted, **{"seed": 2, **options})
    loader.processes = processes
    return loader


def save(loader):
    """The loader's state as a file holds it."""
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    return file.getvalue()


def read(saved):
    """The state in a file."""
    return torch.load(io.BytesIO(saved), weights_only=True)


def plain(obj):
    """A batch, or a state, in plain numbers: what can be compared."""
    if isinstance(obj, dict):
        return {key: plain(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [plain(part) for part in obj]
    return obj.tolist() if isinstance(obj, (torch.Tensor, np.ndarray)) else obj


def batches(iterator):
    """The batches that come, plain, with "error" for what the dataset raises."""
    iterator = iter(iterator)
    while True:
        try:
            yield plain(next(iterator))
        except StopIteration:
            return
        except PlannedError:
            yield "error"


def endless(loader):
    """Epoch after epoch."""
    while True:
        yield from batches(loader)


class Point(NamedTuple):
    """A state that was saved, and where the run was: next comes batch `taken` of `epoch`."""

    saved: bytes
    epoch: int
    taken: int


def run(loader, which=slice(None)):
    """The batches of all epochs, and points where the state was saved: before, in, and after each epoch.

    Args:
        loader: is at the start of its first epoch.
        which: of the points that there are; at the others nothing is saved, for that takes most of the time.
    """
    epochs, points, passed, chosen = [], [], itertools.count(), range(sys.maxsize)[which]

    def pass_by(epoch, taken):
        if epoch < EPOCHS - 1 and next(passed) in chosen:
            points.append(Point(save(loader), epoch, taken))

    pass_by(0, 0)
    for epoch in range(EPOCHS):
        iterator = iter(loader)
        epochs.append([])
        pass_by(epoch, 0)
        for batch in batches(iterator):
            epochs[-1].append(batch)
            pass_by(epoch, len(epochs[-1]))
        pass_by(epoch + 1, 0)
    return epochs, points


def resumed(loader, saved):
    """What a loader gives from a state on: the rest of that epoch and the next."""
    loader.load_state_dict(read(saved))
    return [list(batches(loader)) for _ in range(2)]


def check(epochs, point, loader):
    """From this point on a loader gives what the run gave.

    Persistent workers only go on in the next epoch if they have had processes of their own.
    """
    rest, following = resumed(loader, point.saved)
    where = f"after {point.taken} batches of epoch {point.epoch}"
    assert rest == epochs[point.epoch][point.taken :], where
    if not loader.persistent_workers or getattr(loader, "processes", loader.num_workers) == loader.num_workers:
        assert following == epochs[point.epoch + 1], where
