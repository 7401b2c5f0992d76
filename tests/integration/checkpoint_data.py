"""Loaders of the checkpoint tests, what they give in plain numbers, and their states as a file holds them."""

import io

import numpy as np
import torch

from rayloader import DataLoader
from stateful import LENGTH, PlannedError

WORKERS = 3
EPOCHS = 3
INDICES = range(LENGTH)


def make(arguments, num_workers=WORKERS, seed=1, **options):
    """A loader, of batches of three unless said otherwise, and the driver's generator seeded.

    Args:
        arguments: makes the loader's arguments, all objects anew.
        num_workers: of the loader.
        seed: of the driver's global generator.
        options: further arguments.
    """
    torch.manual_seed(seed)
    given = {**arguments(), **options}
    batch_size = {} if "batch_sampler" in given else {"batch_size": 3}
    return DataLoader(**{**batch_size, "num_workers": num_workers, **given})


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


def resumed(loader, saved):
    """What a loader gives from a state on: the rest of that epoch and the next."""
    loader.load_state_dict(read(saved))
    return [list(batches(loader)) for _ in range(2)]
