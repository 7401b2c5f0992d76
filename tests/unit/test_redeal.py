"""The rest of an epoch for another number of ranks."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from rayloader.resume.ranks import order_of, share


def sampler_of(length, num_replicas, rank, *, shuffle=True, drop_last=False):
    sampler = DistributedSampler(range(length), num_replicas, rank, shuffle=shuffle, drop_last=drop_last)
    sampler.set_epoch(3)
    return sampler


def ranges(length):
    """What a rank has taken: all up to a place, and with `in_order=False` some of what comes after."""
    places = st.lists(st.integers(0, length), min_size=3, max_size=3).map(sorted)
    return places.map(lambda three: [(0, three[0]), (three[1], three[2])])


@given(
    length=st.integers(1, 60),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100)
def test_what_one_world_has_not_taken_another_gets_once(length, worlds, shuffle, drop_last, data):
    stages, seen = [], []
    for number, world in enumerate(worlds):
        sampler = sampler_of(length, world, 0, shuffle=shuffle, drop_last=drop_last)
        order = order_of(sampler)
        dealt = [share(order, stages, world, rank, drop_last=drop_last) for rank in range(world)]
        if number == 0:  # then it is what the sampler itself gives
            assert dealt == [
                list(sampler_of(length, world, r, shuffle=shuffle, drop_last=drop_last)) for r in range(world)
            ]
        assert len({len(mine) for mine in dealt}) == 1
        last = number == len(worlds) - 1
        taken = [[(0, len(mine))] if last else data.draw(ranges(len(mine))) for mine in dealt]
        seen += [
            sample for mine, some in zip(dealt, taken, strict=True) for begin, end in some for sample in mine[begin:end]
        ]
        stages.append(taken)
    counts = Counter(seen)
    repeated = sum(counts.values()) - len(counts)
    if drop_last:
        assert repeated == 0
        assert length - len(counts) < worlds[-1]
    else:
        assert sorted(counts) == list(range(length))
        assert repeated <= sum(world - 1 for world in worlds)


@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=100)
def test_what_comes_more_than_once_in_an_epoch_is_given_as_often(order, worlds, data):
    """As samples that are drawn with replacement do."""
    stages, seen = [], []
    for number, world in enumerate(worlds):
        dealt = [share(order, stages, world, rank, drop_last=True) for rank in range(world)]
        last = number == len(worlds) - 1
        taken = [[(0, len(mine) if last else data.draw(st.integers(0, len(mine))))] for mine in dealt]
        seen += [item for mine, [(begin, end)] in zip(dealt, taken, strict=True) for item in mine[begin:end]]
        stages.append(taken)
    missing = Counter(order) - Counter(seen)
    assert not Counter(seen) - Counter(order)
    assert missing.total() < worlds[-1]
