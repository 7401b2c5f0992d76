"""Datasets that test_cli.py names on the command line."""

import torch


class Squares:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        print("a dataset may print", index)
        return torch.tensor(index * index)


def collate(samples):
    return torch.stack(samples)


made = Squares()
empty = []


def raises():
    raise ValueError("no such file")
