"""A mixture against its definition: shares within one sample at every step, and sources read through in turns."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader.plans import Mixture
from rayloader.plans import mixture as mixture_module
from rayloader.plans.plan import shuffled

WEIGHTS = st.integers(1, 9) | st.floats(0.01, 9, allow_subnormal=False)
SOURCES = st.lists(st.tuples(st.integers(1, 12), WEIGHTS), min_size=1, max_size=5)


def drawn(mixture, epochs=1):
    """The sources of all samples, in order."""
    found = []
    for epoch in range(epochs):
        mixture.set_epoch(epoch)
        found += mixture
    found, ends = np.array(found), np.cumsum(mixture._sizes)
    sources = np.searchsorted(ends, found, "right")
    for source, size in enumerate(mixture._sizes):
        mine = found[sources == source].tolist()
        for turn in (mine[begin : begin + size] for begin in range(0, len(mine), size)):
            assert len({*turn}) == len(turn), "a source is read through before it begins again"
    return sources


def furthest(sources, weights):
    """How many samples a source is at most off its share, at any step."""
    weights = np.asarray(weights, float) / np.sum(weights)
    counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    return np.abs(counts - np.arange(1, len(sources) + 1)[:, None] * weights).max()


@given(sources=SOURCES, size=st.integers(1, 200), seed=st.integers(0, 9), ranks=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_every_share_is_within_one_sample_and_ranks_share_the_epoch(sources, size, seed, ranks):
    sizes, weights = zip(*sources, strict=True)
    mixture = Mixture(sizes, weights, seed=seed, epoch_size=size)
    found = drawn(mixture, epochs=2)
    assert len(found) == 2 * size
    assert furthest(found, weights) <= 1 + 1e-6
    for step in {0, 1, size // 2, size, size + size // 3, 2 * size}:
        assert mixture.counts(step).tolist() == np.bincount(found[:step], minlength=len(sizes)).tolist()
    whole, order = [*mixture], mixture.order_for(ranks)
    assert len(order) == -(-size // ranks) * ranks
    assert not Counter(whole) - Counter(order)
    parts = [[*mixture.for_rank(ranks, rank)] for rank in range(ranks)]
    assert [*itertools.chain(*zip(*parts, strict=True))] == [*order]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    phases=st.lists(st.lists(st.integers(0, 3) | st.floats(0, 0.1), min_size=3, max_size=3), min_size=1, max_size=3),
    size=st.integers(1, 40),
)
@settings(deadline=None, max_examples=40)
def test_where_weights_change_or_are_tiny_no_sample_is_lost_between_epochs(sizes, phases, size):
    phases = [[max(weight, 1e-4) for weight in phases[0]], *(phase for phase in phases[1:] if sum(phase) > 0.01)]
    weights = [(number * 25, phase) for number, phase in enumerate(phases)]
    mixture = Mixture(sizes, weights, epoch_size=size)
    found = drawn(mixture, epochs=4)
    wanted = np.array([mixture._shares.at(step) for step in range(1, 4 * size + 1)])
    counts = np.cumsum(found[:, None] == np.arange(3), axis=0)
    assert np.abs(counts - wanted).max() <= 1.5
    assert Mixture(sizes, weights, epoch_size=size).counts(3 * size).tolist() == counts[3 * size - 1].tolist()


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [np.pi, 1, np.e], [1, 1e-4], [5, 4, 3, 2, 1], [1] * 20], ids=str)
@pytest.mark.parametrize("block", [1, 1 << 12])
def test_shares_hold_where_blocks_meet(weights, block, monkeypatch):
    monkeypatch.setattr(mixture_module, "_BLOCK", block * 4)
    monkeypatch.setattr(mixture_module, "_AT_ONCE", block * 64)
    mixture = Mixture([50] * len(weights), weights, epoch_size=700)
    assert furthest(drawn(mixture, epochs=3), weights) <= 1 + 1e-6


def test_shares_of_many_sources_whose_weights_have_no_common_denominator():
    weights = np.random.default_rng(0).dirichlet(np.ones(40))
    assert furthest(drawn(Mixture([50] * 40, weights, epoch_size=3 << 12)), weights) <= 1.1


def test_where_an_epoch_ends():
    """Of 0.7 the first one, 100 samples, is used up; of 0.2 there are 50."""
    first, all_read = (Mixture([100, 50, 20], [0.7, 0.2, 0.1], stop=stop) for stop in ("first", "all"))
    assert (len(first), len(all_read)) == (142, 250)
    assert (np.bincount(drawn(first)) <= [100, 50, 20]).all()
    assert (np.bincount(drawn(all_read)) >= [100, 50, 20]).all()
    sizes = [1009, 211, 13]
    assert sorted(Mixture(sizes, sizes)) == [*range(sum(sizes))]  # weights are lengths: each sample comes once


def test_weights_that_change():
    mixture = Mixture([30, 30], [(0, [1, 0]), (100, [1, 1]), (200, [0, 1])], epoch_size=150)
    found = drawn(mixture, epochs=2)
    assert Counter(found[:100].tolist()) == {0: 100}
    assert np.abs(np.cumsum(found[100:200]) - np.arange(1, 101) / 2).max() <= 1
    assert Counter(found[200:].tolist()) == {1: 100}
    assert mixture.counts(300).tolist() == [150, 150]


def test_another_seed_and_no_shuffling():
    assert [*Mixture([40], [1])] == [*Mixture([40], [1])] != [*Mixture([40], [1], seed=1)]
    plain = Mixture([3, 2], [1, 1], shuffle=False, epoch_size=8)
    assert [*plain] in ([0, 3, 1, 4, 2, 3, 0, 4], [3, 0, 4, 1, 3, 2, 4, 0])


def test_each_rank_has_the_shares_of_all():
    """Also where a period of the shares is as long as there are ranks."""
    mixture = Mixture([1000, 1000], [1, 1], epoch_size=8192)
    for rank in range(2):
        shares = np.cumsum(np.array([*mixture.for_rank(2, rank)]) < 1000) - np.arange(1, 4097) / 2
        assert np.abs(shares).max() <= 2


@pytest.mark.parametrize("count", [1, 2, 5000, 70_000])
def test_a_shuffled_order_has_every_number_once_in_whatever_parts_it_is_asked_for(count):
    whole = shuffled(np.arange(count), count, 3, 1)
    assert sorted(whole.tolist()) == [*range(count)]
    places = np.arange(count // 3, count // 2 + 1)
    assert shuffled(places, count, 3, 1).tolist() == whole[places].tolist()
    assert count < 1000 or abs(np.corrcoef(whole[1:], whole[:-1])[0, 1]) < 5 / count**0.5


NAMES = "weights must have the names of the sources"
ABOVE = "above 0 for each source at some step and for some source at each step"


@pytest.mark.parametrize(
    ("sources", "weights", "options", "error"),
    [
        ([], [], {}, "a mixture must have at least one source"),
        ({}, {}, {}, "a mixture must have at least one source"),
        ([0], [1], {}, "a number of samples, of at least 1, and source 0 is 0;"),
        ({"a": 1, "b": 0}, {"a": 1, "b": 2}, {}, "of at least 1, and source b is 0;"),
        ([iter(())], [1], {}, "a source must be a dataset with a length, .* and source 0 is <"),
        ([1, 1], [1, 0], {}, r"weights must be finite, .* got \[1, 0\]; leave a source out"),
        ([1, 1], [1, float("nan")], {}, r"weights must be finite, .* got \[1, nan\]"),
        ([1, 1], [1], {}, "there must be one weight for each of the 2 sources"),
        ([1, 1], [(0, [1, 1]), (5, [0, 0])], {}, ABOVE),
        ([1, 1], [(0, [1, 0]), (5, [1, 0])], {}, ABOVE),
        ({"a": 1, "b": 1}, {"a": 1, "b": 0}, {}, ABOVE + ", got {'a': 1, 'b': 0}"),
        ([1, 1], [(5, [1, 1])], {}, "weights that change must be for steps that begin with 0"),
        ([1, 1], {"a": 1, "b": 2}, {}, f"{NAMES}, which have none"),
        ({"a": 1, "b": 1}, [1, 2], {}, rf"{NAMES}, \['a', 'b'\], got \[1, 2\]"),
        ({"a": 1, "b": 1}, {"a": 1, "c": 2}, {}, NAMES),
        ({"a": 1, "b": 1}, [(0, {"a": 1, "b": 2}), (9, {"a": 1})], {}, NAMES),
        ([1], [1], {"stop": "last"}, "stop must be"),
        ([1], [1], {"stop": 0}, "stop must be .*; a number of samples is epoch_size"),
        ([1, 1], [(0, [1, 1]), (1, [1, 0])], {"stop": "all"}, "source 1 is never used up"),
        ([1], [1], {"epoch_size": 0}, "epoch_size must be a whole number >= 1"),
        ([1], [1], {"seed": -1}, "seed must be a whole number >= 0"),
    ],
)
def test_what_makes_no_sense_is_an_error(sources, weights, options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        Mixture(sources, weights, **options)


def test_sources_by_name_are_those_in_their_order():
    sources, weights = {"web": [0] * 40, "books": [0] * 10}, {"books": 1, "web": 3}
    named, plain = Mixture(sources, weights, epoch_size=40), Mixture([40, 10], [3, 1], epoch_size=40)
    assert [*named] == [*plain]
    assert (named.sources, plain.sources) == ("web, books", "")
    changing = Mixture(sources, [(0, weights), (20, {"web": 0, "books": 1})], epoch_size=40)
    assert changing.counts(40).tolist() == [15, 25]
    assert "source web    30 samples, 75.000% of the epoch; 0.750 times its 40" in named.describe()
    assert "40 in an epoch, of 50 in 2 sources" in named.describe()
