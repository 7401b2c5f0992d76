"""What every kind of handle that is opened again in a worker needs: the refusal, and the file that must be there."""

from __future__ import annotations

import errno
import os
from typing import Any

Reduction = tuple[Any, ...]
"""What `object.__reduce__` returns."""


def refusal(obj: Any, why: str) -> TypeError:
    """The error for what cannot be had in another process."""
    return TypeError(f"cannot pickle {type(obj).__name__!r} object: {why}")


def there(path: str) -> str:
    """The path, if this machine has it."""
    if not os.path.exists(path):
        reason = "a file that the dataset has open in the trainer must be on the node of each worker, at the same path"
        raise FileNotFoundError(errno.ENOENT, reason, path)
    return path
