"""Shared by all handles that are opened again in a worker: the error, and the check that a file is there."""

from __future__ import annotations

import errno
import os
from typing import Any

Reduction = tuple[Any, ...]
"""What `object.__reduce__` returns."""


def refusal(obj: Any, why: str) -> TypeError:
    """The error for an object that cannot exist in another process."""
    return TypeError(f"cannot pickle {type(obj).__name__!r} object: {why}")


def there(path: str) -> str:
    """Returns the path, if this machine has it."""
    if not os.path.exists(path):
        reason = "a file that the dataset has open in the trainer must be on the node of each worker, at the same path"
        raise FileNotFoundError(errno.ENOENT, reason, path)
    return path
