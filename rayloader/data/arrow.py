"""A map-style dataset over tables: in memory, or Arrow files that are mapped: `ArrowDataset`.

Promise: Arrow files are mapped, never read whole, and all workers share that memory. A batch is gathered column by
column.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from rayloader.data.columns import Converter, Form, Row, cast, check_alike, paths_of, plain
from rayloader.errors import ReplicaError

_SUFFIXES = (".arrow", ".feather", ".ipc")


class ArrowDataset(Dataset[Row]):
    """Rows of a table, which are mappings of names to values; a loader's batch is a dict of columns.

    Whole batches are taken column by column, and the default `collate_fn` gives the columns as they are:
    `{"column": tensor[batch, ...]}`, from torch's loader too. Any other `collate_fn` gets a list of rows. The page on
    columns says what becomes of each type.

    Args:
        source: a `pyarrow.Table`, or any object with `__arrow_c_stream__`; or a path, several, or a folder. Arrow's
            files (IPC files and streams) are mapped; dictionaries and views in them are decoded, in each actor. Of a
            folder these are all `.arrow`, `.feather` and `.ipc` files, in the order of their names.
        columns: their names; None: all.
        as_: "tensors"; "arrow": Arrow's own arrays.
        fill_null: what stands for a null, by names of columns. There is none among tensors: one that is met is a
            ValueError.

    Raises:
        TypeError: an argument, or a column, is of a wrong type.
        KeyError: there is no such column.
        ValueError: an argument has a wrong value, the files differ in their columns, or one is compressed.
        FileNotFoundError: there is no such file, or none in the folder.
    """

    def __init__(
        self,
        source: Any,
        *,
        columns: Sequence[str] | None = None,
        as_: Form = "tensors",
        fill_null: Mapping[str, Any] | None = None,
    ) -> None:
        is_table = hasattr(source, "__arrow_c_stream__")
        paths = [] if is_table else _files_at(source)
        self._files = [(path, os.path.getsize(path)) for path in paths]  # and how many bytes they have
        tables = [pa.table(source)] if is_table else [_mapped(path) for path in paths]
        self._converter = Converter(tables[0].schema, columns, as_, fill_null)
        for number, path in enumerate(paths):
            check_alike(self.schema, paths[0], plain(tables[number].schema), path)
        self._open([cast(tables[0], self.schema).combine_chunks()] if is_table else tables)

    def _open(self, tables: list[pa.Table]) -> None:
        batches = (batch for table in tables for batch in cast(table, self.schema).to_batches())
        self._batches = [batch for batch in batches if batch.num_rows]
        self._bounds = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_batches" or not self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._files:
            self._open([_mapped_again(*file) for file in self._files])

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return self._converter.schema

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """The rows of these indices, for a loader."""
        places = self._places(indices)
        table = self._converter.ready(self._taken(places), lambda row: f"row {places[row]}")
        return self._converter.rows(table)

    def _places(self, indices: Sequence[int]) -> np.ndarray[Any, Any]:
        places, length = np.asarray(indices, None if len(indices) else np.int64), len(self)
        wrong = (places < -length) | (places >= length)
        if wrong.any():
            raise IndexError(f"ArrowDataset index {places[wrong.argmax()]} is out of range for {length} rows")
        return places.astype(np.int64, casting="same_kind") % max(1, length)

    def _taken(self, places: np.ndarray[Any, Any]) -> pa.Table:
        """These rows, in memory of their own.

        From one batch by `take`. From several row by row: `take` on several chunks of a column of lists or text would
        first copy all of the column.
        """
        if not len(places):
            return self.schema.empty_table()
        numbers = np.searchsorted(self._bounds, places, "right") - 1
        if (numbers == numbers[0]).all():
            return self._converter.take(self._batches[numbers[0]], places - self._bounds[numbers[0]])
        pairs = zip(numbers.tolist(), (places - self._bounds[numbers]).tolist(), strict=True)
        return self._converter.joined([self._batches[number].slice(row, 1) for number, row in pairs])


def _files_at(source: Any) -> list[str]:
    """The files of paths; of a folder those of Arrow's formats, in the order of their names."""
    files: list[str] = []
    for path in paths_of(source, "an ArrowDataset, if not of a table,"):
        found = [path]
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES) and name[0] not in "._")
            found = [os.path.join(path, name) for name in names]
        if not found:
            raise FileNotFoundError(f"the folder {path} has no file that ends in {' or '.join(_SUFFIXES)}")
        files += map(os.path.abspath, found)
    return files


def _mapped(path: str) -> pa.Table:
    try:
        with pa.memory_map(path) as source:
            file = source.read_buffer()
        table = (pa.ipc.open_file if file.slice(0, 4) == b"ARRO" else pa.ipc.open_stream)(file).read_all()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} must be a whole Arrow file, and cannot be read: {error}; give the table that is read from another "
            "file, as by pyarrow.parquet.read_table, or use a rayloader.ParquetStream"
        ) from error
    chunks = [chunk for column in table.slice(0, 1).columns for chunk in column.chunks]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers() if buffer]
    if not all(file.address <= buffer.address < file.address + file.size for buffer in buffers):
        raise ValueError(
            f"files are mapped, and {path} is compressed; write it without compression, or give the table that "
            "pyarrow.feather.read_table reads"
        )
    return table


def _mapped_again(path: str, nbytes: int) -> pa.Table:
    """A file in another process, perhaps on another node."""
    here = os.path.getsize(path) if os.path.exists(path) else 0
    if here != nbytes:
        raise ReplicaError(
            f"{path}, a file of an ArrowDataset, has {here} bytes here, and had {nbytes} when the dataset was made; "
            "each node needs the same file under that path, and for another one the dataset must be made again"
        )
    return _mapped(path)
