"""What benchmarks/gpu.py loads and trains: batches of samples that exist already, and real nets in plain torch.

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


def sequences(length: int, words: int) -> Callable[[], Parts]:
    """Token ids."""
    return lambda: (torch.randint(words, (2048, length)),)


def table(columns: int) -> Callable[[], Parts]:
    """Rows of numbers, and their labels."""
    return lambda: (torch.randn(1 << 14, columns), torch.arange(1 << 14) % CLASSES)


# ---- nets


class Classifier(nn.Module):
    """Layers whose results say how likely each class is; the loss of parts and labels.

    Args:
        layers: take float32.
        scale: of the parts.
        autocast: bfloat16 wherever torch thinks it right.
    """

    def __init__(self, layers: nn.Module, scale: float = 1.0, autocast: bool = False) -> None:
        super().__init__()
        self.layers, self.scale, self.autocast = layers, scale, autocast

    def forward(self, parts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = parts.float() * self.scale
        if parts.dim() == 4:
            parts = parts.contiguous(memory_format=torch.channels_last)
        with torch.autocast(parts.device.type, torch.bfloat16, enabled=self.autocast):
            return functional.cross_entropy(self.layers(parts), labels)


class Block(nn.Module):
    """Two convolutions, and the way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_convolved(before, after, 3, stride), nn.ReLU(inplace=True), *_convolved(after, after, 3, 1)
        )
        self.around = nn.Sequential(*(_convolved(before, after, 1, stride) if stride > 1 else ()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(images) + self.around(images), inplace=True)


def _convolved(before: int, after: int, side: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, side, stride, side // 2, bias=False), nn.BatchNorm2d(after)


def resnet18(width: int = 64) -> nn.Module:
    """He et al., 2015, table 1: 18 layers; in bfloat16 and channels_last, as it is trained today."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    stages = [
        nn.Sequential(Block(before, after, 1 + (before < after)), Block(after, after, 1))
        for before, after in itertools.pairwise(widths)
    ]
    layers = nn.Sequential(
        *_convolved(3, width, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, CLASSES),
    )
    return Classifier(layers.to(memory_format=torch.channels_last), 1 / 255, autocast=True)


def conv_net() -> nn.Module:
    """A small one, whose step takes some milliseconds."""
    layers = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )
    return Classifier(layers.to(memory_format=torch.channels_last), 1 / 255)


def mlp(columns: int, width: int = 1024) -> nn.Module:
    """Over the rows of a table; a step of it takes about a millisecond."""
    layers = nn.Sequential(
        nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )
    return Classifier(layers)


class Transformer(nn.Module):
    """Predicts the next token; in bfloat16."""

    def __init__(self, words: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.last = nn.Linear(width, words)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length - 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        given, following = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            known = self.words(given) + self.places.weight[: given.shape[1]]
            likely = self.last(self.layers(known, mask=self.mask, is_causal=True))
            return functional.cross_entropy(likely.flatten(0, 1), following.flatten())


# ---- cases

NETS = {
    "ResNet-18: 256 x 3 x 224 x 224 uint8, 38.5 MB": Case(256, images(224), resnet18),
    "transformer: 32 x 512 token ids, 131 kB": Case(32, sequences(512, 8192), lambda: Transformer(8192, 512, 6, 512)),
    "MLP: table of 4,096 x 200 float32, 3.3 MB": Case(4096, table(200), lambda: mlp(200)),
    "conv net: 64 x 3 x 224 x 224 uint8, 9.6 MB": Case(64, images(224), conv_net),
}
RATES = {
    "medium: 64 x 3 x 224 x 224 uint8, 9.6 MB": Case(64, images(224), batches=300),
    "large: 128 x 3 x 224 x 224 float32, 77 MB": Case(128, images(224, torch.float32), batches=100),
}
SIMULATED_NETS = {
    "ResNet-18: 4 x 3 x 32 x 32 uint8": Case(4, images(32), lambda: resnet18(8), 30),
    "transformer: 4 x 64 token ids": Case(4, sequences(64, 128), lambda: Transformer(128, 64, 2, 64), 30),
    "MLP: table of 128 x 200 float32": Case(128, table(200), lambda: mlp(200, 64), 30),
    "conv net: 8 x 3 x 64 x 64 uint8": Case(8, images(64), conv_net, 30),
}
SIMULATED_RATES = {
    "medium: 8 x 3 x 64 x 64 uint8": Case(8, images(64), batches=12),
    "large: 16 x 3 x 128 x 128 float32": Case(16, images(128, torch.float32), batches=8),
}
