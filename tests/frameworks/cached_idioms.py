"""How programs of other libraries put a cache under their random transforms, as docs/howto/cache.md has it.

Each of `IDIOMS` gives the dataset of a program, in which `cache` was applied to what is always the same. The libraries
are imported when an idiom is made: not all are installed everywhere.
"""

import random
from pathlib import Path

import any_torchvision  # isort: skip  # noqa: F401 (first, in workers too)
import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

COUNT = 12


def write_pictures(folder):
    """Pictures of two classes, in a folder for each, and labels as Ultralytics has them."""
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        path = Path(folder) / "images" / f"class{number % 2}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = 40 + number, 60 - number
        Image.fromarray(generator.integers(256, size=(height, width, 3), dtype=np.uint8)).save(path)
        label = Path(folder) / "labels" / path.parent.name / f"{number:02}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text(f"{number % 2} 0.5 0.5 0.25 0.25\n")
    return str(Path(folder) / "images")


class Applied(Dataset):
    """Applies a function to the first part of each sample."""

    def __init__(self, samples, function):
        self.samples, self.function = samples, function

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, *rest = self.samples[index]
        return self.function(image), *rest


class Pixels(Dataset):
    """Pictures as arrays, after a function of them."""

    def __init__(self, folder, function):
        self.paths, self.function = sorted(Path(folder).glob("*/*.png")), function

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.function(np.asarray(Image.open(self.paths[index]))), index


def torchvision(folder, cache):
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    decoded = cache(ImageFolder(folder, v2.Compose([v2.ToImage(), v2.Resize(36)])))
    return Applied(decoded, v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32)]))


def albumentations(folder, cache):
    import albumentations as A

    first = A.SmallestMaxSize(36)
    pipeline = A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), A.RandomGamma()], seed=1)
    decoded = cache(Pixels(folder, lambda image: first(image=image)["image"]))
    return Applied(decoded, lambda image: pipeline(image=image)["image"])


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
    return Applied(cache(dataset), create_transform(32, is_training=True, re_prob=0.5))


class Loaded(Dataset):
    """What `load_image` of an Ultralytics dataset gives."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset.load_image(index)


def ultralytics(folder, cache):
    """With its own `cache="ram"` where `cache` does nothing."""
    from ultralytics.cfg import get_cfg
    from ultralytics.data.dataset import YOLODataset

    class Cached(YOLODataset):
        def build_transforms(self, hyp=None):
            self.cache = "ram"  # so that a mosaic is made of all images
            # Without `augment` it keeps no images of its own.
            self.images = cache(Loaded(YOLODataset(folder, **{**options, "augment": False})))
            return super().build_transforms(hyp)

        def load_image(self, index, *_, **__):
            return self.images[index]

    options = {
        "imgsz": 64,
        "data": {"names": {0: "a", 1: "b"}, "nc": 2, "channels": 3},
        "hyp": get_cfg(),
        "augment": True,
    }
    kind, own = (YOLODataset, "ram") if cache is nothing else (Cached, False)
    return kind(folder, cache=own, **options)


def nothing(dataset):
    """Instead of a cache."""
    return dataset


IDIOMS = {idiom.__name__: idiom for idiom in (torchvision, albumentations, monai, timm, ultralytics)}


def epochs(loader, count=3):
    """All batches, as bytes within lists and dicts."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return [[plain(batch) for batch in loader] for _ in range(count)]


def plain(part):
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return str(part.dtype), tuple(part.shape), np.asarray(part).tobytes()
    if isinstance(part, dict):
        return {key: plain(value) for key, value in part.items()}
    return [plain(value) for value in part] if isinstance(part, (list, tuple)) else part
