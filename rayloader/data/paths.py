"""The files behind the paths that a user gave, and Parquet files as datasets of pyarrow's, which knows their layout."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyarrow import dataset, fs

from rayloader.data.columns import plain

_FOOTERS = 16  # that are read at the same time


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


def files_at(filesystem: fs.FileSystem, path: str, suffixes: tuple[str, ...], *, deep: bool) -> list[str]:
    """A file, or those of a folder that hold data, in the order of their names.

    Files and folders in it whose names begin with `.` or `_` hold what other programs have put there.

    Args:
        filesystem: in which the path is.
        path: of a file or a folder.
        suffixes: of the names of files in a folder.
        deep: those in any folder within it; otherwise only in ones such as `day=3`.

    Raises:
        FileNotFoundError: there is none.
    """
    found = filesystem.get_file_info(path)
    if found.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"there is no file or folder {path}")
    if found.type != fs.FileType.Directory:
        return [path]
    files = []
    for one in filesystem.get_file_info(fs.FileSelector(path, recursive=True)):
        *folders, name = os.path.relpath(one.path, path).split("/")
        is_hidden = any(part[0] in "._" for part in (*folders, name))
        if one.is_file and name.endswith(suffixes) and not is_hidden and (deep or all("=" in part for part in folders)):
            files.append(one.path)
    if not files:
        raise FileNotFoundError(f"the folder {path} has no file that ends in {' or '.join(suffixes)}")
    return sorted(files)


def parquet_at(filesystem: fs.FileSystem, path: str, files: list[str]) -> dataset.FileSystemDataset:
    """The Parquet files of a path, with the columns of Hive's folders, and the schema of the first file made plain.

    Raises:
        ValueError: pyarrow can't read the first file, or it has another type for a column than the folders.
    """
    options = dataset.ParquetFragmentScanOptions(pre_buffer=True)
    kind = dataset.ParquetFileFormat(default_fragment_scan_options=options)
    base = path if files != [path] else os.path.dirname(path)
    try:
        found = dataset.dataset(files, format=kind, filesystem=filesystem, partitioning="hive", partition_base_dir=base)
    except (pa.ArrowException, OSError, TypeError) as error:
        raise ValueError(
            f"{files[0]} cannot be read as Parquet, it is damaged or unlike its folder: {error}"
        ) from error
    return found.replace_schema(plain(found.schema))


def fragments_of(found: dataset.FileSystemDataset, names: Iterable[str]) -> list[dataset.ParquetFileFragment]:
    """The files, whose footers are read.

    Args:
        found: the dataset.
        names: of columns that all files must have, as far as they are not those of Hive's folders.

    Raises:
        FileNotFoundError: a file is not there any more.
        ValueError: a footer can't be read, or a file has other columns than the first one.
    """

    def read(fragment: dataset.ParquetFileFragment) -> dataset.ParquetFileFragment:
        try:
            fragment.ensure_complete_metadata()
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"{fragment.path} has no footer of Parquet, it is damaged or not whole: {error}"
            ) from error
        return fragment

    with ThreadPoolExecutor(_FOOTERS, "rayloader-footers") as threads:
        fragments = list(threads.map(read, found.get_fragments()))
    first = fragments[0].physical_schema.names
    wanted = pa.schema([found.schema.field(name) for name in names if name in first])
    for fragment in fragments:
        check_alike(wanted, fragments[0].path, plain(fragment.physical_schema), fragment.path)
    return fragments


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
