"""What the tests of restored workers load: datasets with random generators in every place where users keep them."""

import functools
import random
import string
import threading

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, get_worker_info

LENGTH = 96
IN_MODULE = None  # a generator, once worker_init_fn has run


class Transform:
    """Holds one generator of each kind."""

    def __init__(self, seed):
        self.python = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def __call__(self, sample):
        drawn = self.python.random(), self.numpy.random(), self.legacy.randn(), torch.rand(1, generator=self.torch)
        return [sample, *map(float, drawn)]


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Sized(Dataset):
    def __len__(self):
        return LENGTH


class ManyPaths(Sized):
    """The transform comes after what a search with a limit would look at first."""

    def __init__(self):
        self.paths = [f"/data/{number}.jpg" for number in range(2_000)]
        self.transform = Transform(1)

    def __getitem__(self, index):
        return self.transform(index)


class Transformed(Sized):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(index)


class Indices(Sized):
    def __getitem__(self, index):
        return index


class Collate:
    def __init__(self):
        self.transform = Transform(3)

    def __call__(self, samples):
        return self.transform(samples)


class Initialize:
    """Its own generator is drawn from by the dataset, which it hands it to."""

    def __init__(self):
        self.transform = Transform(4)

    def __call__(self, worker_id):
        get_worker_info().dataset.transform = self.transform


class Slotted:
    """Holds a generator in a slot, and draws from one of its class."""

    __slots__ = ("generator",)
    of_class = random.Random(11)

    def __call__(self, sample):
        return [sample, self.generator.random(), self.of_class.random(), OF_MODULE.random(), helper()]


OF_MODULE = np.random.default_rng(12)
IN_HELPER = np.random.RandomState(13)


def helper():
    return IN_HELPER.rand()


def slotted():
    one = Slotted()
    one.generator = random.Random(10)
    return one


class Augmented(Sized):
    """Crops and flips an image of which each pixel is told from the others."""

    def __init__(self, seed):
        import albumentations  # here: it takes a second

        transforms = [albumentations.RandomCrop(2, 2), albumentations.HorizontalFlip(p=0.5)]
        self.transform = albumentations.Compose(transforms, seed=seed)
        self.image = np.arange(16 * 16 * 3, dtype=np.float32).reshape(16, 16, 3)

    def __getitem__(self, index):
        return [index, self.transform(image=self.image)["image"]]


def closure():
    generator = np.random.default_rng(5)
    return lambda sample: [sample, generator.random()]


def partial(sample, generator):
    return [sample, generator.random()]


def set_global(worker_id):
    global IN_MODULE
    IN_MODULE = Transform(get_worker_info().seed % 2**32)


def use_global(sample):
    return IN_MODULE(sample)


class Late(Sized):
    """Makes its generator when it is first needed."""

    def __init__(self):
        self.generator = None

    def __getitem__(self, index):
        if index < 21:
            return [index, 0.0]
        if self.generator is None:
            self.generator = np.random.default_rng(6)
        return [index, self.generator.random()]


class ImportsLate(Sized):
    """Draws from a generator in a module that its first sample imports."""

    def __getitem__(self, index):
        import restoring_lazily

        return [index, restoring_lazily.RNG.random()]


class AnewForEach(Sized):
    """The generator of a sample depends on nothing but the sample."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        self.generator = np.random.default_rng(index)
        self.transform = Transform(index)
        return [index, self.generator.random(), *self.transform(index)]


class SystemRandom(Sized):
    """Draws from the system's, and shows it if told so."""

    def __init__(self, *, shows):
        self.generator = random.SystemRandom()
        self.shows = shows

    def __getitem__(self, index):
        drawn = self.generator.random()
        return [index, drawn if self.shows else 0.0]


class OfAPackage(Sized):
    """Draws from a generator in a module that the program has not written."""

    def __getitem__(self, index):
        if not hasattr(string, "generator"):
            string.generator = random.Random(9)
        return [index, string.generator.random()]


def concatenated():
    transform = Compose([Compose([Transform(2)])])
    parts = [
        Subset(Transformed(transform), range(begin, begin + LENGTH // 4)) for begin in range(0, LENGTH, LENGTH // 4)
    ]
    return Subset(ConcatDataset(parts), range(LENGTH))


CASES = {
    "many paths": lambda: {"dataset": ManyPaths()},
    "subset of concatenation": lambda: {"dataset": concatenated()},
    "collate_fn": lambda: {"dataset": Indices(), "collate_fn": Collate()},
    "worker_init_fn": lambda: {"dataset": Transformed(None), "worker_init_fn": Initialize()},
    "closure": lambda: {"dataset": Transformed(closure())},
    "partial": lambda: {"dataset": Transformed(functools.partial(partial, generator=random.Random(8)))},
    "global of a module": lambda: {"dataset": Transformed(use_global), "worker_init_fn": set_global},
    "slot, class and what code names": lambda: {"dataset": Transformed(slotted()), "workers": "fork"},
    "made anew": lambda: {"dataset": AnewForEach()},
    "system's, unseen": lambda: {"dataset": SystemRandom(shows=False), "workers": "fork"},
}


# ---- streams


class OwnIterator(IterableDataset):
    """Its own iterator, which starts again at each `__iter__`."""

    def __init__(self, fails=False):
        self.fails = fails
        self.position = 0

    def __iter__(self):
        self.position = 0
        return self

    def __next__(self):
        if self.position == 40:
            raise StopIteration
        self.position += 1
        return [get_worker_info().id, self.position]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        if self.fails:
            raise ValueError("as planned")
        self.position = state["position"]


class Untellable(Sized):
    """Its state can't be pickled, or `state_dict` raises."""

    def __init__(self, raises=False):
        self.raises = raises

    def __getitem__(self, index):
        return index

    def state_dict(self):
        if self.raises:
            raise OSError("as planned")
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        pass


def lists(batch):
    """As plain lists."""
    if isinstance(batch, (list, tuple)):
        return [lists(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch
