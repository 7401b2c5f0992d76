"""`on_error="skip"`: a sample that raises is dropped, counted and told; nothing else changes."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rayloader
from fault_points import Faults, warned
from rayloader import DataLoader


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


class Generates(NumberStream):
    """A generator that raised has ended."""

    def __iter__(self):
        return (self[index] for index in range(get_worker_info().id, self.length, 2))


def load(dataset, batch_size=2, **options):
    usual = {"num_workers": 2, "workers": "fork", "on_error": "skip"}
    return DataLoader(dataset, batch_size, **{**usual, **options})


def numbers(loader):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in loader]


def told_of(index, caplog):
    """How many lines of the log tell of this sample."""
    return sum(f"BadSampleError: sample {index} is bad" in message for message in warned(caplog))


DROPPED = {  # what the dataset is, how it is loaded: the batches, and which samples were dropped
    "from its batch": (Numbers(8, {3, 6}), {}, [[0, 1], [2], [4, 5], [7]], {3, 6}),
    "of several": (Several(8, {3, 6}), {}, [[0, 1], [2], [4, 5], [7]], {3, 6}),
    "of a stream": (NumberStream(10, {2, 3}), {}, [[0], [1], [4, 6], [5, 7], [8], [9]], {2, 3}),
    "of a generator": (Generates(8, {3}), {"batch_size": None}, [0, 1, 2, 4, 6], {3}),
    "an empty batch": (Numbers(8, {2, 3, 6, 7}), {}, [[0, 1], [4, 5]], {2, 3, 6, 7}),
    "all": (Numbers(40, range(40)), {}, [], range(40)),
    "all in any order": (Numbers(40, range(40)), {"in_order": False}, [], range(40)),
    "without batching": (Numbers(6, {1, 4}), {"batch_size": None}, [0, 2, 3, 5], {1, 4}),
    "of a stream without batching": (NumberStream(6, {1, 4}), {"batch_size": None}, [0, 2, 3, 5], {1, 4}),
    # Of a map-style dataset it looks at the sampler's batches: sample 6 is never asked for.
    "drop_last": (Numbers(8, {1, 6}), {"batch_size": 3, "drop_last": True}, [[0, 2], [3, 4, 5]], {1}),
    "drop_last of a stream": (
        NumberStream(14, {2}),
        {"batch_size": 3, "drop_last": True},
        [[0, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]],
        {2},
    ),
    "in persistent workers": (Numbers(6, {1, 4}), {"persistent_workers": True}, [[0], [2, 3], [5]], {1, 4}),
    "without workers": (Numbers(8, {3, 6}), {"num_workers": 0}, [[0, 1], [2], [4, 5], [7]], {3, 6}),
    "in actors": (Numbers(8, {3, 6}), {"workers": "ray"}, [[0, 1], [2], [4, 5], [7]], {3, 6}),
}


@pytest.mark.parametrize("case", DROPPED)
def test_what_raises_is_dropped_counted_and_told(case, caplog, ray_session):
    dataset, options, batches, dropped = DROPPED[case]
    loader = load(dataset, **options)
    assert loader.skipped == 0
    for _ in range(2):  # each epoch counts anew
        caplog.clear()
        assert numbers(loader) == batches
        assert loader.skipped == len(dropped) == len(warned(caplog))
        assert all(told_of(index, caplog) == 1 for index in dropped)


def test_the_log_names_the_index(caplog):
    loader = load(Numbers(200, {123}), shuffle=True)
    assert sum(map(len, numbers(loader))) == 199
    (message,) = warned(caplog)
    assert "123" in message.replace("sample 123 is bad", "")


@pytest.mark.parametrize(("dataset", "num_workers"), [(Numbers, 2), (NumberStream, 2), (Numbers, 0)])
def test_too_many_are_an_error_at_their_batchs_turn(dataset, num_workers):
    loader = load(dataset(12, {0, 4, 8}), num_workers=num_workers, max_skipped=2)
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


@pytest.mark.parametrize("dataset", [Numbers, NumberStream])
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


def test_a_loaded_state_counts_on():
    loader = load(Numbers(24, {1, 20}))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    loader = load(Numbers(24, {1, 20}))
    loader.load_state_dict(state)
    assert len(numbers(loader)) == 10
    assert loader.skipped == 2
