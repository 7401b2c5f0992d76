"""Datasets that test_cli.py names on the command line."""

import torch

from rayloader import DataLoader


class Squares:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        print("a dataset may print", index)
        return torch.tensor(index * index)


made = Squares()
empty = []


def raises():
    raise ValueError("no such file")


class Broken:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        raise ValueError("broken sample")


def make_loader():
    return DataLoader(range(64), batch_size=4, num_workers=2, prefetch_factor=2)


def make_broken():
    return DataLoader(Broken(), batch_size=4)
