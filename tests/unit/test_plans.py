"""Plans against brute force: budgets, packs, shares; every rank, every resumption, and readers at the same time."""

import copy
import itertools
import pickle
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler
from torch.utils.data import DataLoader as TorchDataLoader

import rayloader
from interleaved import interleaved
from rayloader.plans import Mixture, Packing, TokenBudget
from rayloader.plans import mixture as mixture_module
from rayloader.plans.plan import shuffled
from rayloader.plans.sample_lengths import lengths_of

SIZES = [1 + 7 * number % 19 for number in range(30)]
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=80)
RANKS = st.integers(1, 5)
PLANS = {
    "mixture": lambda sizes=SIZES: Mixture([20, 30], [(0, [1, 2]), (130, [2, 1])], seed=1, epoch_size=100),
    "budget": lambda sizes=SIZES: TokenBudget(sizes, 60, window=8, seed=1),
    "best-fit": lambda sizes=SIZES: Packing(sizes, 60, window=8, seed=1),
    "concat": lambda sizes=SIZES: Packing(sizes, 60, algorithm="concat", seed=1),
}
plans = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in PLANS.items()])
turns = pytest.mark.parametrize("turns", range(2))


@pytest.fixture
def small_parts(monkeypatch):
    """An epoch of a mixture is made in parts."""
    monkeypatch.setattr(mixture_module, "_BLOCK", 8)
    monkeypatch.setattr(mixture_module, "_AT_ONCE", 32)


def flat(batches):
    return [item for batch in batches for item in batch]


def tokens_of(parts):
    return Counter((number, token) for number, begin, end in parts for token in range(begin, end))


def windows(lengths, window, seed):
    """The lengths of each window of the random order of the first epoch, from the longest on."""
    order = shuffled(np.arange(len(lengths)), len(lengths), seed, 0).tolist()
    for begin in range(0, len(order), window):
        yield sorted((lengths[place] for place in order[begin : begin + window]), reverse=True)


def check_ranks(plan, ranks, drop_last):
    """Each rank has as many batches as the others, and all together are the order of the plan; which is returned."""
    order, count = [*plan.order_for(ranks)], len([*plan.order_for(1)])
    parts = [plan.for_rank(ranks, rank) for rank in range(ranks)]
    assert [[*part] for part in parts] == [order[rank::ranks] for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(order) // ranks}
    assert len(order) == (count if drop_last else count + -count % ranks) // ranks * ranks
    return order


# ---- budgets


def filled(lengths, budget, most, multiple):
    """The batches of a window, from the longest on, by a loop."""
    while lengths:
        size = min(budget // lengths[0], most or budget)
        size -= size % multiple if size >= multiple else 0
        yield lengths[:size]
        lengths = lengths[size:]


@given(
    lengths=LENGTHS,
    budget=st.integers(10, 90),
    window=st.integers(1, 100),
    most=st.none() | st.integers(1, 6),
    multiple=st.integers(1, 4),
    ranks=RANKS,
    drop_last=st.booleans(),
)
@settings(max_examples=60)
def test_batches_are_filled_from_the_longest_on_within_windows(
    lengths, budget, window, most, multiple, ranks, drop_last
):
    kept = [number for number, length in enumerate(lengths) if length <= budget]
    assume(kept)
    options = {"window": window, "max_samples": most, "multiple_of": multiple, "too_long": "skip", "seed": 3}
    plan = TokenBudget(lengths, budget, drop_last=drop_last, **options)
    batches = [sorted((lengths[number] for number in batch), reverse=True) for batch in plan]
    sorted_windows = windows([lengths[number] for number in kept], window, 3)
    assert sorted(batches) == sorted(batch for one in sorted_windows for batch in filled(one, budget, most, multiple))
    assert (Counter(flat(plan)), plan.left_out) == (Counter(kept), len(lengths) - len(kept))
    room = sum(len(batch) * batch[0] for batch in batches)
    assert plan.padding == pytest.approx(1 - sum(map(sum, batches)) / room)
    if drop_last and len(batches) < ranks:
        with pytest.raises(ValueError, match=f"with drop_last each rank must have a batch, got {len(batches)} for "):
            plan.order_for(ranks)
        return
    order = check_ranks(plan, ranks, drop_last)
    counts = Counter(flat(order))
    again = counts.total() - len(counts)
    assert drop_last or counts.keys() == {*kept}
    assert again < ranks
    assert again == 0 or (max(map(len, order)) == 1 and not drop_last)
    assert all(len(batch) * max(lengths[number] for number in batch) <= budget for batch in order)


@pytest.mark.parametrize("power", [1, 2])
def test_the_batches_of_a_step_cost_nearly_the_same(power):
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int).clip(1, 2000)
    cost = None if power == 1 else (lambda samples, longest: samples * longest.astype(float) ** power)
    plan = TokenBudget(lengths, 8000, num_replicas=8, cost=cost)
    costs = np.array([len(batch) * int(lengths[batch].max()) ** power for batch in plan])

    def balance(costs):
        steps = costs.reshape(-1, 8)
        return (steps.max(axis=1) / steps.mean(axis=1)).mean()

    assert plan.balance().mean() == pytest.approx(balance(costs), rel=0.01)  # of halves the cost is estimated
    excess = balance(costs) - 1
    assert excess < 0.05
    assert excess < (balance(np.random.default_rng(0).permutation(costs)) - 1) / 4
    assert plan.padding < 0.05


# ---- packs


def fitted(lengths, room):
    """How many tokens packs hold, by a loop: each length goes into the fullest pack that has room for it."""
    packs = []
    for length in lengths:
        with_room = [held for held in packs if held + length <= room]
        if with_room:
            packs.remove(max(with_room))
        packs.append(max(with_room, default=0) + length)
    return packs


def units_of(lengths, room, too_long):
    """What is packed: number, first token and the one after the last."""
    for number, length in enumerate(lengths):
        if too_long == "split":
            yield from ((number, begin, min(begin + room, length)) for begin in range(0, length, room))
        elif too_long == "truncate" or length <= room:
            yield number, 0, min(length, room)


@given(
    lengths=LENGTHS,
    room=st.integers(3, 40),
    window=st.integers(1, 100),
    too_long=st.sampled_from(["skip", "truncate", "split", "concat"]),
    ranks=RANKS,
    drop_last=st.booleans(),
)
@settings(max_examples=100)
def test_packs_are_those_of_best_fit_decreasing_within_windows_or_of_all_samples_joined(
    lengths, room, window, too_long, ranks, drop_last
):
    joined = too_long == "concat"
    units = [*units_of(lengths, room, "split" if joined else too_long)]
    assume(units)
    options = {"algorithm": "concat"} if joined else {"too_long": too_long, "window": window}
    plan = Packing(lengths, room, drop_last=drop_last, seed=3, **options)
    whole = {number: (number, begin, end) for number, begin, end in units}  # of those that are not split

    def parts_of(packs):
        return [[part if isinstance(part, tuple) else whole[part] for part in pack] for pack in packs]

    packs = parts_of(plan)
    held, found, total = [tokens_of(pack).total() for pack in packs], tokens_of(flat(packs)), tokens_of(units).total()
    if joined:
        rest = [] if drop_last and total > room else [total % room][: total % room]
        assert sorted(held, reverse=True) == [room] * (total // room) + rest
        assert max(found.values()) == 1
    else:
        rooms = [fitted(one, room) for one in windows([end - begin for _, begin, end in units], window, 3)]
        assert sorted(held) == sorted(flat(rooms))
        assert found == tokens_of(units)
    assert (plan.too_many, plan.left_out) == (sum(length > room for length in lengths), sum(lengths) - total)
    assert plan.efficiency == pytest.approx(sum(held) / (room * len(held)))
    if drop_last and len(packs) < ranks:
        with pytest.raises(ValueError, match="with drop_last each rank must have a batch"):
            plan.order_for(ranks)
        return
    order = parts_of(check_ranks(plan, ranks, drop_last))
    dealt = tokens_of(flat(order))
    assert drop_last or dealt.keys() == found.keys()
    assert all(tokens_of(pack).total() <= room and all(end > begin for _, begin, end in pack) for pack in order)
    if max(dealt.values()) > 1:  # no pack can be halved
        assert not drop_last
        assert max(map(len, order)) == 1
        assert not joined or max(end - begin for _, begin, end in flat(order)) == 1


# ---- mixtures

WEIGHTS = st.integers(1, 9) | st.floats(0.01, 9, allow_subnormal=False)
SOURCES = st.lists(st.tuples(st.integers(1, 12), WEIGHTS), min_size=1, max_size=5)
MANY = np.random.default_rng(0).dirichlet(np.ones(40))  # without a common denominator


def drawn(mixture, sizes, epochs=1):
    """The sources of all samples, in order."""
    found = []
    for epoch in range(epochs):
        mixture.set_epoch(epoch)
        found += mixture
    found = np.array(found)
    sources = np.searchsorted(np.cumsum(sizes), found, "right")
    for source, size in enumerate(sizes):
        mine = found[sources == source].tolist()
        for turn in (mine[begin : begin + size] for begin in range(0, len(mine), size)):
            assert len({*turn}) == len(turn), "a source is read through before it begins again"
    return sources


def furthest(sources, *phases):
    """How many samples a source is at most off its share, at any step; phases are a first step and weights."""
    steps = np.searchsorted([begin for begin, _ in phases], np.arange(len(sources)), "right") - 1
    weights = np.array([np.divide(weights, np.sum(weights)) for _, weights in phases])
    counts = np.cumsum(sources[:, None] == np.arange(weights.shape[1]), axis=0)
    return np.abs(counts - np.cumsum(weights[steps], axis=0)).max()


@given(
    sources=SOURCES,
    size=st.integers(1, 200),
    seed=st.integers(0, 9),
    ranks=RANKS,
    block=st.sampled_from([1, 4, mixture_module._BLOCK]),
)
@settings(max_examples=40)
@example([(50, 1), (50, 1e-4)], 700, 0, 1, 4)
@example([(50, 1)] * 20, 700, 0, 1, 4)
@example([(50, weight) for weight in MANY], 700, 0, 1, 4)
def test_every_share_is_within_one_sample_and_ranks_share_the_epoch(sources, size, seed, ranks, block):
    sizes, weights = zip(*sources, strict=True)
    mixture = Mixture(sizes, weights, seed=seed, epoch_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_module, "_BLOCK", block)
        patch.setattr(mixture_module, "_AT_ONCE", 16 * block)
        found = drawn(mixture, sizes, epochs=2)
        order = check_ranks(mixture, ranks, drop_last=False)
    assert len(found) == 2 * size
    assert furthest(found, (0, weights)) <= 1.1 if len(sizes) == len(MANY) else 1 + 1e-6
    for step in {0, 1, size // 2, size, size + size // 3, 2 * size}:
        assert mixture.counts(step).tolist() == np.bincount(found[:step], minlength=len(sizes)).tolist()
    assert not Counter(mixture) - Counter(order)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    phases=st.lists(st.lists(st.integers(0, 3) | st.floats(0, 0.1), min_size=3, max_size=3), min_size=1, max_size=3),
    size=st.integers(1, 40),
)
@settings(max_examples=40)
def test_where_weights_change_or_are_tiny_no_sample_is_lost_between_epochs(sizes, phases, size):
    phases = [[max(weight, 1e-4) for weight in phases[0]], *(phase for phase in phases[1:] if sum(phase) > 0.01)]
    weights = [(number * 25, phase) for number, phase in enumerate(phases)]
    found = drawn(Mixture(sizes, weights, epoch_size=size), sizes, epochs=4)
    assert furthest(found, *weights) <= 1.5
    counted = Mixture(sizes, weights, epoch_size=size).counts(3 * size).tolist()
    assert counted == np.bincount(found[: 3 * size], minlength=3).tolist()


def test_where_an_epoch_ends():
    """Of 0.7 the first one, 100 samples, is used up; of 0.2 there are 50."""
    sizes, weights = [100, 50, 20], [0.7, 0.2, 0.1]
    first, all_read = (Mixture(sizes, weights, stop=stop) for stop in ("first", "all"))
    assert (len(first), len(all_read)) == (142, 250)
    assert (np.bincount(drawn(first, sizes)) <= sizes).all()
    assert (np.bincount(drawn(all_read, sizes)) >= sizes).all()
    sizes = [1009, 211, 13]
    assert sorted(Mixture(sizes, sizes)) == [*range(sum(sizes))]  # weights are lengths: each sample comes once
    in_order = Mixture([3, 2], [1, 1], shuffle=False, epoch_size=8)
    assert [*in_order] in ([0, 3, 1, 4, 2, 3, 0, 4], [3, 0, 4, 1, 3, 2, 4, 0])


def test_sources_by_name_are_those_in_their_order():
    sources, weights = {"web": [0] * 40, "books": [0] * 10}, {"books": 1, "web": 3}
    named, plain = Mixture(sources, weights, epoch_size=40), Mixture([40, 10], [3, 1], epoch_size=40)
    assert [*named] == [*plain]
    assert (named.sources, plain.sources) == ("web, books", "")
    changing = Mixture(sources, [(0, weights), (20, {"web": 0, "books": 1})], epoch_size=40)
    assert changing.counts(40).tolist() == [15, 25]
    assert "source web    30 samples, 75.000% of the epoch; 0.750 times its 40" in named.describe()
    assert "40 in an epoch, of 50 in 2 sources" in named.describe()


@pytest.mark.parametrize("count", [1, 2, 5000, 70_000])
def test_a_shuffled_order_has_every_number_once_in_whatever_parts_it_is_asked_for(count):
    whole = shuffled(np.arange(count), count, 3, 1)
    assert sorted(whole.tolist()) == [*range(count)]
    places = np.arange(count // 3, count // 2 + 1)
    assert shuffled(places, count, 3, 1).tolist() == whole[places].tolist()
    assert count < 1000 or abs(np.corrcoef(whole[1:], whole[:-1])[0, 1]) < 5 / count**0.5


# ---- epochs, states and ranks


class Asked:
    """Sample i is what was asked for."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index


def arguments_of(kind, plan):
    sampling = {"sampler": plan, "batch_size": 4} if kind == "mixture" else {"batch_sampler": plan}
    return {"dataset": Asked(), "collate_fn": list, **sampling}


def loader_of(kind, states=None, **options):
    """A loader whose epoch has at least 17 batches."""
    loader = rayloader.DataLoader(**arguments_of(kind, PLANS[kind](SIZES * 4)), **options)
    if states is None:
        loader.set_epoch(1)
    else:
        loader.load_state_dict(states)
    return loader


@given(
    kind=st.sampled_from([*PLANS]),
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    cuts=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
@settings(max_examples=40)
def test_what_ranks_have_not_taken_goes_to_any_other_number_of_ranks(kind, worlds, cuts):
    states, taken = None, []
    for world, cut in zip(worlds, [*cuts[: len(worlds) - 1], None], strict=True):
        loaders = [loader_of(kind, states, num_replicas=world, rank=rank) for rank in range(world)]
        taken.append([[*itertools.islice(loader, cut)] for loader in loaders])
        states = [loader.state_dict() for loader in loaders]
        assert len({*map(len, taken[-1])}) == 1
    if len({*worlds}) == 1:
        alone = [[*loader_of(kind, num_replicas=world, rank=rank)] for rank in range(world)]
        assert [flat(parts) for parts in zip(*taken, strict=True)] == alone
    items = flat(flat(flat(taken))), flat(loader_of(kind))
    seen, whole = (tokens_of(item if kind == "concat" else (item, 0, 1) for item in some) for some in items)
    assert not whole - seen
    if kind not in ("mixture", "concat"):  # of concat, a part may be cut in two where there are more ranks
        assert (seen - whole).total() <= len(worlds) * max(map(len, PLANS[kind](SIZES * 4)))


@pytest.mark.parametrize("kind", PLANS)
def test_torchs_loader_has_the_part_of_a_rank_and_ours_a_step_again_or_without_some(kind):
    part = PLANS[kind](SIZES * 4).for_rank(3, 1)
    assert isinstance(part, DistributedSampler)  # frameworks leave these alone
    part.set_epoch(1)
    ours = loader_of(kind, num_replicas=3, rank=1)
    assert [*TorchDataLoader(**arguments_of(kind, part))] == [*ours]
    with pytest.warns(UserWarning, match="this epoch has the same random order"):
        next(iter(ours))
    whole, fresh = [*loader_of(kind)], loader_of(kind)
    assert fresh.batch_at(0, 3, state=fresh.state_dict()) == whole[3]
    skipping = loader_of(kind, skip_steps=[1, 3])
    assert [*skipping] == [batch for step, batch in enumerate(whole) if step not in (1, 3)]


def test_a_state_is_for_the_plan_that_was_saved():
    loader = loader_of("budget")
    next(iter(loader))
    for sizes, seed in (SIZES * 4, 4), (SIZES[::-1] * 4, 1):
        plan = TokenBudget(sizes, 60, window=8, seed=seed)
        again = rayloader.DataLoader(**arguments_of("budget", plan))
        again.load_state_dict(loader.state_dict())
        with pytest.raises(rayloader.StateError, match="the sampler did not reproduce its indices"):
            iter(again)


# ---- readers at the same time


def order(make, epoch, ranks):
    """Of a plan that nobody else reads."""
    (plan := make()).set_epoch(epoch)
    return [*plan.order_for(ranks)]


@plans
def test_iterators_that_are_read_in_turns_are_of_the_epoch_in_which_they_were_made(make, small_parts):
    plan = make()
    early, late = iter(plan), iter(plan)
    plan.set_epoch(1)
    other = iter(plan)
    plan.set_epoch(2)
    begin = [*itertools.islice(early, len(plan) // 2)]
    middle, also = zip(*zip(early, late, strict=False), strict=True)
    assert [*begin, *middle] == [*also, *late] == order(make, 0, 1)
    assert [*other] == order(make, 1, 1)


@plans
@turns
def test_threads_may_read_orders_set_the_epoch_and_count_what_is_read(make, turns, small_parts):
    """An order that is made while the epoch is set is of the one or of the other."""

    def found(*readers):
        return interleaved(readers, "rayloader/plans", turns)

    plan, whole, expected = make(), make().order_for(2), order(make, 0, 2)
    assert found(lambda: [*whole], lambda: [*whole[1::2]]) == [expected, expected[1::2]]
    readers = [lambda: [*plan.order_for(1)], lambda: [*plan.order_for(2)], lambda: [*plan.for_rank(3, 1)]]
    assert found(*readers) == [order(make, 0, 1), expected, order(make, 0, 3)[1::3]]
    plan, orders = make(), [order(make, epoch, 2) for epoch in range(2)]
    assert found(lambda: [*plan.order_for(2)], lambda: plan.set_epoch(1))[0] in orders
    for epoch in (0, 1):
        plan.set_epoch(epoch)
        assert [*plan.order_for(2)] == orders[epoch]
    if isinstance(plan, Mixture):
        steps, plan, alone = [5, 130, 150, 220], make(), make()
        expected = [alone.counts(step).tolist() for step in steps]
        assert found(*(lambda step=step: plan.counts(step).tolist() for step in steps)) == expected


@plans
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_an_order_depends_on_seed_and_epoch_alone_and_a_copy_has_nothing_of_what_was_made(make, copied):
    plan, other = make(), make()
    first, again = [*plan], copied(plan)
    changed = copied(plan)
    assert [*again] == first == [*make()]
    changed.seed = other.seed = 9
    assert [*changed] == [*other] != first
    plan.set_epoch(1)
    assert [*plan] == order(make, 1, 1) != first


# ---- arguments


def test_lengths_are_arrays_tensors_columns_and_memory_maps(tmp_path):
    mapped = np.memmap(tmp_path / "lengths", np.int32, "w+", shape=3)
    mapped[:] = [3, 1, 2]
    for lengths in ([3, 1, 2], torch.tensor([3, 1, 2]), pa.chunked_array([[3, 1], [2]]), np.uint8([3, 1, 2]), mapped):
        assert lengths_of(lengths).tolist() == [3, 1, 2]
    assert np.shares_memory(lengths_of(mapped), mapped)


def budget(lengths=(10, 10, 10), max_tokens=50, **options):
    return lambda: len(TokenBudget(lengths, max_tokens, **options))


def mixture(sources, weights, **options):
    return lambda: Mixture(sources, weights, **options)


MOST = 2**32 - 1
NO_COST = "cost must give a finite number above 0 for each of 1 batches"
NAMES = "weights must have the names of the sources"
ABOVE = "above 0 for each source at some step and for some source at each step"
WRONG = [
    *((f"lengths must be a number for each of 1 to {MOST} samples", budget(of)) for of in ([], [[1]])),
    *((f"lengths must be from 1 to {MOST}, and sample 1 has {bad}", budget([3, bad])) for bad in (-1, 0)),
    ("lengths must be whole numbers, got the type float64; fill in", budget(pa.array([1, None]))),
    *((NO_COST, budget(cost=lambda *_, of=of: np.array(of))) for of in ([np.nan], [0.0], [1.0, 2.0])),
    ("must fit into max_tokens=50, and sample 2 has the length 60", budget([1, 2, 60, 70])),
    ("all of 2 samples are longer than max_tokens=50", budget([60, 70], too_long="skip")),
    ("too_long must be one of error, skip, got 'split'", budget([60, 70], too_long="split")),
    ("must fit into seq_len=10, and sample 1 has the length 25", lambda: Packing([5, 25], 10)),
    ("algorithm must be", lambda: Packing([5], 10, algorithm="first-fit")),
    ("num_replicas must be a whole number >= 3", lambda: TokenBudget([1], 1).for_rank(2, 2)),
    ("epoch must be a whole number >= 0", lambda: TokenBudget([1], 1).set_epoch(-1)),
    *(("a mixture must have at least one source", mixture(none, none)) for none in ([], {})),
    ("a number of samples, of at least 1, and source 0 is 0;", mixture([0], [1])),
    ("a source must be a dataset with a length, .* and source 0 is <", mixture([iter(())], [1])),
    (r"weights must be finite, .* got \[1, 0\]; leave a source out", mixture([1, 1], [1, 0])),
    (r"weights must be finite, .* got \[1, nan\]", mixture([1, 1], [1, float("nan")])),
    ("there must be one weight for each of the 2 sources", mixture([1, 1], [1])),
    *((ABOVE, mixture([1, 1], [(0, [1, first]), (5, [second, 0])])) for first, second in ((1, 0), (0, 1))),
    ("weights that change must be for steps that begin with 0", mixture([1, 1], [(5, [1, 1])])),
    (f"{NAMES}, which have none", mixture([1, 1], {"a": 1, "b": 2})),
    (rf"{NAMES}, \['a', 'b'\], got \[1, 2\]", mixture({"a": 1, "b": 1}, [1, 2])),
    (NAMES, mixture({"a": 1, "b": 1}, [(0, {"a": 1, "b": 2}), (9, {"a": 1})])),
    ("stop must be .*; a number of samples is epoch_size", mixture([1], [1], stop=0)),
    ("source 1 is never used up", mixture([1, 1], [(0, [1, 1]), (1, [1, 0])], stop="all")),
    ("epoch_size must be a whole number >= 1", mixture([1], [1], epoch_size=0)),
    ("seed must be a whole number >= 0", mixture([1], [1], seed=-1)),
]


@pytest.mark.parametrize(("error", "call"), WRONG)
def test_what_makes_no_sense_is_an_error(error, call):
    with pytest.raises((ValueError, TypeError), match=error):
        call()


WRONG_PLACES = [
    {"sampler": TokenBudget(SIZES, 60)},
    {"sampler": TokenBudget(SIZES, 60).for_rank(2, 0)},
    {"batch_sampler": BatchSampler(TokenBudget(SIZES, 60), 4, False)},
    {"batch_sampler": Mixture([40], [1])},
    {"batch_sampler": Mixture([40], [1]).for_rank(2, 0)},
]


@pytest.mark.parametrize("case", range(len(WRONG_PLACES)))
def test_a_plan_of_batches_is_no_sampler_of_samples_and_the_other_way_round(case):
    error = "TokenBudget gives whole batches.*batch_sampler=" if case < 3 else "Mixture gives samples.*with batch_size="
    for more in ({}, {"num_replicas": 2, "rank": 0})[: 2 if case == 0 else 1]:
        with pytest.raises(ValueError, match=error):
            rayloader.DataLoader(SIZES, **WRONG_PLACES[case], **more)
    if case < 3:
        with rayloader.patch(), pytest.raises(ValueError, match=error):
            TorchDataLoader(SIZES, **WRONG_PLACES[case])
