"""Loaders of other libraries' datasets, each made as its users make it: torch's and ours, over the same data.

`clients.py` has them measured in processes of their own, where `serve.py` calls `make` and `epoch`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import multiprocessing
import sys
import tarfile
import time
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import client_stores
import client_training
import peers
from client_jobs import BATCH_SIZE, PATCH, Case, Job, Mapped


def torchvision(job: Job) -> Any:
    """An `ImageFolder`."""
    from client_vision import ImageFolder, transforms

    steps = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return job.load(ImageFolder(str(job.folder / "pictures"), transforms.Compose(steps)), shuffle=True)


def timm(job: Job) -> Any:
    """An `ImageDataset`, and `create_loader`, which makes its loader by torch's name."""
    from client_vision import ImageDataset, create_loader

    dataset = ImageDataset(str(job.folder / "pictures"))
    options = {"is_training": True, "use_prefetcher": False, "pin_memory": False, **job.options}
    return create_loader(dataset, (3, 32, 32), BATCH_SIZE, **options)


def graphs(job: Job) -> list[Any]:
    """Graphs of eight nodes and sixteen edges."""
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(8, (job.count, 2, 16), generator=generator)
    return [Data(x=torch.rand(8, 4, generator=generator), edge_index=edge, y=n) for n, edge in enumerate(edges)]


def torch_geometric(job: Job) -> Any:
    """A list of graphs."""
    from torch_geometric.loader.dataloader import Collater

    return job.load(made := graphs(job), shuffle=True, collate_fn=Collater(made))


def torch_geometric_own(job: Job) -> Any:
    """The same with its own class."""
    from torch_geometric.loader import DataLoader

    return DataLoader(graphs(job), BATCH_SIZE, shuffle=True, **job.options)


def cached(job: Job) -> Any:
    """Volumes that MONAI keeps after the first, deterministic transforms."""
    from monai import transforms
    from monai.data import CacheDataset

    steps = [
        transforms.ScaleIntensityd(keys="image"),
        transforms.RandFlipd(keys="image", prob=0.5, spatial_axis=0),
        transforms.RandGaussianNoised(keys="image", prob=0.5),
    ]
    samples = [{"image": volume, "label": number} for number, volume in enumerate(job.volumes)]
    return CacheDataset(samples, transforms.Compose(steps), progress=False)


def monai(job: Job) -> Any:
    """A `CacheDataset`."""
    from monai.data import list_data_collate, worker_init_fn

    return job.load(cached(job), shuffle=True, collate_fn=list_data_collate, worker_init_fn=worker_init_fn)


def monai_own(job: Job) -> Any:
    """The same with its own class."""
    from monai.data import DataLoader

    return DataLoader(cached(job), batch_size=BATCH_SIZE, shuffle=True, **job.options)


def tensordict(job: Job) -> Any:
    """A `@tensorclass` that the program defines, pickled by value as one of `__main__` is.

    The batches are dicts, because torch's workers can't send objects of such a class.
    """
    from tensordict import tensorclass

    class Sample:
        image: torch.Tensor
        label: torch.Tensor

    images, labels = torch.from_numpy(job.pixels), torch.arange(job.count)
    samples = tensorclass(Sample)(image=images, label=labels, batch_size=[job.count])
    return job.load(Mapped(samples, lambda sample: sample.to_dict()), shuffle=True)


def datasets(job: Job) -> Any:
    """A `Dataset` of columns."""
    import datasets

    columns = {"image": job.volumes.reshape(job.count, -1), "label": range(job.count)}
    return job.load(datasets.Dataset.from_dict(columns).with_format("torch"), shuffle=True)


def albumentations(job: Job) -> Any:
    """A pipeline of transforms, with generators of its own."""
    import albumentations

    steps = [albumentations.RandomCrop(32, 32), albumentations.HorizontalFlip(), albumentations.RandomGamma()]
    pipeline = albumentations.Compose(steps, seed=1)
    return job.load(Mapped(job.pixels, lambda pixels: pipeline(image=pixels)["image"]), shuffle=True)


def kornia(job: Job) -> Any:
    """Augmentations, which are torch's modules."""
    from kornia import augmentation

    pipeline = augmentation.ImageSequential(augmentation.RandomHorizontalFlip(), augmentation.RandomGaussianNoise())
    images = torch.from_numpy(job.pixels).permute(0, 3, 1, 2).float() / 255
    return job.load(Mapped(images, lambda image: pipeline(image)[0]), shuffle=True)


def subjects(job: Job) -> Any:
    """Volumes as TorchIO has them."""
    import torchio

    found = [torchio.Subject(image=torchio.ScalarImage(tensor=v), label=n) for n, v in enumerate(job.volumes)]
    return torchio.SubjectsDataset(found, transform=torchio.Compose([torchio.RandomFlip(), torchio.RandomNoise()]))


def torchio(job: Job) -> Any:
    """A `SubjectsDataset`."""
    from torchio import SubjectsLoader

    return job.load(subjects(job), shuffle=True, collate_fn=SubjectsLoader._collate)


def torchio_own(job: Job) -> Any:
    """The same with its own class."""
    from torchio import SubjectsLoader

    return SubjectsLoader(subjects(job), batch_size=BATCH_SIZE, shuffle=True, **job.options)


def webdataset(job: Job) -> Any:
    """Shards of samples, one for each worker, and `WebLoader`, which makes its loader by torch's name."""
    import webdataset

    shards = [job.folder / f"{job.options['num_workers']}-{n}.tar" for n in range(job.options["num_workers"])]
    for number, shard in enumerate(shards):
        with tarfile.open(shard, "w") as archive:
            for index in range(number, job.count, len(shards)):
                for suffix, content in ("npy", _npy(job.pixels[index])), ("cls", str(index).encode()):
                    entry = tarfile.TarInfo(f"{index:05}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    samples = webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=False)
    samples = samples.shuffle(100, seed=1).decode().to_tuple("npy", "cls").batched(BATCH_SIZE)
    return webdataset.WebLoader(samples, batch_size=None, **job.options)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def litdata(job: Job) -> Any:
    """Chunks of samples."""
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    chunks = job.folder / "chunks"
    if not chunks.is_dir():
        writer = BinaryWriter(str(chunks), chunk_size=BATCH_SIZE)
        for index, picture in enumerate(job.pixels):
            writer[index] = {"image": torch.from_numpy(picture), "label": index}
        writer.done()
        writer.merge()
    return job.load(StreamingDataset(str(chunks), shuffle=True))


def lhotse(job: Job) -> Any:
    """Cuts that its sampler puts together in batches of like duration."""
    from lhotse import CutSet
    from lhotse.dataset import SimpleCutSampler
    from lhotse.testing.dummies import DummyManifest

    cuts = DummyManifest(CutSet, begin_id=0, end_id=job.count)
    sampler = SimpleCutSampler(cuts, max_cuts=BATCH_SIZE, shuffle=True)
    return job.load(Cuts(), sampler=sampler, batch_size=None)


class Cuts(Dataset[Any]):
    """A batch of the cuts that lhotse's sampler gives."""

    def __getitem__(self, cuts: Any) -> Any:
        return {"ids": [cut.id for cut in cuts], "seconds": torch.tensor([cut.duration for cut in cuts])}


CASES = {
    "torchvision": Case(torchvision),
    "timm": Case(timm, PATCH),
    "torch_geometric": Case(torch_geometric),
    "torch_geometric's loader": Case(torch_geometric_own, PATCH),
    "monai": Case(monai),
    "monai's loader": Case(monai_own, PATCH),
    "tensordict": Case(tensordict),
    "datasets": Case(datasets),
    "albumentations": Case(albumentations),
    "kornia": Case(kornia),
    "torchio": Case(torchio),
    "torchio's loader": Case(torchio_own, PATCH),
    "webdataset": Case(webdataset, PATCH),
    "litdata": Case(litdata),
    "lhotse": Case(lhotse),
    "lmdb": Case(client_stores.lmdb),
    "h5py": Case(client_stores.h5py),
    "xarray": Case(client_stores.xarray, needs=("zarr",)),
    "tensorstore": Case(client_stores.tensorstore, needs=("zarr",)),
    "duckdb": Case(client_stores.duckdb, needs=("polars",)),
    "lance": Case(client_stores.lance, forks=False),
    "mmengine": Case(client_training.mmengine, PATCH),
    "trl": Case(client_training.trl, PATCH, needs=("peft",)),
    "darts": Case(client_training.darts),
    "torchgeo": Case(client_training.torchgeo),
    "lightly": Case(client_training.lightly),
    "megatron.energon": Case(client_training.energon, PATCH),
    "opacus's loader": Case(client_training.opacus, PATCH),
    "scdataset": Case(client_training.scdataset),
    "scvi's loader": Case(client_training.scvi, PATCH),
}


# Of the loaders, which the script holds, as it does in most programs.
_NAMES = {False: "loader", True: "persistent_loader"}


def make(name: str, case: str, folder: str, batches: int, workers: int) -> None:
    """Makes the loaders of a case, with fresh and with persistent workers."""
    chosen = CASES[case]
    for package in case.removesuffix("'s loader"), *chosen.needs:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            raise peers.Unavailable(f"{package} is not installed")
    warnings.simplefilter("ignore")
    loader_class = torch.utils.data.DataLoader
    if name != "torch":
        import rayloader

        own = {"workers": "ray"} if name == "rayloader" else {}  # forks are what a program without Ray has
        loader_class = functools.partial(rayloader.DataLoader, **own)
        if chosen.way == PATCH:
            rayloader.patch(**own)
    for persistent, its_name in _NAMES.items():
        options = {"num_workers": workers, "persistent_workers": persistent}
        if not chosen.forks:
            options["multiprocessing_context"] = "spawn"
        job = Job(Path(folder), batches * BATCH_SIZE, loader_class, options)
        vars(sys.modules["__main__"])[its_name] = chosen.make(job)


def epoch(name: str, persistent: bool, batches: int) -> tuple[float, int]:
    """Seconds of an epoch, and the checksum of its batches."""
    torch.manual_seed(1)
    loader, taken = vars(sys.modules["__main__"])[_NAMES[persistent]], []
    began = time.perf_counter()
    for batch in loader:
        taken.append(batch)
        if name != "torch" and multiprocessing.active_children():  # torch's workers
            raise peers.Unavailable("`patch()` does not reach its loader")
    seconds = time.perf_counter() - began
    if len(taken) != batches:
        raise ValueError(f"{len(taken)} batches instead of {batches}")
    return seconds, checksum(taken)


def checksum(obj: Any, before: int = 0) -> int:
    """Of all numbers and strings in a batch."""
    if isinstance(obj, (torch.Tensor, np.ndarray)):
        array = np.ascontiguousarray(obj)
        return zlib.crc32(array.tobytes(), zlib.crc32(f"{array.shape}{array.dtype}".encode(), before))
    if hasattr(obj, "to_dict"):  # a batch of PyG's, or a tensorclass
        obj = obj.to_dict()
    elif dataclasses.is_dataclass(obj):
        obj = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    if isinstance(obj, Mapping):
        obj = [part for key in sorted(obj, key=str) for part in (key, obj[key])]
    if isinstance(obj, (list, tuple)) and not isinstance(obj, str):
        for part in obj:
            before = checksum(part, before)
        return before
    return zlib.crc32(str(obj).encode(), before)
