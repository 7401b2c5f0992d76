"""Plans in loaders: torch's, ours with any number of workers and ranks, Accelerate's; states, skips, batches again."""

import itertools
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import DataLoader as TorchDataLoader

from probes import oversubscribed
from rayloader import DataLoader
from rayloader.plans import Cuts, Mixture, PackedStream, Packing, TokenBudget, lengths, pack_collate

pytestmark = oversubscribed
SIZES = np.random.default_rng(0).integers(1, 30, 90).tolist()
FULL = pytest.mark.full


class Texts(Dataset[torch.Tensor]):
    """Each sample is its number, so many times."""

    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return torch.full((SIZES[index],), index)


def numbers(samples):
    return torch.tensor([int(sample[0]) for sample in samples])


KINDS = {
    "budget": lambda **options: {
        "dataset": Texts(),
        "batch_sampler": TokenBudget(SIZES, 60, window=32, seed=3, **options),
        "collate_fn": numbers,
    },
    "best-fit": lambda **options: {
        "dataset": Texts(),
        "batch_sampler": Packing(SIZES, 60, seed=3, **options),
        "collate_fn": numbers,
    },
    "concat": lambda **options: {
        "dataset": Cuts(Texts()),
        "batch_sampler": Packing(SIZES, 20, algorithm="concat", **options),
        "collate_fn": numbers,
    },
    "mixture": lambda **options: {
        "dataset": ConcatDataset([range(60), range(60, 100)]),
        "sampler": Mixture([60, 40], [0.3, 0.7], epoch_size=96, **options),
        "batch_size": 4,
    },
}
kinds = pytest.mark.parametrize("kind", [*KINDS])
some = pytest.mark.parametrize(
    "kind", ["budget", "mixture", *(pytest.param(k, marks=FULL) for k in ("best-fit", "concat"))]
)


def made(kind, num_workers=0, **options):
    return DataLoader(**KINDS[kind](), num_workers=num_workers, **{"workers": "fork", "seeding": "batch", **options})


def batches(loader, epoch=None):
    if epoch is not None:
        loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def taken(loader, count):
    """The first batches, and the state after them."""
    iterator = iter(loader)
    found = [next(iterator).tolist() for _ in range(count)]
    return found, loader.state_dict()


@some
def test_the_batches_are_torchs_with_any_number_of_workers(kind):
    expected = batches(TorchDataLoader(**KINDS[kind]()))
    assert batches(made(kind)) == batches(made(kind, 2)) == expected
    assert batches(made(kind), epoch=1) != expected
    assert len(made(kind)) == len(expected)


@kinds
def test_torchs_own_loader_has_the_part_of_a_rank(kind):
    loaders = []
    for rank in range(3):
        arguments = KINDS[kind]()
        name = "sampler" if "sampler" in arguments else "batch_sampler"
        arguments[name] = arguments[name].for_rank(3, rank)
        assert isinstance(arguments[name], DistributedSampler)  # frameworks leave these alone
        arguments[name].set_epoch(2)
        loaders.append(TorchDataLoader(**arguments))
    assert [batches(loader) for loader in loaders] == [
        batches(made(kind, num_replicas=3, rank=rank), epoch=2) for rank in range(3)
    ]
    assert len({len(loader) for loader in loaders}) == 1


@some
@pytest.mark.parametrize("workers", [(0, 2), pytest.param((2, 0), marks=FULL), pytest.param((3, 1), marks=FULL)])
def test_it_goes_on_at_any_step_with_another_number_of_workers(kind, workers):
    before, after = workers
    loader = made(kind, before)
    whole = batches(loader, epoch=4)
    for count in random.Random(kind).sample(range(len(whole)), 2):
        loader = made(kind, before)
        loader.set_epoch(4)
        found, state = taken(loader, count)
        rest = made(kind, after)
        rest.load_state_dict(state)
        assert found + batches(rest) == whole
        assert batches(rest, epoch=5) == batches(made(kind), epoch=5)


@kinds
@pytest.mark.parametrize(
    "worlds", [(3, 2, 4), pytest.param((4, 1, 3), marks=FULL), pytest.param((1, 5, 2), marks=FULL)]
)
def test_what_ranks_have_not_taken_goes_to_any_other_number_of_ranks(kind, worlds):
    states, seen = None, []
    whole = [item for batch in batches(made(kind), epoch=1) for item in batch]
    for number, world in enumerate(worlds):
        last, stepped = number == len(worlds) - 1, []
        for rank in range(world):
            loader = made(kind, num_replicas=world, rank=rank)
            if states is None:
                loader.set_epoch(1)
            else:
                loader.load_state_dict(states)
            found, state = (batches(loader), None) if last else taken(loader, 2)
            seen += [item for batch in found for item in batch]
            stepped.append((len(found), state))
        assert len({steps for steps, _ in stepped}) == 1
        states = [state for _, state in stepped]
    assert not Counter(whole) - Counter(seen)
    if kind != "mixture" and kind != "concat":  # of concat, a part may be cut in two where there are more ranks
        spare = sum((Counter(seen) - Counter(whole)).values())
        assert spare <= 2 * max(map(len, KINDS[kind]()["batch_sampler"]))


@some
def test_a_step_again_and_steps_that_are_skipped(kind):
    loader = made(kind, 2)
    whole = batches(loader, epoch=2)
    fresh = made(kind, 2)
    fresh.set_epoch(2)
    begin = fresh.state_dict()
    assert fresh.batch_at(0, 3, state=begin).tolist() == whole[3]
    skipping = made(kind, 2, skip_steps=[1, 3])
    assert batches(skipping, epoch=2) == [batch for step, batch in enumerate(whole) if step not in (1, 3)]


def test_the_steps_of_ranks_cost_the_same_whoever_deals_them_out():
    sizes = np.random.default_rng(0).lognormal(3, 1, 3000).astype(int).clip(1, 400)
    parts = [
        DataLoader(range(3000), batch_sampler=TokenBudget(sizes, 800), num_replicas=4, rank=rank) for rank in range(4)
    ]
    costs = np.array([[len(batch) * sizes[batch].max() for batch in part.batch_sampler] for part in parts])
    assert (costs.max(axis=0) / costs.mean(axis=0)).mean() < 1.05


def test_who_repeats_an_epoch_is_warned():
    loader = made("budget", num_replicas=2, rank=0)
    batches(loader)
    with pytest.warns(UserWarning, match="this epoch has the same random order"):
        batches(loader)


@kinds
def test_a_plan_that_was_read_can_be_pickled(kind):
    loader = made(kind)
    whole = batches(loader)
    plan = pickle.loads(pickle.dumps(loader.batch_sampler))
    assert [*plan] == [*loader.batch_sampler]
    assert len(plan) == len(whole)


def test_a_state_is_for_the_plan_that_was_saved():
    from rayloader import StateError

    _, state = taken(made("budget"), 2)
    for sizes, seed in ((SIZES, 4), (SIZES[::-1], 3)):
        other = DataLoader(
            Texts(), batch_sampler=TokenBudget(sizes, 60, window=32, seed=seed), collate_fn=numbers, seeding="batch"
        )
        other.load_state_dict(state)
        with pytest.raises(StateError, match="the sampler did not reproduce its indices"):
            iter(other)


@kinds
def test_accelerate_deals_out_batches_of_equal_number(kind):
    from accelerate.data_loader import BatchSamplerShard

    ranks = 3
    options = {} if kind == "mixture" else {"num_replicas": ranks}
    sampler = DataLoader(**KINDS[kind](**options)).batch_sampler
    parts = [[*BatchSamplerShard(sampler, ranks, rank, even_batches=False)] for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    assert [*itertools.chain(*zip(*parts, strict=True))] == [*sampler]


class Stream(IterableDataset[list[int]]):
    def __iter__(self):
        return iter([[number] * (number % 7) for number in range(60)])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=FULL)])
def test_packs_of_a_stream_go_on_in_a_loader(num_workers):
    def loader():
        return DataLoader(PackedStream(Stream(), 8), 2, num_workers=num_workers, workers="fork")

    whole = [batch["input_ids"].tolist() for batch in loader()]
    assert all(len(batch) == 2 for batch in whole[: -max(1, num_workers)])
    first = loader()
    iterator = iter(first)
    found = [next(iterator)["input_ids"].tolist() for _ in range(3)]
    rest = loader()
    rest.load_state_dict(first.state_dict())
    assert found + [batch["input_ids"].tolist() for batch in rest] == whole


def test_packs_arrive_whole():
    loader = DataLoader(
        Texts(), batch_sampler=Packing(SIZES, 60), collate_fn=pack_collate, num_workers=1, workers="fork"
    )
    for indices, pack in zip(loader.batch_sampler, loader, strict=True):
        assert pack["cu_seqlens"].diff().tolist() == [SIZES[index] for index in indices]
        assert pack["cu_seqlens"].dtype == torch.int32
        assert pack["input_ids"][pack["cu_seqlens"][:-1]].tolist() == indices


def test_lengths_are_computed_by_workers():
    assert lengths(Texts(), num_workers=2, workers="fork").tolist() == SIZES
