"""Odd but legal programs that once went wrong."""

import pytest
import ray
import torch
from torch.utils.data import Dataset, Sampler
from torch.utils.data.datapipes.iter import IterableWrapper

from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")


class Fetching(Dataset):
    def __getitem__(self, ref):
        return ray.get(ref)


class References(Sampler):
    def __init__(self):
        self.refs = [ray.put(number) for number in range(6)]

    def __iter__(self):
        return iter(self.refs)


def test_a_sampler_may_give_references_to_rays_objects_where_ray_carries_the_batches():
    options = {"batch_size": 2, "sampler": References(), "num_workers": 2, "timeout": 20}
    with pytest.raises(TypeError, match="arenas=False"):
        list(DataLoader(Fetching(), **options))
    assert torch.cat(list(DataLoader(Fetching(), arenas=False, **options))).tolist() == list(range(6))


def test_datapipes_may_hold_lambdas():
    loader = DataLoader(IterableWrapper(range(6)).map(lambda number: number + 1), batch_size=2, num_workers=1)
    assert torch.cat(list(loader)).tolist() == list(range(1, 7))
