"""Which sample has raised an error: named for each way in which a dataset is asked for samples."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from rayloader import cached
from rayloader._compat import DatasetKind
from rayloader.errors import CacheError
from rayloader.fetching import create_fetcher, fetch, raised_by

MAP, STREAM = DatasetKind.Map, DatasetKind.Iterable


class Broken(Dataset):
    """Sample 5 raises."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise ValueError("broken")
        return int(index)


class BrokenInside(Broken):
    """So does its own batch of samples, of which nobody else knows."""

    def __getitems__(self, indices):
        assert type(indices) is list
        return [self[index] for index in indices]


class BrokenStream(IterableDataset):
    """Goes on after its sample 5."""

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == 5:
            raise ValueError("broken")
        return self.number


def named(fetcher, kind, indices, skipped=None):
    with pytest.raises((ValueError, CacheError, IndexError)) as caught:
        fetch(fetcher, kind, indices, skipped)
    return raised_by(caught.value)


def of_map(dataset, batched=True):
    return create_fetcher(MAP, dataset, batched, False), MAP


BACKWARDS = Subset(Broken(), [7, 6, 5, 4, 3, 2, 1, 0])  # sample 2 raises


@pytest.mark.parametrize(
    ("dataset", "indices", "name"),
    [
        (Broken(), [7, 1, 5, 2], "sample 5, position 2 of 4"),
        (Broken(), torch.tensor([3, 5]), "sample 5, position 1 of 2"),
        (Broken(), [3, np.int64(5)], "sample 5, position 1 of 2"),
        (BACKWARDS, [0, 2, 1], "sample 2, position 1 of 3"),
        (Subset(BACKWARDS, [2, 2, 1, 0]), [3, 1], "sample 1, position 1 of 2"),
        (Subset(Subset(BACKWARDS, range(8)), [0, 2]), [0, 1], "sample 1, position 1 of 2"),
        (ConcatDataset([range(10), Broken()]), [3, 15], "sample 15, position 1 of 2"),
        (Subset(ConcatDataset([range(10), Broken()]), [15, 3]), [1, 0], "sample 0, position 1 of 2"),
        (StackDataset(range(8), Broken()), [1, 5, 2], ""),
        (cached(Broken()), [1, 5, 5], "sample 5, position 1 of 3"),
        (cached(BACKWARDS), [1, 2, 0], "sample 2, position 1 of 3"),
        (Subset(cached(Broken()), [7, 6, 5]), [0, 2, 1], "sample 2, position 1 of 3"),
        (ConcatDataset([range(10), cached(Broken())]), [3, 15], "sample 15, position 1 of 2"),
        (BrokenInside(), [1, 5, 2], ""),
        (Subset(BrokenInside(), [1, 5]), [0, 1], ""),
        (cached(BrokenInside()), [1, 5, 2], ""),
        (Broken(), (index for index in (3, 5)), ""),
        (Subset(Broken(), [0, 1]), [0, 9, 1], "sample 9, position 1 of 3"),  # which it does not have
        (TensorDataset(torch.arange(64)), [*range(32), 99], "sample 99, position 32 of 33"),  # not asked for each
        (Subset(cached(Broken()), [0, 1]), [0, 9, 1], "sample 9, position 1 of 3"),
    ],
)
def test_the_sample_of_a_batch_is_named_by_the_outermost_index(dataset, indices, name):
    assert named(*of_map(dataset), indices) == name


@pytest.mark.parametrize("index", [5, np.int64(5), torch.tensor(5)])
def test_the_sample_is_named_without_batching(index):
    assert named(*of_map(Broken(), False), index) == "sample 5"


@pytest.mark.parametrize(("batched", "indices", "where"), [(True, [None] * 3, ", position 2 of 3"), (False, None, "")])
def test_samples_of_a_stream_are_counted(batched, indices, where):
    fetcher, found = create_fetcher(STREAM, BrokenStream(), batched, False), []
    while fetcher.taken + (3 if batched else 1) <= 5:
        found.append(fetch(fetcher, STREAM, indices, None))
    assert found == ([([0, 1, 2], 3)] if batched else [(number, 1) for number in range(5)])
    assert named(fetcher, STREAM, indices) == f"sample 5 of the stream{where}"
    assert fetch(fetcher, STREAM, indices, None) == (([6, 7, 8], 3) if batched else (6, 1))
    fetcher.dataset_iter.number = 4
    place = ", position 0 of 3" if batched else ""
    assert named(fetcher, STREAM, indices) == f"sample {9 if batched else 7} of the stream{place}"


@pytest.mark.parametrize("dataset", [Broken(), BrokenInside(), BACKWARDS, cached(Broken())])
def test_what_is_left_out_has_the_same_name(dataset):
    index, skipped = 2 if dataset is BACKWARDS else 5, []
    assert fetch(*of_map(dataset), [1, index, 3], skipped)[1] == 2
    assert skipped == [(str(index), "ValueError: broken")]


def test_what_is_left_out_of_a_stream_is_counted():
    fetcher, skipped = create_fetcher(STREAM, BrokenStream(), True, False), []
    fetch(fetcher, STREAM, [None] * 3, skipped)
    assert fetch(fetcher, STREAM, [None] * 3, skipped) == ([3, 4], 2)
    assert skipped == [("5 of the stream", "ValueError: broken")]
    assert fetcher.taken == 6


def test_an_error_that_is_never_left_out_names_its_sample():
    class Random(Broken):
        def __getitem__(self, index):
            return torch.rand(()) if index == 5 else index

    assert named(*of_map(cached(Random()), False), 5, skipped=[]) == "sample 5"


def test_an_error_names_the_sample_that_raised_it_last_if_any_did():
    error = ValueError("kept")

    class Kept(Broken):
        def __getitem__(self, index):
            if index == 0:
                return index
            raise error

    assert raised_by(error) == ""
    assert named(*of_map(Kept()), [0, 2]) == "sample 2, position 1 of 2"
    assert named(*of_map(Kept()), [3]) == "sample 3, position 0 of 1"


@pytest.mark.parametrize("dataset", [Subset(BrokenInside(), [3, 2, 1]), Subset(BACKWARDS, [3, 4, 6]), BACKWARDS])
def test_what_comes_is_what_torchs_fetcher_gives(dataset):
    torchs = DatasetKind.create_fetcher(MAP, dataset, True, lambda samples: samples, False)
    assert fetch(*of_map(dataset), [1, 0, 1], None)[0] == torchs.fetch([1, 0, 1])
