"""Samples and a model that the tests of several frameworks use."""

import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import warnings
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
        return 80

    def __getitem__(self, index):
        return torch.arange(4.0) * index / 80


class Sums(Dataset):
    """What a linear model learns, with noise from the workers' random streams."""

    def __init__(self, samples=None):
        self.samples = Quiet() if samples is None else samples

    def __len__(self):
        return 80

    def __getitem__(self, index):
        inputs = self.samples[index] + torch.rand(4) + random.random() + np.random.rand()
        return {"inputs": inputs, "labels": inputs.sum()}


class Model(torch.nn.Module):
    """Notes each batch with its loss, which it gives as Transformers' models do."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 1), []

    def forward(self, inputs, labels):
        loss = torch.nn.functional.mse_loss(self.linear(inputs).squeeze(1), labels)
        self.seen.append([self.training, inputs.tolist(), loss.item()])
        return {"loss": loss}


def seed(number):
    """Seeds all three global generators."""
    for module in (random, np.random):
        module.seed(number)
    torch.manual_seed(number)


HANG_LIMIT = 500  # seconds for a script; on expiry it is killed and the test fails


def run_script(name, *arguments, launcher=(), **environment):
    """The lines that a script beside this file prints until it ends as it should."""
    done = subprocess.run(
        [sys.executable, *launcher, Path(__file__).with_name(name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def write_results(run):
    """What a script does that is given a file and names of cases: it writes to the file what they give, as JSON.

    What needs a package that is not installed is left out.
    """
    multiprocessing.set_start_method("fork")
    warnings.simplefilter("ignore")
    found = {}
    for name in sys.argv[2:]:
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = run(name)
    Path(sys.argv[1]).write_text(json.dumps(found))
