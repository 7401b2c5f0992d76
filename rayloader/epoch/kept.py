"""What one iterator of a loader leaves to the next: the image of its replica, and the paces of its workers.

Promise: kept until the loader's end, or `forget`. Any thread may call; what ends is ended by the janitor's thread.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field

from rayloader.epoch.pace import Pace
from rayloader.replica.image import Image
from rayloader.workers.pool import Pool


@dataclass(eq=False, slots=True)
class Kept:
    """What is kept of one loader.

    Attributes:
        image: of its replica, as last sent: the next one is compared with it.
        paces: of its workers, as their last epoch left them.
    """

    image: Image | None = None
    paces: list[Pace] = field(default_factory=list)


_kept: dict[int, tuple[weakref.ref[object], Kept]] = {}  # by the loader's identity


def kept_of(loader: object, pool: Pool) -> Kept:
    """What is kept of that loader."""
    key = id(loader)
    entry = _kept.get(key)
    if entry is None or entry[0]() is not loader:
        ended = functools.partial(_later, pool, key)
        entry = _kept[key] = weakref.ref(loader, ended), Kept()
    return entry[1]


def forget() -> None:
    """Ends the images of all loaders."""
    _kept.clear()


def image_files() -> set[str]:
    """Names of the memory files of all images, of loaders that are not gone (test support)."""
    images = [kept.image for _, kept in list(_kept.values()) if kept.image is not None]
    return {file.name for image in images for file in image.address.files}


def _later(pool: Pool, key: int, ref: weakref.ref[object]) -> None:
    pool.later(functools.partial(_drop, key, ref))


def _drop(key: int, ref: weakref.ref[object]) -> None:
    if key in _kept and _kept[key][0] is ref:  # otherwise another loader is where that one was
        del _kept[key]
