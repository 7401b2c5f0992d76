"""A map-style dataset over tables: in memory, or Arrow files that are mapped: `ArrowDataset`.

Promise: Arrow files are mapped, never read whole, and all workers share that memory. A batch is gathered column by
column.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from rayloader.data.columns import Converter, Form, check_alike, paths_of, plain
from rayloader.data.rows import Row
from rayloader.errors import ReplicaError

_FILE, _STREAM = b"ARRO", b"\xff\xff\xff\xff"  # how files begin
_SUFFIXES = (".arrow", ".feather", ".ipc")

if TYPE_CHECKING:
    _DatasetOfRows = Dataset[Row]
else:  # as in loader.py: what parameters torch's classes have may change
    _DatasetOfRows = Dataset


class ArrowDataset(_DatasetOfRows):
    """Rows of a table, which are mappings of names to values; a loader's batch is a dict of columns.

    Whole batches are taken column by column, and the default `collate_fn` gives the columns as they are:
    `{"column": tensor[batch, ...]}`, from torch's loader too. Any other `collate_fn` gets a list of rows. The page on
    columns says what becomes of each type.

    Args:
        source: a `pyarrow.Table`, or any object with `__arrow_c_stream__`; or a path, several, or a folder. Arrow's
            files (IPC files and streams) are mapped; those that are compressed, or have dictionaries or views of text,
            are read into memory. Of a folder these are all `.arrow`, `.feather` and `.ipc` files, in the order of
            their names.
        columns: their names; None: all.
        as_: "tensors"; "numpy": arrays, which the default `collate_fn` makes tensors of; "arrow": Arrow's own arrays.
        fill_null: what stands for a null, by names of columns. There is none among tensors and arrays: one that is met
            is a ValueError.

    Raises:
        TypeError: an argument, or a column, is of a wrong type.
        ValueError: an argument has a wrong value, or the files differ in their columns.
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
        if hasattr(source, "__arrow_c_stream__"):
            table = pa.table(source)
            self._converter = Converter(table.schema, columns, as_, fill_null)
            parts: list[pa.Table | _MappedFile] = [table.select(self.schema.names)]
        else:
            paths = paths_of(source, "an ArrowDataset, if not of a table,")
            files = [file for path in paths for file in _files_at(path)]
            schemas = [_schema_of(file) for file in files]
            self._converter = Converter(schemas[0], columns, as_, fill_null)
            for file, schema in zip(files, schemas, strict=True):
                check_alike(self.schema, files[0], plain(schema), file)
            parts = [_mapped(file, self.schema.names) for file in files]
        self._parts = [
            part if isinstance(part, _MappedFile) else part.cast(self.schema).combine_chunks() for part in parts
        ]
        self._open()

    def _open(self) -> None:
        schema, batches = self.schema, (batch for part in self._parts for batch in part.to_batches())
        self._batches = [
            pa.RecordBatch.from_arrays([batch.column(name) for name in schema.names], schema=schema)
            for batch in batches
            if batch.num_rows
        ]
        self._bounds = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_batches", "_bounds")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

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
        names = "row {}".format
        table = self._converter.ready(self._taken(places), lambda row: names(places[row]))
        return self._converter.rows(table)

    def _places(self, indices: Sequence[int]) -> np.ndarray[Any, Any]:
        places = np.asarray(indices, None if len(indices) else np.int64)
        if places.ndim != 1 or places.dtype.kind not in "iu":
            raise TypeError(f"an index of an ArrowDataset must be a whole number, got {indices!r:.200}")
        length = len(self)
        wrong = (places < -length) | (places >= length)
        if wrong.any():
            raise IndexError(f"ArrowDataset index {places[wrong.argmax()]} is out of range for {length} rows")
        return places.astype(np.int64) % max(1, length)

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


@dataclass(frozen=True)
class _MappedFile:
    """An Arrow file that is mapped, in each process that has the dataset."""

    path: str
    nbytes: int

    def to_batches(self) -> list[pa.RecordBatch]:
        """The batches, whose memory is that of the file."""
        try:
            source = pa.memory_map(self.path)
        except OSError as error:
            raise ReplicaError(
                f"this process cannot open {self.path}, a file of an ArrowDataset: {error}; each node needs the files "
                "of the dataset under the same path"
            ) from None
        if source.size() != self.nbytes:
            raise ReplicaError(
                f"{self.path}, a file of an ArrowDataset, has {source.size()} bytes here, and had {self.nbytes} when "
                "the dataset was made; make the dataset again, and replace its files by renaming, never in place"
            )
        return _batches_of(source)


def _files_at(path: str) -> list[str]:
    """A file, or those of Arrow's formats in a folder, in the order of their names."""
    if "://" in path:
        raise ValueError(
            f"an ArrowDataset maps files of this machine, got {path!r}; read Parquet files elsewhere by a "
            "rayloader.ParquetStream, or copy them"
        )
    files = [os.path.abspath(path)]
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES) and name[0] not in "._")
        files = [os.path.join(files[0], name) for name in names]
        if not files:
            raise FileNotFoundError(f"the folder {path} has no file that ends in {' or '.join(_SUFFIXES)}")
    for file in files:
        if _head(file) not in (_FILE, _STREAM):
            raise ValueError(
                f"files of an ArrowDataset must be of Arrow's formats, got {file}, which begins {_head(file)!r}; read "
                "others into a table, as by pyarrow.parquet.read_table, and give that, or use a rayloader.ParquetStream"
            )
    return files


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(4)


def _mapped(path: str, names: list[str]) -> pa.Table | _MappedFile:
    """A file that is mapped, or a table if its columns do not lie in it as they are: compressed, or to be cast."""
    with _naming(path), pa.memory_map(path) as source:
        region, size = source.read_buffer(), source.size()
        source.seek(0)
        batches = _batches_of(source)
        table = pa.Table.from_batches(batches, batches[0].schema if batches else _schema_of(path)).select(names)
    first = next((batch for batch in table.to_batches() if batch.num_rows), None)
    lie_in = first is None or all(_lies_in(region, column) for column in first.slice(0, 1).columns)
    return _MappedFile(path, size) if lie_in and plain(table.schema).types == table.schema.types else table


def _schema_of(path: str) -> pa.Schema:
    with _naming(path), pa.memory_map(path) as source:
        return (pa.ipc.open_file if _head(path) == _FILE else pa.ipc.open_stream)(source).schema


def _batches_of(source: pa.NativeFile) -> list[pa.RecordBatch]:
    is_file = source.read(len(_FILE)) == _FILE
    source.seek(0)
    if not is_file:
        return list(pa.ipc.open_stream(source))
    reader = pa.ipc.open_file(source)
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Names the file in an error of pyarrow's."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read, it is damaged or not whole: {error}") from error


def _lies_in(region: pa.Buffer, column: pa.Array) -> bool:
    """Whether a column is a part of a file's memory, as it is if the file is not compressed and has no views."""
    end = region.address + region.size
    return all(region.address <= buffer.address < end for buffer in column.buffers() if buffer and buffer.size)
