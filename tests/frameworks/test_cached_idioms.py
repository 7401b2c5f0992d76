"""How programs of other libraries put a cache under their random transforms, as docs/howto/cache.md has it.

Each of `IDIOMS` gives the dataset of a program, in which `cache` was applied to what is always the same: the batches of
forks and of actors are bit for bit those without it. The libraries are imported when an idiom is made: not all are
installed everywhere.
"""

import importlib.util
from pathlib import Path

import any_torchvision  # isort: skip  # noqa: F401 (first, in workers too)
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

import rayloader
from framework_data import seed
from told import told

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what the libraries warn of is their own matter
]
full = pytest.mark.full
COUNT = 12


@pytest.fixture
def folder(tmp_path):
    """Pictures of two classes, in a folder for each."""
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        image = tmp_path / f"class{number % 2}" / f"{number:02}.png"
        image.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(256, size=(40 + number, 60 - number, 3), dtype=np.uint8)).save(image)
    return str(tmp_path)


class Mapped(Dataset):
    """What a function gives of each number."""

    def __init__(self, function, count=COUNT):
        self.function, self.count = function, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.function(index)


def applied(samples, function):
    """Applies a function to the first part of each sample."""

    def of(index):
        image, *rest = samples[index]
        return function(image), *rest

    return Mapped(of)


def torchvision(folder, cache):
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    decoded = cache(ImageFolder(folder, v2.Compose([v2.ToImage(), v2.Resize(36)])))
    return applied(decoded, v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32)]))


def albumentations(folder, cache):
    import albumentations as A

    first, paths = A.SmallestMaxSize(36), sorted(Path(folder).glob("*/*.png"))
    pipeline = A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), A.RandomGamma()], seed=1)
    decoded = cache(Mapped(lambda index: (first(image=np.asarray(Image.open(paths[index])))["image"], index)))
    return applied(decoded, lambda image: pipeline(image=image)["image"])


def monai(folder, cache):
    from monai import transforms
    from monai.data import Dataset

    files = [{"image": str(path), "label": number} for number, path in enumerate(sorted(Path(folder).glob("*/*.png")))]
    first = [
        transforms.LoadImaged(keys="image", ensure_channel_first=True, image_only=True),
        transforms.ScaleIntensityd(keys="image"),
        transforms.Resized(keys="image", spatial_size=(36, 36)),
        # Else a sample says where in memory these transforms are, which is another place in each actor.
        transforms.EnsureTyped(keys="image", track_meta=False),
    ]
    augmenting = transforms.Compose(
        [
            transforms.RandSpatialCropd(keys="image", roi_size=(32, 32), random_size=False),
            transforms.RandFlipd(keys="image", prob=0.5, spatial_axis=0),
            transforms.RandGaussianNoised(keys="image", prob=0.5),
        ]
    )
    augmenting.set_random_state(seed=1)
    return Dataset(cache(Dataset(files, transforms.Compose(first))), augmenting)


def nothing(dataset):
    """Instead of a cache."""
    return dataset


@pytest.mark.parametrize("workers", ["fork", "ray"])
@pytest.mark.parametrize("idiom", [albumentations, *(pytest.param(one, marks=full) for one in (torchvision, monai))])
def test_batches_are_those_without_the_cache(idiom, workers, folder):
    if importlib.util.find_spec(idiom.__name__) is None:
        pytest.skip(f"{idiom.__name__} is not installed")
    caches, found = [], []
    for how in (nothing, lambda samples: caches.append(rayloader.cached(samples)) or caches[-1]):
        dataset = idiom(folder, how)
        loader = rayloader.DataLoader(dataset, 3, shuffle=True, num_workers=2, workers=workers)
        seed(0)
        found.append([[told(batch) for batch in loader] for _ in range(3)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "the transforms are random"
    (kept,) = caches
    assert kept.stats().present == COUNT
    assert kept.stats().hits > 0
