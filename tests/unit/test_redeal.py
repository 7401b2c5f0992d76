"""The rest of an epoch for another number of ranks."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from rayloader.resume.ranks import order_of, share


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "world"), [(60, 4), (10, 4), (3, 5), (1, 1)])
def test_what_the_first_world_gets_is_what_the_sampler_gives(length, world, drop_last):
    samplers = [DistributedSampler(range(length), world, rank, drop_last=drop_last) for rank in range(world)]
    for sampler in samplers:
        sampler.set_epoch(3)
    order = order_of(samplers[0])
    dealt = [share(order, [], world, rank, drop_last=drop_last) for rank in range(world)]
    assert dealt == [list(sampler) for sampler in samplers]


def ranges(length):
    """What a rank has taken: all up to a place, and with `in_order=False` some of what comes after."""
    places = st.lists(st.integers(0, length), min_size=3, max_size=3).map(sorted)
    return places.map(lambda three: [(0, three[0]), (three[1], three[2])])


ORDERS = st.lists(st.integers(0, 5), min_size=1, max_size=40) | st.integers(1, 60).map(range)


@given(
    order=ORDERS,
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    drop_last=st.booleans(),
    data=st.data(),
)
@settings(max_examples=150)
def test_what_one_world_has_not_taken_another_gets_once(order, worlds, drop_last, data):
    """What comes more than once in an order, as samples that are drawn with replacement do, is given as often."""
    stages, seen = [], Counter()
    for number, world in enumerate(worlds, 1):
        dealt = [share(order, stages, world, rank, drop_last=drop_last) for rank in range(world)]
        assert len({len(mine) for mine in dealt}) == 1
        taken = [[(0, len(mine))] if number == len(worlds) else data.draw(ranges(len(mine))) for mine in dealt]
        for mine, some in zip(dealt, taken, strict=True):
            seen.update(sample for begin, end in some for sample in mine[begin:end])
        stages.append(taken)
    repeated, missing = seen - Counter(order), Counter(order) - seen
    if drop_last:
        assert not repeated
        assert missing.total() < worlds[-1]
    else:
        assert not missing
        assert repeated.total() <= sum(world - 1 for world in worlds)
