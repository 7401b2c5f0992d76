"""What a snapshot tells, when it is due, and what it is restored to."""

import random
import types
import unittest.mock

import numpy as np
import pytest

from rayloader import ReplayError
from rayloader.random.generators import RandomState
from rayloader.resume.snapshot import SHARE, SnapshotTaker, dump_state, end_again, has_state


class Counts:
    """Tells its own state, and makes its generator again when it is told of an epoch."""

    def __init__(self):
        self.count = 0
        self.rng = random.Random(0)

    def set_epoch(self, epoch):
        self.rng = random.Random(epoch)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def recorder(dataset=None, *generators):
    return SnapshotTaker(dataset, {"dataset": dataset, "collate_fn": generators}, RandomState.capture())


def test_only_what_has_changed_is_told_or_may_not_have_been_heard():
    dataset, own = Counts(), random.Random(1)
    told = recorder(dataset, own)
    whole, second = told.snapshot(None, tasks=1), told.snapshot(None, tasks=2)
    assert whole.dataset is not None
    assert (second.dataset, second.random, second.tasks) == (None, RandomState(), 2)
    dataset.count, _ = 5, own.random()
    third = told.snapshot(None, tasks=3)
    assert third.dataset not in (None, whole.dataset)
    whole = third.over(second.over(whole))
    told.forget()
    assert told.snapshot(None, tasks=3) == whole
    after = own.random()
    recorder(dataset, own).restore(whole.random)
    assert own.random() == after


@pytest.mark.parametrize("fetched", [[], [0]])
def test_a_stream_takes_over_the_end_that_it_has_loaded_or_loads_its_next_epoch_again(fetched):
    fetcher = types.SimpleNamespace(dataset=Counts(), dataset_iter=iter(fetched))
    state = dump_state(Counts())
    fetcher.dataset.count = 1  # as a sample leaves it
    assert end_again(fetcher, state, None) == (not fetched)
    assert fetcher.dataset.count == (not fetched)
    assert (fetcher.dataset_iter is None) == bool(fetched)


def test_those_of_the_start_are_followed_where_they_are_made_anew_and_later_ones_are_not():
    dataset, again = Counts(), Counts()
    told, restored = recorder(dataset), recorder(again)
    for one in (dataset, again):
        one.set_epoch(5)
    dataset.late = random.Random(1)
    dataset.rng.random()
    told.renew()
    restored.renew()
    state = told.snapshot(None)
    assert list(state.random.held) == ["dataset.rng"]
    assert not restored.is_at(state.random)
    restored.restore(state.random)
    assert restored.is_at(state.random)
    assert again.rng.random() == dataset.rng.random()


def test_the_next_one_is_due_when_it_costs_its_share_of_the_work():
    told = recorder(Counts())
    assert told.is_due
    told.snapshot(None)
    cost = told._cost
    told.worked(0.9 * cost / SHARE)
    assert not told.is_due
    told.worked(0.2 * cost / SHARE)
    assert told.is_due


@pytest.mark.parametrize("others", [[], [np.random.default_rng(2)]])
def test_a_dataset_with_other_generators_is_refused(others):
    state = recorder(None, random.Random(1), random.Random(2)).snapshot(None)
    with pytest.raises(ReplayError, match=r"generator collate_fn\[1\], which is missing here, or of another kind"):
        recorder(None, random.Random(1), *others).restore(state.random)


def with_methods(tell, load):
    return types.SimpleNamespace(state_dict=tell, load_state_dict=load)


def nothing(*_):
    """Tells or loads it."""


@pytest.mark.parametrize(
    ("obj", "has"),
    [
        *((with_methods(*methods), True) for methods in [(dict, {}.update), (unittest.mock.Mock(),) * 2]),
        (with_methods(lambda deep=False, *, many=1: {}, lambda state, strict=True: None), True),
        (with_methods(lambda num_samples, from_beginning: {}, nothing), False),
        (with_methods(lambda *, num_samples: {}, nothing), False),
        *((with_methods(dict, load), False) for load in (lambda: None, lambda state, strict: None, None)),
        (with_methods({}, nothing), False),
        *((other, False) for other in (iter([]), None)),
    ],
)
def test_a_state_counts_if_it_can_be_told_without_arguments_and_loaded(obj, has):
    assert has_state(obj) == has
