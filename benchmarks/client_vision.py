"""Datasets of torchvision and timm that can be imported beside any torch.

The classes are this module's, so that a worker process imports this module first as well.
"""

from __future__ import annotations

import vision_operators  # isort: skip  # noqa: F401 (before torchvision)
import timm.data
import torchvision.datasets
from timm.data import create_loader
from torchvision import transforms

__all__ = ["ImageDataset", "ImageFolder", "create_loader", "transforms"]


class ImageFolder(torchvision.datasets.ImageFolder):  # type: ignore[misc]
    """torchvision's."""


class ImageDataset(timm.data.ImageDataset):  # type: ignore[misc]
    """timm's."""
