"""What the datasets over files ask of the paths that they are given, and of the columns in those files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pyarrow as pa


def paths_of(given: Any, reader: str) -> list[str]:
    """The paths that the user gave.

    Args:
        given: a path, or several.
        reader: the class that reads them.

    Raises:
        TypeError: it is something else.
        ValueError: there is no path.
    """
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    paths = list(several) if isinstance(several, Iterable) else [given]
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"{reader} takes paths, of type str or pathlib.Path, got {path!r:.200}")
    if not paths:
        raise ValueError(f"{reader} needs at least one file, got an empty list of paths")
    return [os.fspath(path) for path in paths]


def data_files(folder: str, paths: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    """The files of a folder that hold data, in the order of their names.

    Files and folders in it whose names begin with `.` or `_` hold what other programs have put there.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(path for path in paths if path.endswith(suffixes) and not _is_hidden(os.path.relpath(path, folder)))
    if not found:
        raise FileNotFoundError(f"the folder {folder} has no file that ends in {' or '.join(suffixes)}")
    return found


def _is_hidden(path: str) -> bool:
    return any(name[0] in "._" for name in path.split("/"))


def check_alike(wanted: pa.Schema, first: str, schema: pa.Schema, path: str) -> None:
    """Compares the columns of a file with those of the first one.

    Raises:
        ValueError: a column that is wanted is missing, or of another type.
    """
    for field in wanted:
        index = schema.get_field_index(field.name)
        if index < 0 or schema.field(index).type != field.type:
            found = "has none" if index < 0 else f"has {schema.field(index).type}"
            raise ValueError(
                f"all files must have the same columns: column {field.name!r} is {field.type} in {first}, and {path} "
                f"{found}; leave it out by columns=, or write the files alike"
            )
