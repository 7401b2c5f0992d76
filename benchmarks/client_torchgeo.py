"""A dataset of torchgeo that can be imported beside any torch; see `client_vision.py`."""

from __future__ import annotations

import vision_operators  # isort: skip  # noqa: F401 (before torchvision)
import torchgeo.datasets


class Rasters(torchgeo.datasets.RasterDataset):  # type: ignore[misc]
    """torchgeo's, of all pictures in a folder."""

    filename_glob = "*.tif"
