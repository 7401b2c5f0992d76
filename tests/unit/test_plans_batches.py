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


def check_all_come(order, lengths, ranks):
    """Each rank has equally many batches, and samples come again only if no batch can be halved."""
    counts = Counter(flat(order))
    assert sorted(counts) == [*range(len(lengths))]
    assert len(order) % ranks == 0
    again = counts.total() - len(lengths)
    assert again < ranks
    assert again == 0 or max(map(len, order)) == 1


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
    check_all_come(order, lengths, ranks)
    for batch in order:
        assert len(batch) * max(lengths[sample] for sample in batch) <= budget
        assert most is None or len(batch) <= most
    assert [[*plan.for_rank(ranks, rank)] for rank in range(ranks)] == [[*order[rank::ranks]] for rank in range(ranks)]
    assert {len(plan.for_rank(ranks, rank)) for rank in range(ranks)} == {len(order) // ranks}


def filled(lengths, budget):
    """Batches of the whole, from the longest on."""
    batches, batch = [], []
    for length in sorted(lengths, reverse=True):
        if batch and (len(batch) + 1) * batch[0] > budget:
            batches, batch = [*batches, batch], []
        batch.append(length)
    return [*batches, batch]


@given(lengths=LENGTHS, budget=st.integers(20, 90))
@settings(deadline=None, max_examples=30)
def test_batches_of_one_window_are_those_of_a_loop_and_multiples_where_more_fit(lengths, budget):
    found = [sorted((lengths[i] for i in batch), reverse=True) for batch in TokenBudget(lengths, budget)]
    assert sorted(found) == sorted(filled(lengths, budget))
    assert Counter(map(len, TokenBudget([3] * 100, 40, multiple_of=8))) == {8: 12, 4: 1}


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
    plan, again = TokenBudget(SIZES, 100), TokenBudget(SIZES, 100)
    first = [*plan]
    plan.set_epoch(1)
    again.set_epoch(1)
    assert first != [*plan] == [*again]
    assert sorted(flat(first)) == sorted(flat(plan))
    assert [*TokenBudget(SIZES, 100, seed=1)] != first


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_last_step_may_be_left_out(ranks):
    whole = len(TokenBudget([10] * 50, 30))
    plan = TokenBudget([10] * 50, 30, num_replicas=ranks, drop_last=True)
    assert len(plan) == whole // ranks * ranks
    assert max(Counter(flat(plan)).values()) == 1


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
    check_all_come(order, lengths, ranks)


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


def test_how_full_packs_are():
    plan = Packing([7, 8], 4, algorithm="concat", drop_last=True)
    assert (plan.efficiency, len(plan)) == (1, 3)
    lengths = np.random.default_rng(0).lognormal(np.log(500) - 0.5, 1, 50_000).astype(int).clip(1, 4096)
    assert Packing(lengths, 4096).efficiency > 0.98
    assert Packing(lengths, 4096, window=4096).efficiency > 0.98


@pytest.mark.parametrize(
    ("too_long", "left_out", "said", "packs"),
    [
        ("skip", 25, "left out", [[0], [2]]),
        ("truncate", 15, "cut off", [[0], [1], [2]]),
        ("split", 0, "split", [[(0, 0, 5), (1, 20, 25)], [(1, 0, 10)], [(1, 10, 20)], [(2, 0, 10)]]),
    ],
)
def test_what_becomes_of_samples_that_are_too_long(too_long, left_out, said, packs):
    plan = Packing([5, 25, 10], 10, too_long=too_long)
    assert (plan.too_many, plan.left_out) == (1, left_out)
    assert sorted(map(sorted, plan)) == packs
    assert said in plan.describe()
    budget = TokenBudget([1, 2, 60, 70], 50, too_long="skip")
    assert (sorted(flat(budget)), budget.left_out) == ([0, 1], 2)


# ---- arguments


def test_lengths_are_arrays_tensors_columns_and_memory_maps(tmp_path):
    mapped = np.memmap(tmp_path / "lengths", np.int32, "w+", shape=3)
    mapped[:] = [3, 1, 2]
    columns = pa.chunked_array([[3, 1], [2]])
    for lengths in ([3, 1, 2], torch.tensor([3, 1, 2]), columns, np.array([3, 1, 2], np.uint8), mapped):
        assert lengths_of(lengths).tolist() == [3, 1, 2]
    assert np.shares_memory(lengths_of(mapped), mapped)


NO_COST = "cost must give a finite number above 0 for each of 1 batches"
WRONG = [
    *((f"lengths must be a number for each of 1 to {2**32 - 1} samples", {"lengths": of}) for of in ([], [[1]])),
    (f"lengths must be from 1 to {2**32 - 1}, and sample 1 has -1", {"lengths": [3, -1]}),
    (f"lengths must be from 1 to {2**32 - 1}, and sample 1 has 0", {"lengths": [3, 0]}),
    ("lengths must be whole numbers, got the type float64; fill in", {"lengths": [3.0, float("nan")]}),
    ("lengths must be whole numbers, got the type float64; fill in", {"lengths": pa.array([1, None])}),
    *((NO_COST, {"cost": lambda *_, of=of: np.array(of)}) for of in ([np.nan], [0.0], [1.0, 2.0])),
    ("must fit into max_tokens=50, and sample 2 has the length 60", {"lengths": [1, 2, 60, 70]}),
    ("all of 2 samples are longer than max_tokens=50", {"lengths": [60, 70], "too_long": "skip"}),
    ("too_long must be one of error, skip, got 'split'", {"lengths": [60, 70], "too_long": "split"}),
    ("with drop_last each rank must have a batch, got 1 for 4 ranks", {"num_replicas": 4, "drop_last": True}),
]


@pytest.mark.parametrize(("error", "arguments"), WRONG)
def test_arguments_that_make_no_sense(error, arguments):
    with pytest.raises((ValueError, TypeError), match=error):
        len(TokenBudget(**{"lengths": [10] * 3, "max_tokens": 50, **arguments}))


def test_arguments_of_packing_and_of_ranks_that_make_no_sense():
    plan = TokenBudget([1], 1)
    for error, call in {
        "must fit into seq_len=10, and sample 1 has the length 25": lambda: Packing([5, 25], 10),
        "algorithm must be": lambda: Packing([5], 10, algorithm="first-fit"),
        "num_replicas must be a whole number >= 3": lambda: plan.for_rank(2, 2),
        "epoch must be a whole number >= 0": lambda: plan.set_epoch(-1),
    }.items():
        with pytest.raises(ValueError, match=error):
            call()


WRONG_PLACES = {
    "sampler": lambda: {"sampler": TokenBudget(SIZES, 60)},
    "sampler, of a rank": lambda: {"sampler": TokenBudget(SIZES, 60).for_rank(2, 0)},
    "sampler, with a size": lambda: {"sampler": TokenBudget(SIZES, 60), "batch_size": 4, "drop_last": True},
    "in a batch sampler": lambda: {"batch_sampler": BatchSampler(TokenBudget(SIZES, 60), 4, False)},
}


@pytest.mark.parametrize("case", WRONG_PLACES)
def test_a_plan_of_batches_is_no_sampler_of_samples(case):
    given, error = WRONG_PLACES[case], "TokenBudget gives whole batches.*batch_sampler="
    with pytest.raises(ValueError, match=error):
        rayloader.DataLoader(SIZES, **given())
    with rayloader.patch(), pytest.raises(ValueError, match=error):
        TorchDataLoader(SIZES, **given())
    if case == "sampler":
        with pytest.raises(ValueError, match="TokenBudget gives whole batches"):
            rayloader.DataLoader(SIZES, **given(), num_replicas=2, rank=0)


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
    error = r"Mixture gives samples, and batch_sampler must .* sampler=, with batch_size="
    with pytest.raises(ValueError, match=error):
        rayloader.DataLoader(SIZES, batch_sampler=plan if rank is None else plan.for_rank(2, rank))
