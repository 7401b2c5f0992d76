"""One clear error where a version of another package lacks a private name that rayloader uses; see `_compat*.py`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator

# The oldest and the newest versions that were tested.
TESTED = {
    "Python": "3.11",
    "torch": "2.6 to 2.13",
    "ray": "2.46 to 2.60",
    "cloudpickle": "3.0 to 3.1",
    "datasets": "5.2",
}


@contextlib.contextmanager
def private_names_of(package: str) -> Iterator[None]:
    """For looking them up.

    Raises:
        ImportError: the installed version lacks one.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        installed = platform.python_version() if package == "Python" else importlib.metadata.version(package)
        raise ImportError(
            f"rayloader does not work with {package} {installed}, which lacks a private name that it uses ({error}); "
            f"install a version that it was tested with, {TESTED[package]}, or a newer rayloader"
        ) from error
