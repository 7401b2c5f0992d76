"""The cases: a dataset and the loader's arguments, the same for every implementation.

Promise: nothing here imports Ray or any implementation, so that the processes of the others stay free of them. Samples
of the stored cases are there already, in real memory with random content: what is measured is the loader. Only `jpeg`
and `stragglers` have samples that cost something.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

POOL = 256  # samples that exist; an epoch goes through them again and again


def stored_samples(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random samples; written, for pages that were never touched are all one page."""
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.rand((count, *shape), dtype=dtype, generator=generator)
    return torch.randint(0, 256, (count, *shape), dtype=dtype, generator=generator)


class Stored(Dataset[torch.Tensor]):
    """Samples that are there already, each a tensor: to fetch one costs next to nothing."""

    def __init__(self, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.pool = stored_samples(min(length, POOL), shape, dtype)
        self.samples = self.pool.unbind()
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index % len(self.samples)]


class JpegPhotos(Dataset[torch.Tensor]):
    """The two photographs that scikit-learn ships: decoded, cropped at random to 224 x 224, flipped at random."""

    SIDE = 224

    def __init__(self, length: int) -> None:
        folder = resources.files("sklearn.datasets.images")
        self.files = [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy as np
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as photo:
            image = photo.convert("RGB")
        side = int(torch.randint(self.SIDE // 2, min(image.size) + 1, ()))
        left = int(torch.randint(0, image.width - side + 1, ()))
        top = int(torch.randint(0, image.height - side + 1, ()))
        crop = image.resize((self.SIDE, self.SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
        return pixels.flip(-1) if torch.rand(()) < 0.5 else pixels


class Sentences(Dataset[torch.Tensor]):
    """Token ids of 16 to 256 words."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(16, 257, (4 * POOL,), generator=generator).tolist()
        self.samples = [torch.randint(1, 30_000, (words,), generator=generator) for words in lengths]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index % len(self.samples)]


def pad(sentences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sentences of one length, zeros at the end, and what their lengths were."""
    return {
        "tokens": torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True),
        "lengths": torch.tensor([len(sentence) for sentence in sentences]),
    }


class Stream(IterableDataset[torch.Tensor]):
    """Stored samples as an iterable dataset; each worker yields its share."""

    def __init__(self, length: int) -> None:
        self.pool = stored_samples(POOL, (3, 32, 32), torch.uint8)
        self.samples = self.pool.unbind()
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(first, self.length, step):
            yield self.samples[index % len(self.samples)]


class Stragglers(Dataset[torch.Tensor]):
    """Samples that come from a storage: it answers after 0.2 ms, and after 100 ms for 2% of them."""

    def __init__(self, length: int) -> None:
        self.pool = stored_samples(POOL, (3, 32, 32), torch.uint8)
        self.samples = self.pool.unbind()
        self.slow = frozenset(random.Random(0).sample(range(length), k=round(0.02 * length)))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.1 if index in self.slow else 0.0002)
        return self.samples[index % len(self.samples)]


def wide_table(length: int) -> TensorDataset:
    """512 numbers, 32 categories and a label a row."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand((length, 512), generator=generator),
        torch.randint(0, 100, (length, 32), generator=generator),
        torch.randint(0, 2, (length,), generator=generator),
    )


@dataclass(frozen=True)
class Case:
    """One dataset with its loader's arguments.

    Attributes:
        title: what it is, for the tables.
        make: the dataset of so many samples.
        batch_size: samples a batch.
        batches: batches an epoch; `--quick` takes a sixth, at least 12.
        collate_fn: None: torch's own.
        rayloader: arguments that only rayloader has; the case is not available where it lacks them.
        target: ratio to torch's rate that is aimed at, two workers on two cores.
        floor_target: share of the floor's rate that is aimed at.
    """

    title: str
    make: Callable[[int], Dataset[Any]]
    batch_size: int
    batches: int
    collate_fn: Callable[[list[Any]], Any] | None = None
    rayloader: dict[str, Any] = field(default_factory=dict)
    target: float | None = None
    floor_target: float | None = None

    def epoch_length(self, quick: bool) -> int:
        """Batches an epoch."""
        return max(12, self.batches // 6) if quick else self.batches

    def dataset(self, batches: int) -> Any:
        """The dataset of so many batches."""
        return self.make(batches * self.batch_size)


def _tiny(length: int) -> Dataset[Any]:
    return Stored(length, (1, 28, 28), torch.uint8)


def _medium(length: int) -> Dataset[Any]:
    return Stored(length, (3, 224, 224), torch.uint8)


def _large(length: int) -> Dataset[Any]:
    return Stored(length, (3, 224, 224), torch.float32)


CASES = {
    "tiny": Case("tiny: 64 x 1x28x28 uint8", _tiny, 64, 3600, target=10),
    "medium": Case("medium: 32 x 3x224x224 uint8", _medium, 32, 720, target=8, floor_target=0.7),
    "large": Case("large: 128 x 3x224x224 float32", _large, 128, 60, target=6, floor_target=0.7),
    "jpeg": Case("JPEG: decode and augment, 32 photographs", JpegPhotos, 32, 36, target=1, floor_target=0.95),
    "text": Case("text: 64 sentences, padded", Sentences, 64, 2400, collate_fn=pad, target=4),
    "table": Case("wide table: 256 rows of a TensorDataset", wide_table, 256, 480, target=1.5),
    "stream": Case("iterable stream: 64 x 3x32x32 uint8", Stream, 64, 3000, target=4),
    "stragglers": Case(
        "2% stragglers: 4 samples, dynamic scheduling",
        Stragglers,
        4,
        360,
        rayloader={"scheduling": "dynamic", "seeding": "batch"},
        target=1.5,
    ),
}
