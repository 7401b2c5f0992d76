"""Loaders of a cached dataset: the batches of the uncached one, built once, whoever the workers are and who dies."""

import random

import pytest
import torch
from torch.utils.data import Dataset

from inside import kill_worker
from rayloader import DataLoader, cached

pytestmark = pytest.mark.usefixtures("ray_session")
COUNT = 60


class Decoded(Dataset):
    """What is always the same, until somebody changes it."""

    shift = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.arange(100).roll(index) + self.shift, index


class Augmented(Dataset):
    """Random augmentation of the samples of another dataset, which it writes to."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        image += int(torch.randint(10, ()))
        return image * random.random(), label


def plain(batches):
    return [(images.tolist(), labels.tolist()) for images, labels in batches]


def epochs(loader):
    torch.manual_seed(0)
    random.seed(0)
    return [plain(loader) for _ in range(3)]


def made(dataset, **options):
    return DataLoader(Augmented(dataset), 4, shuffle=True, **options)


WAYS = {
    "no workers": {"num_workers": 0},
    "forks": {"num_workers": 2, "workers": "fork"},
    "actors": {"num_workers": 2, "workers": "ray"},
    "persistent": {"num_workers": 2, "workers": "ray", "persistent_workers": True},
    "dynamic": {"num_workers": 2, "workers": "fork", "seeding": "batch", "scheduling": "dynamic"},
}


@pytest.mark.parametrize(
    ("way", "where"), [*((way, "memory") for way in WAYS), ("forks", "folder"), ("actors", "folder")]
)
def test_batches_are_those_without_a_cache_and_samples_are_built_once(way, where, tmp_path):
    """Whichever worker dies, and whatever other loaders read the samples too."""
    kept = cached(Decoded()) if where == "memory" else cached(Decoded(), where=tmp_path, key="decoded")
    loader, expected = made(kept, **WAYS[way]), epochs(made(Decoded(), **WAYS[way]))
    assert epochs(loader) == expected
    stats = loader.stats().cache
    assert stats == kept.stats()
    assert (stats.present, stats.built, stats.hits) == (COUNT, COUNT, 2 * COUNT)
    if way in ("forks", "actors"):
        kept = cached(Decoded())
        torch.manual_seed(0)
        iterator = iter(made(kept, **WAYS[way]))
        found = plain(next(iterator) for _ in range(6))
        kill_worker(iterator)
        assert found + plain(iterator) == expected[0]
        assert kept.stats().present == COUNT
        assert len(list(DataLoader(kept, 4, num_workers=1, workers="fork"))) == COUNT // 4
        assert kept.stats().hits >= COUNT
