"""States of all ranks, resumed with other numbers of ranks: each rank gets what a model deals out to it.

Without workers; tests/integration/test_ranks.py has some with workers.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

import stateful
from rayloader import DataLoader, StateError
from states import Stream

LENGTH, SEED = 23, 1
DATA = torch.arange(LENGTH)


class Buckets(Sampler):
    """Batches of several sizes, always in the same list."""

    def __iter__(self):
        batch = []
        for size in torch.randperm(7).tolist():
            batch[:] = torch.randint(LENGTH, (size + 1,)).tolist()
            yield batch

    def __len__(self):
        return 7


def held():
    return torch.Generator().manual_seed(3)


def shuffled(**options):
    return RandomSampler(DATA, generator=held(), **options)


# What a loader is given beside the ranks, anew for each.
KINDS = {
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "shuffle, drop_last": lambda: {"batch_size": 2, "shuffle": True, "drop_last": True},
    "no shuffle": lambda: {"batch_size": 3},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "global generators": lambda: {"batch_size": None, "sampler": stateful.Lazy()},
    "generator": lambda: {"batch_size": 4, "sampler": shuffled(replacement=True)},
    "batch sampler": lambda: {"batch_sampler": Buckets()},
    "batch sampler that drops": lambda: {"batch_sampler": BatchSampler(shuffled(), 4, drop_last=True)},
}


def seed(number):
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def rank_of(kind, num_replicas, rank, **options):
    seed(rank)  # the ranks' global generators differ
    return DataLoader(DATA, **KINDS[kind](), num_replicas=num_replicas, rank=rank, seed=SEED, **options)


def items_of(kind, epoch):
    """What is dealt in an epoch, in order: samples, or the batches of a batch sampler."""
    arguments = KINDS[kind]()
    alone = DistributedSampler(DATA, 1, 0, arguments.get("shuffle", False), SEED)
    sampler = arguments.get("batch_sampler", arguments.get("sampler", alone))
    for number in range(epoch + 1):
        alone.set_epoch(number)
        seed(SEED + number)
        items = [item.copy() if isinstance(item, list) else item for item in sampler]
    return items


def dealt(kind, places, num_replicas):
    """The places of each rank, in its batches."""
    arguments = KINDS[kind]()
    size = 1 if "batch_sampler" in arguments else arguments["batch_size"] or 1
    drops = "drop" in kind
    count = len(places) - len(places) % num_replicas if drops else len(places) + -len(places) % num_replicas
    whole = (places * (num_replicas + 1))[:count]
    shares = [whole[rank::num_replicas] for rank in range(num_replicas)]
    batches = [[share[at : at + size] for at in range(0, len(share), size)] for share in shares]
    return [[batch for batch in mine if len(batch) == size or not drops] for mine in batches]


def given_for(kind, items, batches):
    """What a loader gives for batches of places."""
    is_single = "batch_sampler" in KINDS[kind]() or KINDS[kind]()["batch_size"] is None
    return [items[batch[0]] if is_single else [items[place] for place in batch] for batch in batches]


ROUNDS = st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=4, max_size=4)), max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(ROUNDS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 1))
def test_each_rank_gets_what_the_model_deals_out(kind, rounds, last, following, epoch):
    """However often the number of ranks changes, in an epoch or after it, and however far each rank has come."""
    items, states, shares = items_of(kind, epoch), None, []
    left = [*range(len(items))]
    for world, counts in [*rounds, (last, [99] * last)]:
        if world != len(shares):
            shares = dealt(kind, left, world)
        loaders = []
        for rank in range(world):
            loader = rank_of(kind, world, rank)
            if states is None:
                for number in range(epoch):
                    loader.set_epoch(number)
                    list(loader)
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(states[::-1])
            iterator, mine = iter(loader), shares[rank]
            mine, shares[rank] = mine[: counts[rank]], mine[counts[rank] :]
            assert [next(iterator).tolist() for _ in mine] == given_for(kind, items, mine)
            left = [place for place in left if not any(place in batch for batch in mine)]
            loaders.append((loader, iterator))
        states = [loader.state_dict() for loader, _ in loaders]
    for _, iterator in loaders:
        assert next(iterator, None) is None
    items = items_of(kind, epoch + 1)
    for rank, mine in enumerate(dealt(kind, [*range(len(items))], following)):
        loader = rank_of(kind, following, rank)
        loader.load_state_dict([loader.state_dict() for loader, _ in loaders])
        assert loader.state_dict()["epoch"] == epoch + 1
        loader.set_epoch(epoch + 1)
        assert [batch.tolist() for batch in loader] == given_for(kind, items, mine)


def begun(make, num_replicas, epoch=0):
    """The states of loaders of all ranks in an epoch, after the first batch."""
    states = []
    for rank in range(num_replicas):
        loader = make(num_replicas, rank)
        loader.set_epoch(epoch)
        next(iter(loader))
        states.append(loader.state_dict())
    return states


def test_the_ranks_own_generators_stay_their_own():
    """That of the loader is of base seeds; the global one is the program's."""
    loader = rank_of("shuffle", 2, 0, generator=held())
    states = begun(lambda world, rank: rank_of("shuffle", world, rank, generator=torch.Generator()), 4)
    before = loader.generator.get_state().tolist(), torch.get_rng_state().tolist()
    loader.load_state_dict(states)
    assert before == (loader.generator.get_state().tolist(), torch.get_rng_state().tolist())


def make(**options):
    """What makes the loader of a rank."""
    return lambda world, rank: DataLoader(**{"dataset": DATA, "num_replicas": world, "rank": rank, **options})


def differently_seeded(world, rank):
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(rank))
    return make(batch_size=4, sampler=sampler)(world, rank)


def tells(world, rank):
    return make(sampler=stateful.StatefulSampler())(world, rank)


def skips_by_rank(world, rank):
    return make(batch_size=4, shuffle=True, skip_steps=[5] * rank)(world, rank)


SHUFFLED = make(batch_size=4, shuffle=True)
OTHER_SEED = make(batch_size=4, shuffle=True, seed=7)
STREAM = make(dataset=Stream())
REFUSED = {
    "another number": (lambda: begun(SHUFFLED, 2)[0], SHUFFLED, "num_replicas=2, this one has 3.*list of all ranks"),
    "another rank": (lambda: begun(SHUFFLED, 3)[1], SHUFFLED, "rank=1, this one has 0"),
    "one is missing": (lambda: begun(SHUFFLED, 2)[:1], SHUFFLED, "one state of each rank"),
    "other epochs": (lambda: [begun(SHUFFLED, 2, epoch=rank)[rank] for rank in range(2)], SHUFFLED, "different epochs"),
    "one has not begun": (lambda: [*begun(SHUFFLED, 2)[:1], SHUFFLED(2, 1).state_dict()], SHUFFLED, "different epochs"),
    "no ranks": (lambda: begun(SHUFFLED, 2), lambda *_: DataLoader(DATA, 4), "load the one state of this loader"),
    "other orders": (lambda: begun(differently_seeded, 2), differently_seeded, "that rank 1 got before .* different"),
    "another seed": (lambda: begun(SHUFFLED, 2), OTHER_SEED, "the sampler did not reproduce its indices"),
    "other skip_steps": (lambda: begun(skips_by_rank, 2), SHUFFLED, "the ranks' states differ in their skip_steps"),
    "a stream": (lambda: begun(STREAM, 2), STREAM, "of 2 ranks, and this loader is one of 3: the number can change"),
    "a sampler's own state": (lambda: begun(tells, 2), tells, "of 2 ranks, and this loader is one of 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused(case):
    states, make, message = REFUSED[case]
    with pytest.raises(StateError, match=message):
        make(3, 0).load_state_dict(states())


@pytest.mark.parametrize("make", [STREAM, tells])
def test_what_cannot_be_dealt_anew_goes_on_with_as_many_ranks(make):
    whole, loader = make(2, 1), make(2, 1)
    loader.load_state_dict(begun(make, 2))
    assert list(loader) == list(whole)[1:]
    assert list(loader) == list(whole)
