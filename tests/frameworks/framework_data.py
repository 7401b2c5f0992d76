"""What the tests of several frameworks use."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Augmented(Dataset):
    """Samples that draw from all three global generators."""

    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class Numbers(IterableDataset):
    """Each worker has its share."""

    def __init__(self, length=23):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        yield from map(torch.tensor, range(info.id if info else 0, self.length, info.num_workers if info else 1))


class Quiet(Dataset):
    """What is always the same of `Sums`."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.arange(4.0) * index / 160


class Sums(Dataset):
    """What a linear model learns, with noise from the workers' random streams."""

    def __init__(self, samples=None):
        self.samples = Quiet() if samples is None else samples

    def __len__(self):
        return 160

    def __getitem__(self, index):
        inputs = self.samples[index] + torch.rand(4) + random.random() + np.random.rand()
        return {"inputs": inputs, "labels": inputs.sum()}


class Model(torch.nn.Module):
    """Gives the loss, as Transformers' models do."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, inputs, labels):
        return {"loss": torch.nn.functional.mse_loss(self.linear(inputs).squeeze(1), labels)}


def seed(number):
    """Seeds all three global generators."""
    for module in (random, np.random):
        module.seed(number)
    torch.manual_seed(number)


HANG_LIMIT = 500  # seconds for a script; on expiry it is killed and the test fails


def written_by(script, folder, *names):
    """What a script beside this file writes as JSON: in a process without Ray, for torch's workers are its forks."""
    out = folder / "written.json"
    subprocess.run([sys.executable, Path(__file__).with_name(script), out, *names], check=True, timeout=HANG_LIMIT)
    return json.loads(out.read_text())


def recorded(monkeypatch, loader_class):
    """The classes of the loaders whose iterators are made, as far as they derive from this one."""
    kinds = []
    get_iterator = loader_class._get_iterator

    def noted(loader):
        kinds.append(type(loader))
        return get_iterator(loader)

    monkeypatch.setattr(loader_class, "_get_iterator", noted)
    return kinds
