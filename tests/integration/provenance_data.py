"""Datasets for tests of the provenance log."""

import os
import signal

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Noisy(Dataset):
    """Samples with noise; `bad` ones raise."""

    def __init__(self, length=24, bad=()):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"sample {index} is bad")
        return torch.tensor(index), torch.rand(1)


class Dying(Noisy):
    """A worker is killed once, at one sample."""

    def __init__(self, path, at, length=24):
        super().__init__(length)
        self.path, self.at = path, at

    def __getitem__(self, index):
        if index == self.at and not os.path.exists(self.path):
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Numbers(IterableDataset):
    """Each worker has numbers of its own, the second one fewer."""

    def __iter__(self):
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        return iter(range(100 * number, 100 * number + 8 - 4 * number))
