"""Datasets of torchvision and timm that can be imported beside any torch.

The wheels of torchvision on the package index are built for the index's own torch. Beside another build, such as one
for the CPU, their C extension is not loaded, and the import fails because it describes two operators of that extension.
No dataset uses these operators, so they are declared here, before the import. The classes are this module's, so that a
worker process imports this module first as well.
"""

from __future__ import annotations

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # they last as long as this object
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm.data  # noqa: E402
import torchvision.datasets  # noqa: E402
from timm.data import create_loader  # noqa: E402
from torchvision import transforms  # noqa: E402

__all__ = ["ImageDataset", "ImageFolder", "create_loader", "transforms"]


class ImageFolder(torchvision.datasets.ImageFolder):  # type: ignore[misc]
    """torchvision's."""


class ImageDataset(timm.data.ImageDataset):  # type: ignore[misc]
    """timm's."""
