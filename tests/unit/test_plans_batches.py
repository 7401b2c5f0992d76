"""Plans of batches against brute force: budgets, packs, equal steps of nearly equal cost."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader as TorchDataLoader

import rayloader
from rayloader.plans import Mixture, Packing, TokenBudget
from rayloader.plans.budgets import best_fit
from rayloader.plans.sample_lengths import lengths_of

SIZES = [1 + 7 * number % 19 for number in range(60)]
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=80)
RANKS = st.integers(1, 5)


def flat(batches):
    return [item for batch in batches for item in batch]


def repeated(found, count):
    """How often samples come more than once, where all are to come at least once."""
    counts = Counter(found)
    assert sorted(counts) == [*range(count)]
    return len(found) - count


@given(
    lengths=LENGTHS,
    budget=st.integers(20, 90),
    window=st.integers(1, 30),
    most=st.none() | st.integers(1, 6),
    multiple=st.integers(1, 4),
    ranks=RANKS,
)
@settings(deadline=None, max_examples=50)
def test_batches_stay_within_the_budget_and_have_every_sample(lengths, budget, window, most, multiple, ranks):
    plan = TokenBudget(lengths, budget, window=window, max_samples=most, multiple_of=multiple)
    order = plan.order_for(ranks)
    for batch in order:
        assert batch
        assert len(batch) * max(lengths[sample] for sample in batch) <= budget
        assert most is None or len(batch) <= most
    assert len(order) % ranks == 0
    again = repeated(flat(order), len(lengths))
    assert again < ranks
    assert again == 0 or max(map(len, order)) == 1  # no batch can be halved
    assert [[*plan.for_rank(ranks, rank)] for rank in range(ranks)] == [[*order[rank::ranks]] for rank in range(ranks)]
    assert {len(plan.for_rank(ranks, rank)) for rank in range(ranks)} == {len(order) // ranks}


def filled(lengths, budget):
    """Batches of the whole, sorted."""
    batches, batch = [], []
    for number in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            batches, batch = [*batches, batch], []
        batch.append(number)
    return [*batches, batch]


@given(lengths=LENGTHS, budget=st.integers(20, 90))
@settings(deadline=None, max_examples=30)
def test_batches_of_one_window_are_those_of_a_loop(lengths, budget):
    found = sorted(sorted(lengths[i] for i in batch) for batch in TokenBudget(lengths, budget))
    assert found == sorted(sorted(lengths[i] for i in batch) for batch in filled(lengths, budget))


def test_batches_are_multiples_where_more_fit():
    sizes = Counter(map(len, TokenBudget([3] * 100, 40, multiple_of=8)))
    assert sizes == {8: 12, 4: 1}


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


def test_another_epoch_is_another_plan_and_the_same_one_the_same():
    lengths = [*range(1, 200)]
    plan = TokenBudget(lengths, 400)
    first = [*plan]
    plan.set_epoch(1)
    second = [*plan]
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second))
    again = TokenBudget(lengths, 400)
    again.set_epoch(1)
    assert [*again] == second
    assert [*TokenBudget(lengths, 400, seed=1)] != first


def test_an_iterator_goes_on_in_its_own_epoch():
    plan = TokenBudget([*range(1, 50)], 100)
    whole, iterator = [*plan], iter(plan)
    begun = [next(iterator)]
    plan.set_epoch(5)
    len(plan)
    assert [*begun, *iterator] == whole


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_last_step_may_be_left_out(ranks):
    whole = len(TokenBudget([10] * 50, 30))
    plan = TokenBudget([10] * 50, 30, num_replicas=ranks, drop_last=True)
    assert len(plan) == whole // ranks * ranks
    assert max(Counter(flat(plan)).values()) == 1


def test_too_few_batches_for_the_ranks():
    plan = TokenBudget([10] * 3, 30, num_replicas=4, drop_last=True)
    with pytest.raises(ValueError, match="with drop_last each rank must have a batch, got 1 for 4 ranks"):
        len(plan)


def test_samples_above_the_budget_are_named_or_left_out():
    with pytest.raises(ValueError, match="must fit into max_tokens=50, and sample 2 has the length 60"):
        TokenBudget([1, 2, 60, 70], 50)
    plan = TokenBudget([1, 2, 60, 70], 50, too_long="skip")
    assert sorted(flat(plan)) == [0, 1]
    assert plan.left_out == 2
    with pytest.raises(ValueError, match="all of 2 samples are longer than max_tokens=5"):
        TokenBudget([60, 70], 5, too_long="skip")
    with pytest.raises(ValueError, match="too_long must be one of error, skip, got 'split'"):
        TokenBudget([60, 70], 5, too_long="split")


@pytest.mark.parametrize(
    ("lengths", "error"),
    [
        ([], "lengths must be a number for each of 1 to 4294967295 samples"),
        ([[1]], "lengths must be a number for each of 1 to 4294967295 samples"),
        ([3, -1], "lengths must be from 1 to 4294967295, and sample 1 has -1"),
        ([3, 0], "lengths must be from 1 to 4294967295, and sample 1 has 0"),
        ([3.0, float("nan")], "lengths must be whole numbers, got the type float64; fill in"),
        ([0.5, 1.5], "lengths must be whole numbers, got the type float64"),
        (pa.array([1, None]), "lengths must be whole numbers, got the type float64; fill in"),
    ],
)
def test_lengths_that_make_no_sense(lengths, error):
    with pytest.raises((ValueError, TypeError), match=error):
        TokenBudget(lengths, 100)


def test_lengths_are_arrays_tensors_columns_and_memory_maps(tmp_path):
    mapped = np.memmap(tmp_path / "lengths", np.int32, "w+", shape=3)
    mapped[:] = [3, 1, 2]
    columns = pa.chunked_array([[3, 1], [2]])
    for lengths in ([3, 1, 2], torch.tensor([3, 1, 2]), columns, np.array([3, 1, 2], np.uint8), mapped):
        assert lengths_of(lengths).tolist() == [3, 1, 2]
    assert np.shares_memory(lengths_of(mapped), mapped)


@pytest.mark.parametrize("wrong", [np.array([np.nan]), np.array([0.0]), np.array([1.0, 2.0])])
def test_costs_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="cost must give a finite number above 0 for each of 1 batches"):
        len(TokenBudget([1, 2], 10, cost=lambda *_: wrong))


# ---- packs


def fitted(lengths, room):
    """What is left of packs, by a loop."""
    packs = []
    for length in lengths:
        with_room = [left for left in packs if left >= length]
        if with_room:
            packs.remove(left := min(with_room))
        packs.append((left if with_room else room) - length)
    return sorted(packs)


@given(room=st.integers(1, 40), data=st.data())
@settings(deadline=None, max_examples=50)
def test_packs_are_those_of_best_fit_decreasing(room, data):
    lengths = sorted(data.draw(st.lists(st.integers(1, room), min_size=1, max_size=60)), reverse=True)
    held = np.bincount(best_fit(np.array(lengths), room), lengths)
    assert sorted((room - held).astype(int).tolist()) == fitted(lengths, room)


@given(lengths=LENGTHS, room=st.integers(20, 60), window=st.integers(1, 40), ranks=RANKS)
@settings(deadline=None, max_examples=40)
def test_packs_have_every_sample_and_never_more_than_fits(lengths, room, window, ranks):
    order = Packing(lengths, room, window=window).order_for(ranks)
    assert all(sum(lengths[sample] for sample in pack) <= room for pack in order)
    assert len(order) % ranks == 0
    assert repeated(flat(order), len(lengths)) == 0 or max(map(len, order)) == 1


@given(lengths=LENGTHS, room=st.integers(1, 30), ranks=RANKS, algorithm=st.sampled_from(["concat", "best-fit"]))
@settings(deadline=None, max_examples=50)
def test_parts_of_samples_have_every_token_once(lengths, room, ranks, algorithm):
    plan = Packing(lengths, room, algorithm=algorithm, too_long="split")
    order = [*plan.order_for(ranks)]
    parts = [part if isinstance(part, tuple) else (part, 0, lengths[part]) for pack in order for part in pack]
    tokens = [(number, token) for number, begin, end in parts for token in range(begin, end)]
    assert {*tokens} == {(number, token) for number, length in enumerate(lengths) for token in range(length)}
    if len({*tokens}) < len(tokens):  # no pack can be halved
        assert max(map(len, order)) == 1
        assert algorithm == "best-fit" or max(end - begin for _, begin, end in parts) == 1
    assert all(end > begin for _, begin, end in parts)
    if algorithm == "concat" and ranks == 1:
        held = [sum(end - begin for _, begin, end in pack) for pack in order]
        assert sorted(held, reverse=True)[:-1] == [room] * (len(held) - 1)


def test_concat_may_drop_the_last_pack():
    plan = Packing([7, 8], 4, algorithm="concat", drop_last=True)
    assert plan.efficiency == 1
    assert len(plan) == 3


def test_a_log_normal_fills_packs():
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(np.log(500) - 0.5, 1, 50_000).astype(int).clip(1, 4096)
    plan = Packing(lengths, 4096)
    assert plan.efficiency > 0.98
    assert Packing(lengths, 4096, window=4096).efficiency > 0.98


@pytest.mark.parametrize(("too_long", "left_out"), [("skip", 25), ("truncate", 15), ("split", 0)])
def test_what_becomes_of_samples_that_are_too_long(too_long, left_out):
    plan = Packing([5, 25, 10], 10, too_long=too_long)
    assert (plan.too_many, plan.left_out) == (1, left_out)
    packs = sorted(map(sorted, plan))
    assert (
        packs
        == {
            "skip": [[0], [2]],
            "truncate": [[0], [1], [2]],
            "split": [[(0, 0, 5), (1, 20, 25)], [(1, 0, 10)], [(1, 10, 20)], [(2, 0, 10)]],
        }[too_long]
    )
    assert (how := {"skip": "left out", "truncate": "cut off", "split": "split"}[too_long]) in plan.describe(), how


def test_what_they_tell_of_themselves():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    budget = TokenBudget(lengths, 300, num_replicas=2)
    text = budget.describe()
    assert "samples  500\n" in text
    assert f"{len(budget) // 2:,} for 2 ranks; the most expensive batch" in text
    assert f"{budget.padding:.2%} of the tokens" in text
    assert "efficiency" in Packing(lengths, 300).describe()
    assert "for one rank" in Packing(lengths, 300).describe()
    assert "12 tokens" in Packing([3, 4, 5], 8).describe()


def test_wrong_arguments_of_packing():
    with pytest.raises(ValueError, match="must fit into seq_len=10, and sample 1 has the length 25"):
        Packing([5, 25], 10)
    with pytest.raises(ValueError, match="algorithm must be"):
        Packing([5], 10, algorithm="first-fit")


def test_ranks_of_a_plan():
    plan = TokenBudget([1], 1)
    with pytest.raises(ValueError, match="num_replicas must be a whole number >= 3"):
        plan.for_rank(2, 2)
    with pytest.raises(ValueError, match="epoch must be a whole number >= 0"):
        plan.set_epoch(-1)


# ---- where plans are given

WRONG_PLACES = {
    "sampler": (lambda: {"sampler": TokenBudget(SIZES, 60)}, "TokenBudget gives whole batches.*batch_sampler="),
    "sampler, of a rank": (lambda: {"sampler": Packing(SIZES, 60).for_rank(2, 0)}, "Packing gives.*batch_sampler="),
    "sampler, with a size": (
        lambda: {"sampler": Packing(SIZES, 60), "batch_size": 4, "drop_last": True},
        "Packing gives whole batches.*batch_sampler=",
    ),
    "in a batch sampler": (
        lambda: {"batch_sampler": BatchSampler(TokenBudget(SIZES, 60), 4, False)},
        "TokenBudget gives whole batches.*batch_sampler=",
    ),
}


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_a_plan_of_batches_is_no_sampler_of_samples(case):
    given, error = WRONG_PLACES[case]
    with pytest.raises(ValueError, match=error):
        rayloader.DataLoader(SIZES, **given())
    with rayloader.patch(), pytest.raises(ValueError, match=error):
        TorchDataLoader(SIZES, **given())


def test_a_plan_of_batches_among_ranks_is_none_either():
    with pytest.raises(ValueError, match="TokenBudget gives whole batches"):
        rayloader.DataLoader(SIZES, sampler=TokenBudget(SIZES, 60), num_replicas=2, rank=0)


def test_a_dataset_may_be_asked_for_whole_batches():
    class Whole(list):
        def __getitem__(self, indices):
            return [super(Whole, self).__getitem__(index) for index in indices]

    plan = TokenBudget(SIZES, 60)
    for loader_class in (rayloader.DataLoader, TorchDataLoader):
        loader = loader_class(Whole(range(60)), sampler=plan, batch_size=None, collate_fn=list)
        assert [*loader] == [*plan]


@pytest.mark.parametrize("rank", [None, 0])
def test_a_plan_of_samples_is_no_batch_sampler(rank):
    plan = Mixture([40], [1])
    with pytest.raises(
        ValueError, match=r"Mixture gives samples, and batch_sampler must .* sampler=, with batch_size="
    ):
        rayloader.DataLoader(SIZES, batch_sampler=plan if rank is None else plan.for_rank(2, rank))
