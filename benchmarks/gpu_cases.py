"""What benchmarks/gpu.py loads and trains: batches of samples that exist already, and nets.

Each net's `forward` takes a batch's parts, in main memory's types, and returns the loss. Nothing here knows a loader.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

Parts = tuple[torch.Tensor, ...]
CLASSES = 10


@dataclass(frozen=True)
class Case:
    """Batches, and the net that is trained with them.

    Attributes:
        batch_size: samples of a batch.
        pool: makes the samples that exist, as tensors of equal length; a sample has a part of each.
        net: makes the net; None: rates are measured, without one.
        batches: of an epoch.
    """

    batch_size: int
    pool: Callable[[], Parts]
    net: Callable[[], nn.Module] | None = None
    batches: int = 260


class Samples(Dataset):  # type: ignore[type-arg]
    """Samples that exist already: the loader is all that takes time."""

    def __init__(self, case: Case) -> None:
        self.length = case.batch_size * case.batches
        self.pool = case.pool()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Parts:
        return tuple(part[index % len(part)] for part in self.pool)


# ---- samples


def images(side: int, dtype: torch.dtype = torch.uint8) -> Callable[[], Parts]:
    """Images and their labels."""

    def pool() -> Parts:
        pixels = torch.randint(0, 255, (256, 3, side, side), dtype=torch.uint8)
        return pixels.to(dtype), torch.arange(len(pixels)) % CLASSES

    return pool


def table(columns: int) -> Callable[[], Parts]:
    """Rows of numbers, and their labels."""
    return lambda: (torch.randn(1 << 14, columns), torch.arange(1 << 14) % CLASSES)


# ---- nets


class Classifier(nn.Module):
    """Layers whose results say how likely each class is; the loss of parts and labels, as float32."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, parts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = parts.float()
        if parts.dim() == 4:
            parts = (parts / 255).contiguous(memory_format=torch.channels_last)
        return functional.cross_entropy(self.layers(parts), labels)


def conv_net() -> nn.Module:
    """Five convolutions; a step of it takes some milliseconds."""
    widths = (3, 32, 64, 128, 128, 128)
    layers = [
        part
        for before, after in itertools.pairwise(widths)
        for part in (nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
    ]
    return Classifier(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


def mlp(columns: int, width: int = 1024) -> nn.Module:
    """Over the rows of a table; a step of it takes about a millisecond."""
    return Classifier(
        nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


# ---- cases

NETS = {
    "conv net: 256 x 3 x 224 x 224 uint8, 38.5 MB": Case(256, images(224), conv_net),
    "MLP: table of 4,096 x 200 float32, 3.3 MB": Case(4096, table(200), lambda: mlp(200)),
}
RATES = {
    "medium: 64 x 3 x 224 x 224 uint8, 9.6 MB": Case(64, images(224), batches=300),
    "large: 128 x 3 x 224 x 224 float32, 77 MB": Case(128, images(224, torch.float32), batches=100),
}
SIMULATED_NETS = {
    "conv net: 4 x 3 x 32 x 32 uint8": Case(4, images(32), conv_net, 30),
    "MLP: table of 128 x 200 float32": Case(128, table(200), lambda: mlp(200, 64), 30),
}
SIMULATED_RATES = {
    "medium: 8 x 3 x 64 x 64 uint8": Case(8, images(64), batches=12),
    "large: 16 x 3 x 128 x 128 float32": Case(16, images(128, torch.float32), batches=8),
}
