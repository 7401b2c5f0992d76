"""What the tests of restored workers load: random generators in every place where users keep them, and streams."""

import random
import threading

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from probes import Calls

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


class Initialize:
    """Its own generator is drawn from by the dataset, which it hands it to."""

    def __init__(self):
        self.transform = Transform(4)

    def __call__(self, worker_id):
        get_worker_info().dataset.function = self.transform


def augmented():
    """Crops and flips an image of which each pixel is told from the others."""
    import albumentations  # here: it takes a second

    transform = albumentations.Compose([albumentations.RandomCrop(2, 2), albumentations.HorizontalFlip(p=0.5)])
    image = np.arange(16 * 16 * 3, dtype=np.float32).reshape(16, 16, 3)
    return Calls(lambda index: [index, transform(image=image)["image"]], LENGTH)


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
    """The generators of a sample depend on nothing but the sample."""

    def __call__(self, index):
        self.transform = Transform(index)
        return self.transform(index)


GENERATORS = {
    "dataset and collate_fn": lambda: {"dataset": Calls(Transform(2), LENGTH), "collate_fn": Transform(3)},
    "worker_init_fn": lambda: {"dataset": Calls(None, LENGTH), "worker_init_fn": Initialize()},
    "global of a module": lambda: {"dataset": Calls(use_global, LENGTH), "worker_init_fn": set_global},
    "made anew": lambda: {"dataset": Calls(AnewForEach(), LENGTH)},
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


class Untellable(Calls):
    """Its state can't be pickled."""

    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        """Takes nothing."""


class RaisesInStateDict(Untellable):
    def state_dict(self):
        raise OSError("as planned")
