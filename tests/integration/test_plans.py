"""Plans in loaders: torch's, and ours with any number of workers; states, skips, batches again."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler
from torch.utils.data import DataLoader as TorchDataLoader

from probes import oversubscribed
from rayloader import DataLoader, StateError
from rayloader.plans import Cuts, Mixture, Packing, TokenBudget, lengths, pack_collate

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


PLANS = {
    "budget": lambda sizes=SIZES, **options: TokenBudget(sizes, 60, window=32, **{"seed": 3, **options}),
    "best-fit": lambda **options: Packing(SIZES, 60, seed=3, **options),
    "concat": lambda **options: Packing(SIZES, 20, algorithm="concat", **options),
    "mixture": lambda **options: Mixture([60, 40], [0.3, 0.7], epoch_size=96, **options),
}
kinds = pytest.mark.parametrize("kind", [*PLANS])
some = pytest.mark.parametrize(
    "kind", ["budget", "mixture", *(pytest.param(k, marks=FULL) for k in ("best-fit", "concat"))]
)


def given(kind, plan=None):
    """The arguments of a loader."""
    plan = PLANS[kind]() if plan is None else plan
    if kind == "mixture":
        return {"dataset": ConcatDataset([range(60), range(60, 100)]), "sampler": plan, "batch_size": 4}
    dataset = Cuts(Texts()) if kind == "concat" else Texts()
    return {"dataset": dataset, "batch_sampler": plan, "collate_fn": numbers}


def made(kind, num_workers=0, plan=None, **options):
    return DataLoader(**given(kind, plan), num_workers=num_workers, workers="fork", seeding="batch", **options)


def batches(loader, epoch=None):
    if epoch is not None:
        loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


def taken(loader, count):
    """The first batches, and the state after them."""
    iterator = iter(loader)
    found = [next(iterator).tolist() for _ in range(count)]
    return found, loader.state_dict()


@kinds
def test_torchs_own_loader_has_the_part_of_a_rank(kind):
    loaders = []
    for rank in range(3):
        part = PLANS[kind]().for_rank(3, rank)
        assert isinstance(part, DistributedSampler)  # frameworks leave these alone
        part.set_epoch(2)
        loaders.append(TorchDataLoader(**given(kind, part)))
    ours = [made(kind, num_replicas=3, rank=rank) for rank in range(3)]
    assert [batches(loader) for loader in loaders] == [batches(loader, epoch=2) for loader in ours]
    assert len({len(loader) for loader in loaders}) == 1


@some
@pytest.mark.parametrize("workers", [(0, 2), pytest.param((2, 0), marks=FULL), pytest.param((3, 1), marks=FULL)])
def test_the_batches_are_torchs_and_go_on_at_any_step_with_another_number_of_workers(kind, workers):
    before, after = workers
    given_plan = given(kind)
    given_plan["sampler" if kind == "mixture" else "batch_sampler"].set_epoch(4)
    whole = batches(made(kind, before), epoch=4)
    assert whole == batches(TorchDataLoader(**given_plan))
    assert len(made(kind)) == len(whole)
    for count in random.Random(kind).sample(range(len(whole)), 2):
        loader = made(kind, before)
        loader.set_epoch(4)
        found, state = taken(loader, count)
        rest = made(kind, after)
        rest.load_state_dict(state)
        assert found + batches(rest) == whole
        assert batches(rest, epoch=5) == batches(made(kind), epoch=5) != whole


@some
def test_a_step_again_and_steps_that_are_skipped(kind):
    whole = batches(made(kind, 2), epoch=2)
    fresh = made(kind, 2)
    fresh.set_epoch(2)
    assert fresh.batch_at(0, 3, state=fresh.state_dict()).tolist() == whole[3]
    skipping = made(kind, 2, skip_steps=[1, 3])
    assert batches(skipping, epoch=2) == [batch for step, batch in enumerate(whole) if step not in (1, 3)]


def test_a_state_is_for_the_plan_that_was_saved_and_who_repeats_an_epoch_is_warned():
    loader = made("budget", num_replicas=2, rank=0)
    batches(loader)
    with pytest.warns(UserWarning, match="this epoch has the same random order"):
        batches(loader)
    _, state = taken(made("budget"), 2)
    for other in (PLANS["budget"](seed=4), PLANS["budget"](SIZES[::-1])):
        loader = made("budget", plan=other)
        loader.load_state_dict(state)
        with pytest.raises(StateError, match="the sampler did not reproduce its indices"):
            iter(loader)


def test_lengths_are_computed_and_packs_made_by_workers():
    options = {"num_workers": 1, "workers": "fork"}
    sizes = lengths(Texts(), **options)
    assert sizes.tolist() == SIZES
    loader = DataLoader(Texts(), batch_sampler=Packing(sizes, 60), collate_fn=pack_collate, **options)
    for indices, pack in zip(loader.batch_sampler, loader, strict=True):
        assert pack["cu_seqlens"].diff().tolist() == [SIZES[index] for index in indices]
        assert pack["cu_seqlens"].dtype == torch.int32
        assert pack["input_ids"][pack["cu_seqlens"][:-1]].tolist() == indices
