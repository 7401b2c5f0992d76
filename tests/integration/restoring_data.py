"""What the tests of restored workers load: random generators in every place where users keep them, and streams."""

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
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.transform(index)


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

    def __init__(self):
        self.generator = random.Random(10)

    def __call__(self, sample):
        return [sample, self.generator.random(), self.of_class.random(), OF_MODULE.random(), helper()]


OF_MODULE = np.random.default_rng(12)
IN_HELPER = np.random.RandomState(13)


def helper():
    return IN_HELPER.rand()


class Augmented(Transformed):
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


class Late:
    """Makes its generator when it is first needed."""

    generator = None

    def __call__(self, index):
        if index < 21:
            return [index, 0.0]
        if self.generator is None:
            self.generator = np.random.default_rng(6)
        return [index, self.generator.random()]


class AnewForEach:
    """The generator of a sample depends on nothing but the sample."""

    def __call__(self, index):
        self.generator = np.random.default_rng(index)
        self.transform = Transform(index)
        return [index, self.generator.random(), *self.transform(index)]


class SystemRandom:
    """Draws from the system's, and shows it if told so."""

    def __init__(self, *, shows):
        self.generator = random.SystemRandom()
        self.shows = shows

    def __call__(self, index):
        drawn = self.generator.random()
        return [index, drawn if self.shows else 0.0]


def of_a_package(index):
    """Draws from a generator in a module that the program has not written."""
    if not hasattr(string, "generator"):
        string.generator = random.Random(9)
    return [index, string.generator.random()]


def everywhere():
    """Held deep in the dataset, by what is called there, and by the collate_fn."""
    transform = Compose(Compose(Transform(2)), closure(), functools.partial(partial, generator=random.Random(8)))
    quarters = [range(begin, begin + LENGTH // 4) for begin in range(0, LENGTH, LENGTH // 4)]
    parts = [Subset(Transformed(transform), quarter) for quarter in quarters]
    return {"dataset": Subset(ConcatDataset(parts), range(LENGTH)), "collate_fn": Transform(3)}


GENERATORS = {
    "everywhere": everywhere,
    "worker_init_fn": lambda: {"dataset": Transformed(None), "worker_init_fn": Initialize()},
    "global of a module": lambda: {"dataset": Transformed(use_global), "worker_init_fn": set_global},
    "slot, class and what code names": lambda: {"dataset": Transformed(Slotted())},
    "made anew": lambda: {"dataset": Transformed(AnewForEach())},
    "system's, unseen": lambda: {"dataset": Transformed(SystemRandom(shows=False))},
}


# ---- datasets that tell their state


class Numbers(IterableDataset):
    """Goes on where its state says."""

    def __init__(self):
        self.at, self.resumed = 0, False

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.resumed = state["at"], True

    def __iter__(self):
        while self.at < 80:
            self.at += 1
            yield self.at


class FailsToLoad(Numbers):
    def load_state_dict(self, state):
        raise ValueError("as planned")


class FailsToGoOn(Numbers):
    """The stream that was resumed raises, or ends at once, though `load_state_dict` did not raise."""

    def __init__(self, raises):
        super().__init__()
        self.raises = raises

    def __iter__(self):
        if self.resumed and self.raises:
            raise FileNotFoundError("as planned")
        if not self.resumed:
            yield from super().__iter__()


class ForgetsItsBuffer(Numbers):
    """Its state says how far it was read, and nothing of the buffer that it shuffles in."""

    def __iter__(self):
        buffer = []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) > 20:
                yield buffer.pop(0)
        yield from buffer


class Untellable(Transformed):
    """Its state can't be pickled."""

    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        """Takes nothing."""


class RaisesInStateDict(Untellable):
    def state_dict(self):
        raise OSError("as planned")


def lists(batch):
    """As plain lists."""
    if isinstance(batch, (list, tuple)):
        return [lists(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch
