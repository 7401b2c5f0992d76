"""A map-style dataset over tables: in memory, Arrow files, or Parquet files that become Arrow files: `ArrowDataset`.

Promise: Arrow files are mapped, never read whole, and all workers share that memory. A batch is gathered column by
column. A file in a cache folder is whole, whatever became of the process that wrote it: it gets its name when all of it
is on the disk. It is this user's alone, and is used only if nobody else can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import dataset, fs, parquet
from torch.utils.data import Dataset

from rayloader.data.columns import Converter, Form, has_dictionaries, with_wide_indices, without_views
from rayloader.data.paths import check_alike, data_files, partitioning_of, paths_of, with_columns
from rayloader.data.rows import Row
from rayloader.data.trusted import open_own
from rayloader.errors import ReplicaError, add_note

_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_SUFFIXES = (".arrow", ".feather", ".ipc", ".parquet")
_OPENED = ("_batches", "_part_of", "_bounds")  # what each process has of its own
# Bytes of a batch in a cache file: from few batches rows are taken quickly, and each must fit into memory, twice.
_CACHED_BYTES = 256 * 2**20

_Path = str | os.PathLike[str]
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
        source: a `pyarrow.Table`, or any object with `__arrow_c_stream__`; or a path, several, or a folder. Files are
            of Arrow's formats (IPC files and streams), which are mapped, or Parquet, which is converted to that. Of a
            folder these are all `.arrow`, `.feather`, `.ipc` and `.parquet` files in the order of their names, those
            of folders such as `day=3` in it too; `day` is a column then.
        columns: their names; None: all.
        as_: "tensors"; "numpy": arrays, which the default `collate_fn` makes tensors of; "arrow": Arrow's own arrays.
        decode: functions by names of columns with binary data or text, called with each value.
        fill_null: what stands for a null, by names of columns. There is none among tensors and arrays: one that is met
            is a ValueError.
        cache: a folder for what is converted, that is Parquet and Arrow files that are compressed or hold views of
            text, as Polars writes them; it can be shared by many processes of one user. None: in memory.

    Raises:
        TypeError: an argument, or a column, is of a wrong type.
        ValueError: an argument has a wrong value, or the files differ in their columns.
        FileNotFoundError: there is no such file, or none in the folder.
        CacheError: others than this user may have written a file that is in the cache.
    """

    def __init__(
        self,
        source: Any,
        *,
        columns: Sequence[str] | None = None,
        as_: Form = "tensors",
        decode: Mapping[str, Callable[[Any], Any]] | None = None,
        fill_null: Mapping[str, Any] | None = None,
        cache: _Path | None = None,
    ) -> None:
        if hasattr(source, "__arrow_c_stream__"):
            if cache is not None:
                raise ValueError(f"cache is a folder for Parquet files, and a table needs none, got {cache!r}")
            table = pa.table(source)
            files, names, first = [], [], without_views(table.schema)
        else:
            files, names = map(list, zip(*_files(source), strict=True))
            if cache is not None and os.path.abspath(cache) in map(os.path.dirname, files):
                raise ValueError(
                    f"cache must be another folder than those of the files, which would be read twice, got {cache!r}"
                )
            first = _schema(files[0])
        schema = with_wide_indices(first)
        partitioning = partitioning_of(names, schema)
        self._converter = Converter(with_columns(schema, partitioning.schema), columns, as_, decode, fill_null)
        of_files = [field for field in self.schema if field.name not in partitioning.schema.names]
        self._wanted = wanted = pa.schema(of_files or list(schema)[:1])  # batches without columns have no rows either
        self._has_dictionaries = has_dictionaries(wanted)
        schemas = [_schema(file) for file in files]
        for file, found in zip(files, schemas, strict=True):
            check_alike(wanted, files[0], with_wide_indices(found), file)
        if files:
            pairs = zip(files, schemas, strict=True)
            self._parts = [_part(file, _as_in(found, wanted), wanted, cache) for file, found in pairs]
        else:
            kept = _as_in(first, wanted)
            self._parts = [pa.Table.from_batches([_with(kept, batch) for batch in table.to_batches()], kept)]
        keys = [dataset.get_partition_keys(partitioning.parse(name)) for name in names]
        self._of_folders = {
            field.name: pa.array([found.get(field.name) for found in keys], field.type)
            for field in partitioning.schema
            if field.name in self.schema.names
        }
        self._open()

    def _open(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        part_of: list[int] = []
        for number, part in enumerate(self._parts):
            batches = part.batches() if isinstance(part, _MappedFile) else part.to_batches()
            self._batches += [batch for batch in batches if batch.num_rows]
            part_of += [number] * (len(self._batches) - len(part_of))
        self._part_of = np.array(part_of, np.int64)  # of each batch
        self._bounds = np.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OPENED}

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
        return self._converter.convert(self._rows(places), lambda row: f"row {places[row]}").rows()

    def _places(self, indices: Sequence[int]) -> np.ndarray[Any, Any]:
        places = np.asarray(indices, None if len(indices) else np.int64)
        if places.ndim != 1 or places.dtype.kind not in "iu":
            raise TypeError(f"an index of an ArrowDataset must be a whole number, got {indices!r:.200}")
        length = len(self)
        wrong = (places < -length) | (places >= length)
        if wrong.any():
            raise IndexError(f"ArrowDataset index {places[wrong.argmax()]} is out of range for {length} rows")
        places = places.astype(np.int64)
        return np.where(places < 0, places + length, places)

    def _rows(self, places: np.ndarray[Any, Any]) -> pa.RecordBatch | pa.Table:
        """These rows, with the columns that the names of folders give."""
        if not len(places):
            return self.schema.empty_table()
        numbers = np.searchsorted(self._bounds, places, "right") - 1
        taken = self._taken(places, numbers)
        if not self._of_folders:
            return taken
        parts = pa.array(self._part_of[numbers])
        columns = {name: values.take(parts) for name, values in self._of_folders.items()}
        return pa.table([columns[name] if name in columns else taken[name] for name in self.schema.names], self.schema)

    def _taken(self, places: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> pa.RecordBatch | pa.Table:
        """These rows of the batches of these numbers, in memory of their own.

        From one batch by `take`. From several row by row: `take` on several chunks of a column of lists or text would
        first copy all of the column. But with dictionaries batch by batch: to join two takes a look at each value.
        """
        if (numbers == numbers[0]).all():
            number = numbers[0]
            taken = self._converter.take(self._batches[number], places - self._bounds[number])
            return _with(self._wanted, taken) if self._has_dictionaries else taken
        if self._has_dictionaries:
            order = np.argsort(numbers, kind="stable")
            ordered = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
            parts = [self._taken(places[some], numbers[some]) for some in ordered]
            return self._converter.take(pa.Table.from_batches(parts).combine_chunks(), np.argsort(order))
        pairs = zip(numbers.tolist(), (places - self._bounds[numbers]).tolist(), strict=True)
        return pa.Table.from_batches([self._batches[number].slice(row, 1) for number, row in pairs]).combine_chunks()


@dataclass(frozen=True)
class _MappedFile:
    """An Arrow file that is mapped, in each process that has the dataset."""

    path: str
    nbytes: int
    schema: pa.Schema  # of the columns that are wanted, with the indices of dictionaries as they are in the file
    modified: int  # in ns: what a cache of the rows depends on; another node's copy may have another time
    is_copy: bool = False  # a file of a cache

    def batches(self) -> list[pa.RecordBatch]:
        try:
            source = _mapped_copy(self.path) if self.is_copy else pa.memory_map(self.path)
        except OSError as error:
            raise ReplicaError(
                f"this process cannot open {self.path}, a file of an ArrowDataset: {error}; each node needs the files "
                "of the dataset, and its cache folder, under the same path"
            ) from None
        if source.size() != self.nbytes:
            raise ReplicaError(
                f"{self.path}, a file of an ArrowDataset, has {source.size()} bytes here, and had {self.nbytes} when "
                "the dataset was made; make the dataset again, and replace its files by renaming, never in place"
            )
        return [_with(self.schema, batch) for batch in _batches_of(source, self.path)]


def _files(source: Any) -> list[tuple[str, str]]:
    """The paths of files, from those that the user gave, each with its name in the folder that was given."""
    files: list[tuple[str, str]] = []
    for path in paths_of(source, "an ArrowDataset, if not of a table,"):
        if "://" in path:
            raise ValueError(
                f"an ArrowDataset maps files of this machine, got {path!r}; read Parquet files elsewhere by a "
                "rayloader.ParquetStream, or copy them"
            )
        absolute = os.path.abspath(path)
        if os.path.isdir(absolute):
            inside = [os.path.join(absolute, name) for name in os.listdir(absolute)]
            parts = {path for path in inside if "=" in os.path.basename(path) and os.path.isdir(path)}
            walks = (os.walk(part, followlinks=True) for part in parts)
            below = [os.path.join(at, name) for walk in walks for at, _, names in walk for name in names]
            files += data_files(absolute, [*(path for path in inside if path not in parts), *below], _SUFFIXES)
        else:
            files.append((absolute, os.path.basename(absolute)))
    return files


def _kind(path: str) -> bytes:
    with open(path, "rb") as file:
        return _kind_of(file, path)


def _kind_of(file: Any, path: str) -> bytes:
    head = file.read(8)
    file.seek(0)
    for kind in (_PARQUET, _ARROW_FILE, _ARROW_STREAM):
        if head.startswith(kind):
            return kind
    raise ValueError(f"a file of an ArrowDataset must be an Arrow or a Parquet file, got {path}, which begins {head!r}")


def _schema(path: str) -> pa.Schema:
    kind = _kind(path)
    with _naming(path):
        if kind == _PARQUET:
            return without_views(parquet.read_schema(path))
        with pa.memory_map(path) as source:
            return without_views(_reader(source, kind).schema)


def _reader(source: Any, kind: bytes) -> Any:
    return pa.ipc.open_file(source) if kind == _ARROW_FILE else pa.ipc.open_stream(source)


def _batches_of(source: Any, path: str) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file, one after the other."""
    kind = _kind_of(source, path)
    with _naming(path):
        reader = _reader(source, kind)
        if kind == _ARROW_STREAM:
            yield from reader
        else:
            yield from map(reader.get_batch, range(reader.num_record_batches))


def _with(schema: pa.Schema, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns of this schema. What a file says beyond their types, as that nothing in it is null, is dropped."""
    pairs = [(batch.column(field.name), field.type) for field in schema]
    columns = [column if column.type == kind else column.cast(kind) for column, kind in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _as_in(stored: pa.Schema, wanted: pa.Schema) -> pa.Schema:
    """The columns that are wanted, with the types that they have in a file."""
    return pa.schema([field.with_type(stored.field(field.name).type) for field in wanted])


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Names the file in an error of pyarrow's."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read, it is damaged or not whole: {error}") from error


def _part(path: str, stored: pa.Schema, wanted: pa.Schema, cache: _Path | None) -> Any:
    """What a file holds: mapped, as it is stored, or as a table in memory."""
    if _kind(path) != _PARQUET:
        modified = os.stat(path).st_mtime_ns
        with pa.memory_map(path) as source:
            mapped = _MappedFile(path, source.size(), stored, modified)
            region = source.read_buffer()
            source.seek(0)
            first = next((batch for batch in _batches_of(source, path) if batch.num_rows), None)
            if first is None or all(_lies_in(region, column) for column in _with(stored, first.slice(0, 1)).columns):
                return mapped
    if cache is None:
        table = pa.Table.from_batches(_to_convert(path, wanted), wanted)
        return table.combine_chunks()
    target = _converted(path, wanted, cache)
    # The name of what was converted says when its source was modified.
    with _mapped_copy(target) as source, _naming(target):
        schema = _as_in(pa.ipc.open_stream(source).schema, wanted)
        return _MappedFile(target, source.size(), schema, modified=0, is_copy=True)


def _lies_in(region: pa.Buffer, column: pa.Array) -> bool:
    """Whether a column is a part of a file's memory, as it is if the file is not compressed and has no views."""
    end = region.address + region.size
    return all(region.address <= buffer.address < end for buffer in column.buffers() if buffer and buffer.size)


def _to_convert(path: str, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The columns of a file that cannot be mapped."""
    with _naming(path):
        if _kind(path) == _PARQUET:
            # `ParquetFile` cannot read dictionaries in lists and structs from several row groups.
            file = dataset.ParquetFileFormat().make_fragment(path, fs.LocalFileSystem())
            batches = file.to_batches(wanted, columns=wanted.names)
            yield from (_with(wanted, batch) for batch in batches)
        else:
            with pa.memory_map(path) as source:
                yield from (_with(wanted, batch) for batch in _batches_of(source, path))


def _in_large_parts(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    part: list[pa.RecordBatch] = []
    nbytes = 0
    for batch in batches:
        part.append(batch.replace_schema_metadata(None))
        nbytes += batch.nbytes
        if nbytes >= _CACHED_BYTES:
            yield pa.Table.from_batches(part)
            part, nbytes = [], 0
    if part:
        yield pa.Table.from_batches(part)


def _converted(path: str, wanted: pa.Schema, cache: _Path) -> str:
    """The path of the Arrow file in the cache; it is written if it is not there."""
    status = os.stat(path)
    content = repr((os.path.abspath(path), status.st_size, status.st_mtime_ns, wanted.names, pa.__version__))
    name = f"{Path(path).stem[:40]}-{hashlib.sha256(content.encode()).hexdigest()[:24]}.arrow"
    target = os.path.join(os.path.abspath(cache), name)
    with contextlib.suppress(FileNotFoundError):
        os.close(open_own(target))
        return target
    os.makedirs(cache, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(suffix=".tmp", prefix=f".{name}-", dir=cache)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # A stream: in the file format a column has one dictionary for all batches.
            with pa.ipc.new_stream(file, wanted.remove_metadata()) as writer:
                for table in _in_large_parts(_to_convert(path, wanted)):
                    writer.write_table(table.combine_chunks())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:  # also an interrupt: nothing half-written is left
        os.unlink(temporary)
        add_note(error, f"this was raised while {path} was converted into the cache folder {cache}")
        raise
    return target


def _mapped_copy(path: str) -> pa.MemoryMappedFile:
    """A file of a cache."""
    descriptor = open_own(path)
    try:
        return pa.memory_map(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
