"""What the datasets over files ask of the paths that they are given, and of the columns in those files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import dataset


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


def data_files(folder: str, paths: Iterable[str], suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The files of a folder that hold data, in the order of their names; each with its name in the folder.

    Files and folders in it whose names begin with `.` or `_` hold what other programs have put there.

    Raises:
        FileNotFoundError: there is none.
    """
    named = ((path, os.path.relpath(path, folder)) for path in paths if path.endswith(suffixes))
    found = sorted((path, name) for path, name in named if not _is_hidden(name))
    if not found:
        raise FileNotFoundError(f"the folder {folder} has no file that ends in {' or '.join(suffixes)}")
    return found


def _is_hidden(path: str) -> bool:
    return any(name[0] in "._" for name in path.split("/"))


def partitioning_of(names: Sequence[str], schema: pa.Schema) -> dataset.Partitioning:
    """The columns that hive's names of folders give to the files in them, as `pyarrow.dataset` reads `day=3/x.parquet`.

    They are whole numbers of 32 bits if all values are, and text otherwise. A column that the files have too is theirs
    if it is of another type there, which pyarrow refuses, or if some of them lie in no such folder.

    Args:
        names: of the files, as they lie in the folder that was given.
        schema: of the files.
    """
    folders = (part for name in names for part in name.split("/")[:-1])
    keys = dict.fromkeys(unquote(part.partition("=")[0]) for part in folders if "=" in part)
    as_text = dataset.HivePartitioning(pa.schema([(key, pa.string()) for key in keys]))
    values = [dataset.get_partition_keys(as_text.parse(name)) for name in names] if keys else []
    fields = []
    for key in keys:
        kind = pa.int32()
        try:
            pa.array([found.get(key) for found in values], pa.string()).cast(kind)
        except pa.ArrowInvalid:
            kind = pa.string()
        place = schema.get_field_index(key)
        if place < 0 or (schema.field(place).type == kind and all(key in found for found in values)):
            fields.append(pa.field(key, kind))
    return dataset.HivePartitioning(pa.schema(fields))


def with_columns(schema: pa.Schema, more: pa.Schema) -> pa.Schema:
    """The schema, with those of these columns that it lacks at the end."""
    return pa.schema([*schema, *(field for field in more if field.name not in schema.names)], schema.metadata)


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
