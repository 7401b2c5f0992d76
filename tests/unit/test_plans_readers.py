"""Plans that several iterators and threads read at once: each reader gets what it would get alone."""

import copy
import pickle

import pytest

from interleaved import interleaved
from rayloader.plans import Mixture, Packing, TokenBudget
from rayloader.plans import mixture as mixture_module

SIZES = [1 + 7 * number % 19 for number in range(30)]
PLANS = {
    "mixture": lambda: Mixture([20, 30], [(0, [1, 2]), (130, [2, 1])], seed=1, epoch_size=100),
    "budget": lambda: TokenBudget(SIZES, 60, window=8, seed=1),
    "best-fit": lambda: Packing(SIZES, 60, window=8, seed=1),
    "concat": lambda: Packing(SIZES, 60, algorithm="concat", seed=1),
}
plans = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in PLANS.items()])
turns = pytest.mark.parametrize("turns", range(2))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """An epoch of a mixture is made in parts."""
    monkeypatch.setattr(mixture_module, "_BLOCK", 8)
    monkeypatch.setattr(mixture_module, "_AT_ONCE", 32)


def order(make, epoch, ranks):
    """Of a plan that nobody else reads."""
    plan = make()
    plan.set_epoch(epoch)
    return [*plan.order_for(ranks)]


@plans
def test_iterators_that_are_read_in_turns_are_of_the_epoch_in_which_they_were_made(make):
    plan = make()
    early, late = iter(plan), iter(plan)
    plan.set_epoch(1)
    other, len_of_other = iter(plan), len(plan)
    plan.set_epoch(2)
    first, second = [next(early) for _ in range(len_of_other // 2)], []
    for item in early:
        first.append(item)
        second.append(next(late))
    assert first == [*second, *late] == order(make, 0, 1)
    assert [*other] == order(make, 1, 1)


@plans
@turns
def test_threads_that_read_orders_of_several_numbers_of_ranks(make, turns):
    plan, whole = make(), make().order_for(2)
    readers = [lambda: [*whole], lambda: [*whole[1::2]], lambda: [whole[place] for place in range(len(whole))]]
    expected = order(make, 0, 2)
    assert interleaved(readers, "rayloader/plans", turns) == [expected, expected[1::2], expected]
    readers = [lambda: [*plan.order_for(1)], lambda: [*plan.order_for(2)], lambda: [*plan.for_rank(3, 1)]]
    expected = [order(make, 0, 1), order(make, 0, 2), order(make, 0, 3)[1::3]]
    assert interleaved(readers, "rayloader/plans", turns) == expected


@plans
@turns
def test_a_thread_that_sets_the_epoch_while_another_makes_an_order(make, turns):
    """The order is of the one epoch or of the other, and who asks for either later gets that."""
    plan = make()
    found, _ = interleaved([lambda: [*plan.order_for(2)], lambda: plan.set_epoch(1)], "rayloader/plans", turns)
    assert found in (order(make, 0, 2), order(make, 1, 2))
    for epoch in (0, 1):
        plan.set_epoch(epoch)
        assert [*plan.order_for(2)] == order(make, epoch, 2)


@turns
def test_threads_that_count_what_is_read_of_a_mixture(turns):
    steps, plan, alone = [5, 130, 150, 220], PLANS["mixture"](), PLANS["mixture"]()
    readers = [lambda step=step: plan.counts(step).tolist() for step in steps]
    assert interleaved(readers, "rayloader/plans", turns) == [alone.counts(step).tolist() for step in steps]


@pytest.mark.parametrize("ranks", [1, 3, 7, 64])
def test_the_whole_order_of_a_mixture_is_made_once_for_any_number_of_ranks(ranks, monkeypatch):
    read, places = mixture_module.Stream.read, []
    monkeypatch.setattr(mixture_module.Stream, "read", lambda *of: places.append(of[2] - of[1]) or read(*of))
    plan = Mixture([300, 100], [0.7, 0.3], epoch_size=5000)
    assert sum(1 for _ in plan.order_for(ranks)) == sum(places) == -(-5000 // ranks) * ranks


@plans
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_has_nothing_of_what_was_made(make, copied):
    plan, other = make(), make()
    assert [*copied(plan)] == [*plan]
    changed = copied(plan)
    changed.seed = other.seed = 9
    assert [*changed] == [*other] != [*plan]
