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

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

POOL = 256  # samples that exist; an epoch goes through them again and again


def stored_samples(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random samples; written, for pages that were never touched are all one page."""
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.rand((count, *shape), dtype=dtype, generator=generator)
    return torch.randint(0, 256, (count, *shape), dtype=dtype, generator=generator)


class Views(list[torch.Tensor]):
    """The rows of a tensor, pickled as that tensor: loaders whose workers unpickle would pickle all of it for each row.

    Attributes:
        whole: the tensor.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__(whole.unbind())
        self.whole = whole

    def __reduce__(self) -> tuple[Any, ...]:
        return Views, (self.whole,)


Labelled = tuple[torch.Tensor, int]


class Stored(Dataset[Labelled]):
    """Samples that are there already, each a tensor and its label: to fetch one costs next to nothing."""

    def __init__(self, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.samples = Views(stored_samples(min(length, POOL), shape, dtype))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Labelled:
        return self.samples[index % len(self.samples)], index % 10


class Columns(Dataset[dict[str, Any]]):
    """Rows of 20 named numbers, as a table of features gives them."""

    def __init__(self, length: int) -> None:
        self.columns = {f"feature_{number}": torch.rand(POOL).tolist() for number in range(20)}
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, float]:
        return {name: column[index % POOL] for name, column in self.columns.items()}


class JpegPhotos(Dataset[Labelled]):
    """The two photographs that scikit-learn ships: decoded, cropped at random to 224 x 224, flipped at random."""

    SIDE = 224

    def __init__(self, length: int) -> None:
        folder = resources.files("sklearn.datasets.images")
        self.files = [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Labelled:
        from PIL import Image

        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as photo:
            image = photo.convert("RGB")
        side = int(torch.randint(self.SIDE // 2, min(image.size) + 1, ()))
        left = int(torch.randint(0, image.width - side + 1, ()))
        top = int(torch.randint(0, image.height - side + 1, ()))
        crop = image.resize((self.SIDE, self.SIDE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
        return (pixels.flip(-1) if torch.rand(()) < 0.5 else pixels), index % len(self.files)


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


class Stream(IterableDataset[Labelled]):
    """Stored samples as an iterable dataset; each worker yields its share."""

    def __init__(self, length: int) -> None:
        self.samples = Views(stored_samples(POOL, (3, 32, 32), torch.uint8))
        self.length = length

    def __iter__(self) -> Iterator[Labelled]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for index in range(first, self.length, step):
            yield self.samples[index % len(self.samples)], index % 10


class Stragglers(Dataset[Labelled]):
    """Samples that come from a storage: it answers after 0.2 ms, and after 100 ms for 2% of them."""

    def __init__(self, length: int) -> None:
        self.samples = Views(stored_samples(POOL, (3, 32, 32), torch.uint8))
        self.slow = frozenset(random.Random(0).sample(range(length), k=round(0.02 * length)))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Labelled:
        time.sleep(0.1 if index in self.slow else 0.0002)
        return self.samples[index % len(self.samples)], index % 10


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
    """One dataset with its loader's arguments and its consumer.

    Attributes:
        title: what it is, for the tables.
        make: the dataset of so many samples.
        batch_size: samples a batch.
        batches: batches an epoch; `--quick` takes a sixth, at least 12.
        collate_fn: None: torch's own.
        arguments: more of torch's arguments.
        epochs: that one measurement goes through. With one the clock runs from its first batch on; with more it runs
            from the first `iter()` on, for then their beginnings are what is measured.
        rayloader: arguments that only rayloader has.
    """

    title: str
    make: Callable[[int], Dataset[Any]]
    batch_size: int
    batches: int
    collate_fn: Callable[[list[Any]], Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    epochs: int = 1
    rayloader: dict[str, Any] = field(default_factory=dict)

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
    "tiny": Case("tiny: 64 x 1x28x28 uint8, label", _tiny, 64, 3600),
    "tiny-short": Case("tiny, 10 epochs of 100 batches", _tiny, 64, 100, epochs=10),
    "tiny-unordered": Case("tiny, in_order=False", _tiny, 64, 3600, arguments={"in_order": False}),
    "medium": Case("medium: 32 x 3x224x224 uint8, label", _medium, 32, 600),
    "large": Case("large: 128 x 3x224x224 float32, label", _large, 128, 60),
    "jpeg": Case("JPEG: decode and augment, 32 photographs", JpegPhotos, 32, 36),
    "text": Case("text: 64 sentences, padded", Sentences, 64, 2400, collate_fn=pad),
    "table": Case("wide table: 256 rows of a TensorDataset", wide_table, 256, 480),
    "columns": Case("dict of 20 numbers: 64 rows", Columns, 64, 480),
    "stream": Case("iterable stream: 64 x 3x32x32 uint8, label", Stream, 64, 3000),
    "stragglers": Case(
        "2% stragglers: 4 samples, dynamic scheduling",
        Stragglers,
        4,
        360,
        rayloader={"scheduling": "dynamic", "seeding": "batch"},
    ),
}
