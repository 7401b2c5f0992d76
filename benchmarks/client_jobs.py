"""What a loader of another library's dataset is made of, for the cases of `clients.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

BATCH_SIZE = 16
SIDE = 64  # pixels of a picture
EXTENT = 16  # voxels of a volume, in each direction
IMPORT, PATCH = "import", "patch()"  # ways to rayloader: its class in place of torch's, or `rayloader.patch()`


@dataclass(frozen=True)
class Job:
    """What a loader is to be made of.

    Attributes:
        folder: for files; the pictures are in its folder "pictures".
        count: samples of an epoch.
        loader_class: torch's, or ours.
        options: its arguments besides the batch size.
    """

    folder: Path
    count: int
    loader_class: Callable[..., Any]
    options: dict[str, Any]

    def load(self, dataset: Any, **options: Any) -> Any:
        """A loader of the class."""
        return self.loader_class(dataset, **{"batch_size": BATCH_SIZE, **self.options, **options})

    def written(self, name: str, write: Callable[[Path], None]) -> Path:
        """A path in the folder, after `write` was called with it unless it exists: all loaders read the same files."""
        if not (path := self.folder / name).exists():
            write(path)
        return path

    @property
    def pixels(self) -> np.ndarray[Any, Any]:
        """Pictures in memory."""
        return np.random.default_rng(0).integers(256, size=(self.count, SIDE, SIDE, 3), dtype=np.uint8)

    @property
    def volumes(self) -> np.ndarray[Any, Any]:
        """Volumes in memory."""
        return np.random.default_rng(0).random((self.count, 1, EXTENT, EXTENT, EXTENT), dtype=np.float32)


def write_pictures(folder: Path, batches: int) -> None:
    """Writes pictures for so many batches, in a folder for each of four classes."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(batches * BATCH_SIZE):
        path = folder / "pictures" / f"class{number % 4}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)).save(path)


class Mapped(Dataset[Any]):
    """What a function makes of each sample."""

    def __init__(self, samples: Any, function: Callable[[Any], Any]) -> None:
        self.samples, self.function = samples, function

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.function(self.samples[index])


@dataclass(frozen=True)
class Case:
    """A library, and how its loader is made one of ours.

    Attributes:
        make: gives the loader.
        way: `IMPORT` or `PATCH`.
        needs: packages, besides that of the case's name.
        forks: whether the library works in forks; torch's workers are spawned otherwise, and ours are actors.
    """

    make: Callable[[Job], Any]
    way: str = IMPORT
    needs: tuple[str, ...] = ()
    forks: bool = True
