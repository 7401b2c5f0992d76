"""What the checkpoint tests load, an undisturbed run of it with all its states, and what comes after a state."""

import io
import itertools
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

import stateful
from rayloader import DataLoader
from stateful import LENGTH, PlannedError

WORKERS = 3
EPOCHS = 3
INDICES = range(LENGTH)

CASES = {
    "augmented": lambda: {"dataset": stateful.Augmented(), "shuffle": True},
    "own generators": lambda: {"dataset": stateful.OwnGenerators()},
    "stateful map": lambda: {"dataset": stateful.Counting()},
    "raising map": lambda: {"dataset": stateful.Faulty()},
    "skipping map": lambda: {"dataset": stateful.Faulty(), "on_error": "skip"},
    "shuffled stream": lambda: {"dataset": stateful.Shuffled()},
    "shuffled stream, drop_last": lambda: {"dataset": stateful.Shuffled(), "drop_last": True},
    "shuffled stream, unbatched": lambda: {"dataset": stateful.Shuffled(), "batch_size": None},
    "buffered stream": lambda: {"dataset": stateful.Buffered()},
    "stateful stream": lambda: {"dataset": stateful.StatefulStream()},
    "late stream": lambda: {"dataset": stateful.LateStream()},
    "late stream that keeps its end": lambda: {"dataset": stateful.LateStream(keeps=True)},
    "late map": lambda: {"dataset": stateful.LateMap()},
    "stream of stateful iterators": lambda: {"dataset": stateful.StreamOfStatefulIterators()},
    "datapipe": lambda: {"dataset": IterableWrapper(range(20)).shuffle().sharding_filter(), "shuffle": True},
    "skipping stream": lambda: {"dataset": stateful.StreamOfStatefulIterators(faulty=True), "on_error": "skip"},
}


class GrowingBatches(Sampler):
    """Batches of one, two, three samples and so on; no state."""

    def __len__(self):
        return 6

    def __iter__(self):
        indices = iter(range(21))
        for size in range(1, 7):
            yield list(itertools.islice(indices, size))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def one_generator_for_both(seed):
    both = generator(seed)
    return {"sampler": RandomSampler(INDICES, generator=both), "generator": both}


# `seed` differs between the run and who goes on.
SAMPLERS = {
    "global generator": lambda seed: {"shuffle": True},
    "generator": lambda seed: {"shuffle": True, "generator": generator(seed)},
    "generator of the sampler's": lambda seed: {"sampler": RandomSampler(INDICES, generator=generator(seed))},
    "one generator for both": one_generator_for_both,
    "with replacement": lambda seed: {"sampler": RandomSampler(INDICES, True, 50, generator=generator(seed))},
    "weighted": lambda seed: {"sampler": WeightedRandomSampler([1.0] * LENGTH, 20)},
    "subset, unbatched": lambda seed: {"sampler": SubsetRandomSampler(range(3, 15)), "batch_size": None},
    "batches of a sampler": lambda seed: {"batch_sampler": BatchSampler(RandomSampler(INDICES), 4, True)},
    "batches of the user's": lambda seed: {"batch_sampler": GrowingBatches()},
    "batches in a list": lambda seed: {"batch_sampler": [[0, 1], [2], [], [3, 4, 5]], "collate_fn": list},
    "stateful": lambda seed: {"sampler": stateful.StatefulSampler(seed)},
    "stateful, unbatched": lambda seed: {"sampler": stateful.StatefulSampler(seed), "batch_size": None},
    "stateful batches": lambda seed: {"batch_sampler": stateful.StatefulBatchSampler(seed)},
    "stateful iterators": lambda seed: {"sampler": stateful.SamplerOfStatefulIterators()},
}


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
    """From this point on a loader gives what the run gave."""
    rest, following = resumed(loader, point.saved)
    where = f"after {point.taken} batches of epoch {point.epoch}"
    assert rest == epochs[point.epoch][point.taken :], where
    assert following == epochs[point.epoch + 1], where
