"""`on_error="skip"`: a sample that raises is dropped, counted and told; nothing else changes."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rayloader
from fault_points import Faults, warned
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")


class BadSampleError(Exception):
    """Raised by a sample."""


class Numbers(Dataset):
    """Sample i is i, or an error."""

    def __init__(self, length, bad, faults=None):
        self.length = length
        self.bad = bad
        self.faults = faults

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.faults is not None and index == self.length - 1:
            self.faults.strike("__getitem__")
        if index in self.bad:
            raise BadSampleError(f"sample {index} is bad")
        return index


class Several(Numbers):
    """Fetches a whole batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class NumberStream(Numbers, IterableDataset):
    """An iterator that goes on after an error."""

    def __iter__(self):
        self.position = get_worker_info().id - 2
        return self

    def __next__(self):
        self.position += 2
        if self.position >= self.length:
            raise StopIteration
        return self[self.position]


def load(dataset, batch_size=2, **options):
    return DataLoader(dataset, batch_size, **{"num_workers": 2, "on_error": "skip", **options})


def numbers(loader):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def told_of(index, caplog):
    """How many lines of the log tell of this sample."""
    return sum(f"BadSampleError: sample {index} is bad" in message for message in warned(caplog))


@pytest.mark.parametrize("dataset", [Numbers, Several])
def test_a_sample_is_dropped_from_its_batch(dataset, caplog):
    loader = load(dataset(8, {3, 6}))
    assert loader.skipped == 0
    assert numbers(loader) == [[0, 1], [2], [4, 5], [7]]
    assert loader.skipped == 2
    assert [told_of(index, caplog) for index in range(8)] == [0, 0, 0, 1, 0, 0, 1, 0]
    assert len(warned(caplog)) == 2


def test_the_log_names_the_index(caplog):
    loader = load(Numbers(200, {123}), shuffle=True)
    assert sum(map(len, numbers(loader))) == 199
    (message,) = warned(caplog)
    assert "123" in message.replace("sample 123 is bad", "")


def test_of_a_stream_too(caplog):
    loader = load(NumberStream(10, {2, 3}))
    assert numbers(loader) == [[0], [1], [4, 6], [5, 7], [8], [9]]
    assert loader.skipped == 2
    assert [told_of(index, caplog) for index in (2, 3)] == [1, 1]
    assert len(warned(caplog)) == 2


def test_a_generator_that_raised_has_ended():
    class Generates(NumberStream):
        def __iter__(self):
            return (self[index] for index in range(get_worker_info().id, self.length, 2))

    loader = load(Generates(8, {3}), None)
    assert numbers(loader) == [0, 1, 2, 4, 6]
    assert loader.skipped == 1


def test_an_empty_batch_is_not_delivered():
    loader = load(Numbers(8, {2, 3, 6, 7}))
    assert numbers(loader) == [[0, 1], [4, 5]]
    assert loader.skipped == 4


@pytest.mark.parametrize("in_order", [True, False])
def test_all_batches_may_be_empty(in_order):
    loader = load(Numbers(40, range(40)), in_order=in_order)
    assert numbers(loader) == []
    assert loader.skipped == 40


@pytest.mark.parametrize("dataset", [Numbers, NumberStream])
def test_without_batching(dataset):
    loader = load(dataset(6, {1, 4}), None)
    assert sorted(numbers(loader)) == [0, 2, 3, 5]
    assert loader.skipped == 2


def test_drop_last_looks_at_the_samplers_batches():
    loader = load(Numbers(8, {1, 6}), 3, drop_last=True)
    assert numbers(loader) == [[0, 2], [3, 4, 5]]
    assert loader.skipped == 1  # sample 6 was never asked for
    loader = load(NumberStream(14, {2}), 3, drop_last=True)
    assert numbers(loader) == [[0, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_counts_anew(persistent):
    loader = load(Numbers(6, {1, 4}), persistent_workers=persistent)
    for _ in range(3):
        iterator = iter(loader)
        assert next(iterator).tolist() == [0]
        assert list(map(torch.Tensor.tolist, iterator)) == [[2, 3], [5]]
        assert loader.skipped == 2


@pytest.mark.parametrize("dataset", [Numbers, NumberStream])
def test_too_many_are_an_error_at_their_batchs_turn(dataset):
    loader = load(dataset(12, {0, 4, 8}), max_skipped=2)
    found = []
    with pytest.raises(rayloader.SkipLimitError, match="2"):
        found.extend(batch.tolist() for batch in loader)
    whole = [[1], [2, 3], [5], [6, 7]] if dataset is Numbers else [[2], [1, 3], [6], [5, 7]]
    assert found == whole
    loader.dataset.bad = {5}
    assert len(numbers(loader)) == 6
    assert loader.skipped == 1


def test_errors_of_collate_fn_and_of_other_loaders_are_raised():
    def fail(samples):
        raise BadSampleError("while collating")

    with pytest.raises(BadSampleError, match="while collating"):
        list(load(Numbers(4, {1}), collate_fn=fail))
    with pytest.raises(BadSampleError, match="sample 1 is bad"):
        list(load(Numbers(4, {1}), on_error="raise"))


@pytest.mark.parametrize("dataset", [pytest.param(Numbers, marks=pytest.mark.full), NumberStream])
def test_what_a_worker_builds_again_is_counted_and_told_once(dataset, tmp_path, caplog):
    """The worker of the last sample dies; what it skipped before is skipped by its replacement too."""
    faults = Faults(tmp_path)
    loader = load(dataset(24, {1, 2, 5, 9, 22}, faults), prefetch_factor=2)
    undisturbed = numbers(loader)
    assert loader.skipped == 5
    caplog.clear()
    faults.plan("__getitem__", "SIGKILL")
    assert numbers(loader) == undisturbed
    assert len(faults.struck()) == 1
    assert loader.skipped == 5
    assert [told_of(index, caplog) for index in loader.dataset.bad] == [1] * 5
    assert len(warned(caplog)) == 6  # and the death
