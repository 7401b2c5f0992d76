"""A dataset of lightly that can be imported beside any torch; see `client_vision.py`."""

from __future__ import annotations

import vision_operators  # isort: skip  # noqa: F401 (before torchvision)
import lightly.data
from lightly.transforms import SimCLRTransform

__all__ = ["SimCLRTransform", "Views"]


class Views(lightly.data.LightlyDataset):  # type: ignore[misc]
    """lightly's."""
