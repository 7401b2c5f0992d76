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
COUNT = 12


@pytest.fixture
def folder(tmp_path):
    """Pictures of two classes, in a folder for each, and labels as Ultralytics has them."""
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        image, label = (tmp_path / kind / f"class{number % 2}" / f"{number:02}.png" for kind in ("images", "labels"))
        image.parent.mkdir(parents=True, exist_ok=True)
        label.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(40 + number, 60 - number, 3), dtype=np.uint8)).save(image)
        label.with_suffix(".txt").write_text(f"{number % 2} 0.5 0.5 0.25 0.25\n")
    return str(tmp_path / "images")


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


def timm(folder, cache):
    from timm.data import create_dataset, create_transform
    from torchvision.transforms import Resize

    dataset = create_dataset("", root=folder, transform=Resize(36))
    return applied(cache(dataset), create_transform(32, is_training=True, re_prob=0.5))


def ultralytics(folder, cache):
    """With its own `cache="ram"` where `cache` does nothing."""
    from ultralytics.cfg import get_cfg
    from ultralytics.data.dataset import YOLODataset

    class Cached(YOLODataset):
        def build_transforms(self, hyp=None):
            self.cache = "ram"  # so that a mosaic is made of all images
            # Without `augment` it keeps no images of its own.
            self.images = cache(Mapped(YOLODataset(folder, **{**options, "augment": False}).load_image))
            return super().build_transforms(hyp)

        def load_image(self, index, *_, **__):
            return self.images[index]

    data = {"names": {0: "a", 1: "b"}, "nc": 2, "channels": 3}
    options = {"imgsz": 64, "data": data, "hyp": get_cfg(), "augment": True}
    kind, own = (YOLODataset, "ram") if cache is nothing else (Cached, False)
    return kind(folder, cache=own, **options)


def nothing(dataset):
    """Instead of a cache."""
    return dataset


IDIOMS = [
    albumentations,
    *(pytest.param(one, marks=pytest.mark.full) for one in (torchvision, monai, timm, ultralytics)),
]


@pytest.mark.parametrize("workers", ["fork", "ray"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_batches_are_those_without_the_cache(idiom, workers, folder, tmp_path, monkeypatch):
    if importlib.util.find_spec(idiom.__name__) is None:
        pytest.skip(f"{idiom.__name__} is not installed")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "settings"))
    caches, found = [], []
    for how in (nothing, lambda samples: caches.append(rayloader.cached(samples)) or caches[-1]):
        dataset = idiom(folder, how)
        collate = getattr(dataset, "collate_fn", None)
        options = {"num_workers": 2, "workers": workers, "shuffle": True, "collate_fn": collate}
        loader = rayloader.DataLoader(dataset, 3, **options)
        seed(0)
        found.append([[told(batch) for batch in loader] for _ in range(3)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "the transforms are random"
    (kept,) = caches
    assert kept.stats().present == COUNT
    assert kept.stats().hits > 0
