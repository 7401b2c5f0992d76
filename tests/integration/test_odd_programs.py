"""Odd but legal programs that once went wrong."""

import random

import pytest
import ray
import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper

from probes import oversubscribed
from rayloader import DataLoader

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]


class Drawing(Dataset):
    def __init__(self, length=60):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, random.random()])


class Fetching(Dataset):
    def __getitem__(self, ref):
        return ray.get(ref)


class References(Sampler):
    def __init__(self):
        self.refs = [ray.put(number) for number in range(6)]

    def __iter__(self):
        return iter(self.refs)


@pytest.mark.parametrize("depth", [1, 2, None])
@pytest.mark.parametrize("taken", [1, 3])
def test_an_epoch_that_is_resumed_and_broken_off_at_once_is_as_if_it_had_gone_on(depth, taken):
    def begun(state=None):
        torch.manual_seed(0)
        loader = DataLoader(Drawing(), batch_size=2, num_workers=2, persistent_workers=True, prefetch_factor=depth)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        for _ in range(taken if state is None else 0):
            next(iterator)
        return loader

    loader = begun()
    state = loader.state_dict()
    assert [batch.tolist() for batch in begun(state)] == [batch.tolist() for batch in loader]


def test_a_sampler_may_give_references_to_rays_objects_where_ray_carries_the_batches():
    loader = DataLoader(Fetching(), batch_size=2, sampler=References(), num_workers=2, timeout=20)
    with pytest.raises(TypeError, match="arenas=False"):
        list(loader)
    loader = DataLoader(Fetching(), batch_size=2, sampler=References(), num_workers=2, arenas=False, timeout=20)
    assert torch.cat(list(loader)).tolist() == list(range(6))


def test_datapipes_may_hold_lambdas():
    loader = DataLoader(IterableWrapper(range(6)).map(lambda number: number + 1), batch_size=2, num_workers=1)
    assert torch.cat(list(loader)).tolist() == list(range(1, 7))
