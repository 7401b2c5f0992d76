"""Which samplers may be asked early, and that nobody can tell."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rayloader import DataLoader
from rayloader.epoch.draws import may_draw_ahead, start
from rayloader.options import AutomaticPrefetch

DATA = list(range(10))


class Mine(SequentialSampler):
    """A sampler of the user's that looks like torch's."""


class DatasetsOwn:
    """Indices that call the user's code."""


@pytest.mark.parametrize(
    ("sampler", "may"),
    [
        (SequentialSampler(DATA), True),
        (RandomSampler(DATA), True),
        (RandomSampler(DATA, replacement=True), True),
        (RandomSampler(DATA, generator=torch.Generator()), True),
        (RandomSampler(DATA, replacement=True, generator=torch.Generator()), False),
        (RandomSampler(DATA, num_samples=25, generator=torch.Generator()), False),
        (SubsetRandomSampler(DATA, generator=torch.Generator()), True),
        (SubsetRandomSampler(DatasetsOwn()), False),
        (WeightedRandomSampler([0.5] * 10, 10), True),
        (DistributedSampler(DATA, num_replicas=2, rank=0), True),
        (BatchSampler(RandomSampler(DATA), 2, False), True),
        (BatchSampler(Mine(DATA), 2, False), False),
        (Mine(DATA), False),
        (iter(DATA), False),
        (DATA, False),
    ],
)
def test_who_may_be_asked_early(sampler, may):
    assert may_draw_ahead(sampler) is may


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 20])
@pytest.mark.parametrize("ahead", [0, 1, 4, 100])
def test_a_generator_is_always_where_torch_would_have_left_it(batch_size, drop_last, ahead):
    mine, torchs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    early = start(BatchSampler(RandomSampler(DATA, generator=mine), batch_size, drop_last))
    expected = iter(BatchSampler(RandomSampler(DATA, generator=torchs), batch_size, drop_last))
    drawn: list[object] = []
    for draws in range(1, 14):
        assert not early.reach(draws)
        while len(drawn) < draws or (early.may_draw and len(drawn) < draws + ahead):
            drawn.append(next(early, None))
        assert drawn[draws - 1] == next(expected, None)
        assert torch.equal(mine.get_state(), torchs.get_state())


def test_a_generator_that_others_use_meanwhile_goes_on_from_there():
    mine, torchs = torch.Generator(), torch.Generator()
    early, expected = start(RandomSampler(DATA, generator=mine)), iter(RandomSampler(DATA, generator=torchs))
    early.reach(1)
    assert [next(early) for _ in range(10)] == [next(expected) for _ in range(10)]
    assert not early.may_draw
    for generator in (mine, torchs):
        torch.rand(3, generator=generator)
    early.reach(11)
    assert early.may_draw
    assert next(early, None) is next(expected, None) is None
    assert torch.equal(mine.get_state(), torchs.get_state())


def drawn(indices):
    try:
        return next(indices, None)
    except IndexError:
        return "error"


def drawn_at(draws, ahead, sampler, change):
    """All that an iterator gives whose user takes one after the other, with two drawn at the start, as torch does.

    None if it notices that torch's would have given something else.
    """
    early, given = start(sampler), []
    for taken in itertools.count():
        if taken == draws + 1:
            change(sampler)
        if early.reach(taken + 2):
            return None
        while early.may_draw and len(given) < taken + 2 + ahead:
            given.append(drawn(early))
        if given[taken] is None:
            return given[:taken]


def drawn_by_torch(draws, sampler, change):
    """The same of torch's own iterator."""
    indices, given = iter(sampler), []
    for taken in itertools.count():
        if taken == draws + 1:
            change(sampler)
        while len(given) < taken + 2:
            given.append(drawn(indices))
        if given[taken] is None:
            return given[:taken]


def set_batch_size(sampler):
    sampler.batch_size = 1


def reverse(sampler):
    indices = getattr(sampler, "sampler", sampler).indices
    indices[:] = indices[::-1]


def cut(sampler):
    getattr(sampler, "sampler", sampler).indices = list(range(7))


def grow(sampler):
    getattr(sampler, "sampler", sampler).data_source.extend(range(5))


def subset(kind=list):
    return SubsetRandomSampler(kind(DATA), generator=torch.Generator().manual_seed(1))


def shuffled(**options):
    return RandomSampler(list(DATA), generator=torch.Generator().manual_seed(1), **options)


@pytest.mark.parametrize("draws", [0, 1, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: BatchSampler(SequentialSampler(DATA), 2, False), set_batch_size),
        (lambda: BatchSampler(SequentialSampler(DATA), 2, True), set_batch_size),
        (lambda: BatchSampler(shuffled(), 3, False), set_batch_size),
        (lambda: BatchSampler(subset(), 2, False), set_batch_size),
        (lambda: BatchSampler(subset(), 2, False), reverse),
        (lambda: BatchSampler(subset(), 3, True), reverse),
        (lambda: BatchSampler(subset(), 3, True), set_batch_size),
        (subset, reverse),
        (subset, cut),
        (lambda: BatchSampler(subset(tuple), 2, False), cut),
        (lambda: BatchSampler(subset(), 2, True), cut),
        (lambda: BatchSampler(subset(np.array), 2, False), reverse),
        (lambda: BatchSampler(shuffled(), 2, False), grow),
        (shuffled, grow),
        (lambda: RandomSampler(list(DATA), replacement=True), grow),
    ],
)
def test_what_changes_meanwhile_shows_as_in_torch_or_is_noticed(make, change, ahead, draws):
    torch.manual_seed(1)
    expected = drawn_by_torch(draws, make(), change)
    torch.manual_seed(1)
    unchanged = drawn_by_torch(draws, make(), lambda sampler: None)
    torch.manual_seed(1)
    got = drawn_at(draws, ahead, make(), change)
    assert got == expected or (got is None and ahead > 0 and expected != unchanged)


def test_automatic_survives_copies_and_rebuilding():
    loader = DataLoader(DATA, num_workers=1)
    for factor in (
        loader.prefetch_factor,
        copy.copy(loader.prefetch_factor),
        pickle.loads(pickle.dumps(loader)).prefetch_factor,
    ):
        assert factor == 2
        assert isinstance(DataLoader(DATA, num_workers=1, prefetch_factor=factor).prefetch_factor, AutomaticPrefetch)
    assert not isinstance(DataLoader(DATA, num_workers=1, prefetch_factor=2).prefetch_factor, AutomaticPrefetch)
    assert DataLoader(DATA).prefetch_factor is None


@pytest.mark.parametrize("value", [0, -1, 1.5, "much", None])
def test_prefetch_bytes_is_checked(value):
    with pytest.raises(ValueError, match=r"prefetch_bytes must be a whole number of bytes >= 1, got .*; to fix"):
        DataLoader(DATA, num_workers=1, prefetch_bytes=value)
