"""Plans in loaders with workers: states go on with any number of them; the rest is in unit/test_plans.py."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset

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
    "mixture": lambda: Mixture([60, 40], [0.3, 0.7], epoch_size=96),
    "concat": lambda: Packing(SIZES, 20, algorithm="concat"),
}


def made(kind, num_workers=0, plan=None, **options):
    plan = PLANS[kind]() if plan is None else plan
    options |= {"num_workers": num_workers, "workers": "fork", "seeding": "batch"}
    if kind == "mixture":
        return DataLoader(ConcatDataset([range(60), range(60, 100)]), sampler=plan, batch_size=4, **options)
    dataset = Cuts(Texts()) if kind == "concat" else Texts()
    return DataLoader(dataset, batch_sampler=plan, collate_fn=numbers, **options)


def batches(loader, epoch=None):
    if epoch is not None:
        loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", ["budget", "mixture", pytest.param("concat", marks=FULL)])
@pytest.mark.parametrize("workers", [(0, 2), (2, 0), pytest.param((3, 1), marks=FULL)])
def test_it_goes_on_at_any_step_with_another_number_of_workers(kind, workers):
    before, after = workers
    whole = batches(made(kind, before), epoch=4)
    for count in random.Random(kind).sample(range(len(whole)), 2):
        loader = made(kind, before)
        loader.set_epoch(4)
        iterator = iter(loader)
        found = [batch.tolist() for batch in itertools.islice(iterator, count)]
        rest = made(kind, after)
        rest.load_state_dict(loader.state_dict())
        assert found + batches(rest) == whole
        assert batches(rest, epoch=5) == batches(made(kind), epoch=5) != whole


def test_a_state_is_for_the_plan_that_was_saved():
    loader = made("budget")
    next(iter(loader))
    for other in (PLANS["budget"](seed=4), PLANS["budget"](SIZES[::-1])):
        again = made("budget", plan=other)
        again.load_state_dict(loader.state_dict())
        with pytest.raises(StateError, match="the sampler did not reproduce its indices"):
            iter(again)


def test_lengths_are_computed_and_packs_made_by_workers():
    options = {"num_workers": 1, "workers": "fork"}
    sizes = lengths(Texts(), **options)
    assert sizes.tolist() == SIZES
    loader = DataLoader(Texts(), batch_sampler=Packing(sizes, 60), collate_fn=pack_collate, **options)
    for indices, pack in zip(loader.batch_sampler, loader, strict=True):
        assert pack["cu_seqlens"].diff().tolist() == [SIZES[index] for index in indices]
        assert pack["cu_seqlens"].dtype == torch.int32
        assert pack["input_ids"][pack["cu_seqlens"][:-1]].tolist() == indices
