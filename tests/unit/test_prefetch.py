"""Which samplers may be asked early, and that nobody can tell."""

from __future__ import annotations

import copy
import pickle

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
from rayloader.prefetch import AutomaticPrefetch, DrawAhead, may_draw_ahead

DATA = list(range(10))


class Mine(SequentialSampler):
    """A sampler of the user's that looks like torch's."""


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
    sampler = BatchSampler(RandomSampler(DATA, generator=mine), batch_size, drop_last)
    early = DrawAhead(sampler, iter(sampler))
    expected = iter(BatchSampler(RandomSampler(DATA, generator=torchs), batch_size, drop_last))
    drawn: list[object] = []
    for draws in range(1, 14):
        early.reach(draws)
        while len(drawn) < draws + ahead:
            drawn.append(next(early, None))
        assert drawn[draws - 1] == next(expected, None)
        assert torch.equal(mine.get_state(), torchs.get_state())


def test_a_generator_that_others_use_meanwhile_goes_on_from_there():
    mine, torchs = torch.Generator(), torch.Generator()
    sampler = RandomSampler(DATA, generator=mine)
    early, expected = DrawAhead(sampler, iter(sampler)), iter(RandomSampler(DATA, generator=torchs))
    early.reach(1)
    assert [next(early, None) for _ in range(11)] == [next(expected) for _ in range(10)] + [None]
    for generator in (mine, torchs):
        torch.rand(3, generator=generator)
    early.reach(11)
    assert next(expected, None) is None
    assert torch.equal(mine.get_state(), torchs.get_state())


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
