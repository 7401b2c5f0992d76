"""Whole batches of torch's own datasets are what their samples, collated, are."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from rayloader import DataLoader
from rayloader.host import collate
from rayloader.host.collate import whole_batch

LENGTH = 40


@pytest.fixture(autouse=True)
def few_samples_are_enough(monkeypatch):
    monkeypatch.setattr(collate, "FEWEST", 1)


IMAGES = torch.arange(LENGTH * 3 * 4 * 5, dtype=torch.float32).reshape(LENGTH, 3, 4, 5)
LABELS = torch.arange(LENGTH)
PAIRS = TensorDataset(IMAGES, LABELS)


CHOSEN = random.Random(1).sample(range(LENGTH), 30)
WHOLE = {
    "tensors": PAIRS,
    "one tensor": TensorDataset(LABELS),
    "a tensor itself": IMAGES,
    "strides": TensorDataset(IMAGES.to(memory_format=torch.channels_last), IMAGES.transpose(1, 3), LABELS.flip(0)),
    "expanded": TensorDataset(torch.ones(1, 3).expand(LENGTH, 3)),
    "no items": TensorDataset(torch.empty(LENGTH, 0), LABELS),
    **{f"{dtype}": TensorDataset(LABELS.to(dtype)) for dtype in (torch.bool, torch.uint8, torch.int16, torch.float16)},
    **{f"a subset by {kind.__name__}": Subset(PAIRS, kind(CHOSEN)) for kind in (list, tuple, torch.tensor, np.array)},
    "a subset by range": Subset(PAIRS, range(3, 33)),
    "a subset of a subset": Subset(Subset(PAIRS, CHOSEN), list(range(29, -1, -1))),
    "a tuple of datasets": StackDataset(PAIRS, LABELS, Subset(PAIRS, list(range(LENGTH)))),
    "a dict of datasets": StackDataset(label=LABELS, image=Subset(TensorDataset(IMAGES), list(range(LENGTH)))),
}


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Marked(torch.Tensor):
    pass


class Reversed:
    """Indices of a subset, of no length."""

    def __getitem__(self, place):
        return LENGTH - 1 - place


def with_own_getitems():
    dataset = TensorDataset(LABELS)
    dataset.__getitems__ = lambda indices: [(LABELS[0],)] * len(indices)
    return dataset


BY_SAMPLE = {
    "a subclass": Doubled(LABELS),
    "a subclass within": Subset(Doubled(LABELS), list(range(LENGTH))),
    "a list": Subset(list(range(LENGTH)), list(range(LENGTH))),
    "arrays": StackDataset(np.zeros((LENGTH, 2)), LABELS),
    "a tensor of another class": TensorDataset(LABELS.clone().as_subclass(Marked)),
    "a parameter": TensorDataset(torch.nn.Parameter(IMAGES.clone(), requires_grad=False)),
    "gradients": TensorDataset(IMAGES.clone().requires_grad_()),
    "sparse": TensorDataset(torch.eye(LENGTH).to_sparse()),
    "complex": TensorDataset(torch.zeros(LENGTH, dtype=torch.complex64)),
    "indices that are no whole numbers": Subset(PAIRS, [torch.tensor(3)] * LENGTH),
    "indices of no length": Subset(PAIRS, Reversed()),
    "methods of its own": with_own_getitems(),
}


def by_sample(dataset, indices):
    return _MapDatasetFetcher(dataset, True, default_collate, False).fetch(indices)


def described(batch):
    if isinstance(batch, dict):
        return {name: described(part) for name, part in batch.items()}
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.stride(), batch.tolist()
    return type(batch), [described(part) for part in batch]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_batch_is_that_of_its_samples(name):
    dataset = WHOLE[name]
    chosen = random.Random(2)
    for size in (1, 2, 7, 50):
        indices = [chosen.randrange(len(dataset)) for _ in range(size)]
        assert described(whole_batch(dataset, indices)) == described(by_sample(dataset, indices))


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_what_is_not_certain_is_asked_for_by_sample(name):
    assert whole_batch(BY_SAMPLE[name], [LENGTH - 1, 0, 1]) is None


@pytest.mark.parametrize("name", ["tensors", "a subset by list", "a dict of datasets"])
@pytest.mark.parametrize("indices", [[], [0, -1], [0, 10**6], [0, 2**70], [0, True], [torch.tensor(0)], (0, 1), 0])
def test_indices_that_are_unusual_are_the_datasets_own_matter(name, indices):
    assert whole_batch(WHOLE[name], indices) is None


@pytest.mark.parametrize("kind", [TensorDataset, StackDataset, Subset, Dataset])
@pytest.mark.parametrize("name", ["__getitem__", "__getitems__"])
def test_methods_that_the_program_has_replaced_or_added_are_called(kind, name, monkeypatch):
    assert whole_batch(PAIRS, [1]) is not None
    monkeypatch.setattr(kind, name, lambda self, index: (index,), raising=False)
    assert (whole_batch(PAIRS, [1]) is None) is not (kind is Dataset and name == "__getitem__")


def test_few_samples_are_asked_for_one_by_one(monkeypatch):
    monkeypatch.undo()
    assert whole_batch(PAIRS, [0] * (collate.FEWEST - 1)) is None
    assert whole_batch(PAIRS, [0] * collate.FEWEST) is not None


@pytest.mark.parametrize("collate_fn", [None, default_collate, len])
def test_a_loader_takes_whole_batches_with_the_default_collate(collate_fn, monkeypatch):
    monkeypatch.setattr("rayloader.host.worker.whole_batch", lambda dataset, indices: ["a whole batch", *indices])
    batches = list(DataLoader(PAIRS, 4, num_workers=1, workers="fork", collate_fn=collate_fn))
    assert batches[0] == (4 if collate_fn is len else ["a whole batch", 0, 1, 2, 3])
