"""A stream of the rows of Parquet files, divided among ranks and workers: `ParquetStream`.

Promise: the parts of all workers of all ranks together are the whole, each row once, unless equal steps were asked
for. Order and parts depend on the files, the arguments and the epoch alone. The state of an iterator is a position, and
going on from it reads nothing before its row group. A file that is replaced while it is read is an error: some rows
would be old ones, and others new. Which files there are, their columns and what of a row group is read is
`pyarrow.dataset`'s.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal
from weakref import finalize

import numpy as np
import pyarrow as pa
from pyarrow import dataset, fs, parquet
from torch.utils.data import IterableDataset, get_worker_info

from rayloader.data.columns import Converter, Form, Row, check_alike, paths_of, plain
from rayloader.errors import RayloaderError, StateError
from rayloader.host.shard_info import ShardInfo, get_shard_info
from rayloader.options import check_whole
from rayloader.resume.samplers import trains_in_a_group
from rayloader.resume.wrapped import Numbered

# Of rows that are converted at once. In a ShuffleBuffer one of them keeps the memory of all, and a batch of rows from
# many such chunks is taken from all of them together; chunks of 16 KiB and of 256 KiB were slower.
_CHUNK_BYTES = 32 << 10
_FOOTERS = 16  # that are read at the same time
_OPEN = 64  # files whose footers an iterator keeps; parsing one takes 1 to 3 ms, and reading a row group 2 to 8 ms
# Filesystems of pyarrow whose threads and connections a fork does not have.
_LOST_BY_FORK = {"s3", "gcs", "abfs", "hdfs"}

_Array = np.ndarray[Any, Any]


class ParquetStream(IterableDataset[Row]):
    """The rows of Parquet files, for workers of all ranks, each of which reads its part.

    Rows are mappings of names to values, and become a dict of columns in a batch, as those of an `ArrowDataset` do.
    Row groups are divided among the workers of all ranks by `get_shard_info`. Each worker holds the row group that it
    gives, and the next one, which it reads meanwhile. The iterator has `state_dict()` and `load_state_dict()`, which
    rayloader's loader and torchdata's call.

    Args:
        paths: a path, several of files, or a folder, all of whose files are read, as `pyarrow.dataset.dataset` does;
            also URIs, such as `s3://bucket/folder`. Folders such as `day=3` give a column `day`.
        filesystem: of pyarrow, in which the paths are; None: that of the URI, or this machine's.
        columns: their names; None: all.
        filters: which rows: an expression of `pyarrow.compute`, or a list as `pyarrow.parquet.read_table` takes it.
        as_: "tensors" or "arrow", as for `ArrowDataset`; so is `fill_null`.
        fill_null: what stands for a null, by names of columns.
        shuffle: the row groups come in another order in each epoch. A `ShuffleBuffer` mixes their rows.
        seed: of that order.
        equal_steps: "cut": all workers give the same number of rows, and a few rows of the epoch, fewer than there are
            workers, are left out; "pad": likewise, and that few rows come twice; None: row groups stay whole.

    Attributes:
        epoch: of which `iter()` gives the order; see `set_epoch`.

    Raises:
        TypeError: an argument, or a column, is of a wrong type.
        ValueError: an argument has a wrong value, or the files differ in their columns.
        KeyError: there is no such column.
        FileNotFoundError: there is no such file, or none in the folder.

    For paths that are not on this machine these come from the first batch: a filesystem that has been used does not
    survive the fork of a worker.
    """

    def __init__(
        self,
        paths: Any,
        *,
        filesystem: fs.FileSystem | None = None,
        columns: Sequence[str] | None = None,
        filters: Any = None,
        as_: Form = "tensors",
        fill_null: Mapping[str, Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        equal_steps: Literal["cut", "pad"] | None = None,
    ) -> None:
        self.seed = check_whole("seed of a ParquetStream", seed, 0)
        if equal_steps not in (None, "cut", "pad"):
            raise ValueError(f'equal_steps must be "cut", "pad" or None, got {equal_steps!r}')
        if equal_steps is not None and filters is not None:
            raise ValueError(
                f"equal_steps={equal_steps!r} counts rows before they are read, and filters leaves some out; leave out "
                "one of the two, and filter the files beforehand"
            )
        self.shuffle, self.equal_steps, self.epoch = bool(shuffle), equal_steps, 0
        self._paths, self._filesystem = paths_of(paths, "a ParquetStream"), filesystem
        self._arguments = filters, columns, as_, fill_null
        self._files: _Files | None = None
        # The process that has used the filesystem.
        self._opened_in: int | None = None if filesystem is None else os.getpid()
        self._has_ranks = False  # whether torch.distributed had several where this was pickled
        if filesystem is None and not any("://" in path for path in self._paths):
            self._open()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, on which the shuffled order depends; `DataLoader.set_epoch` calls it."""
        self.epoch = check_whole("epoch of a ParquetStream", epoch, 0)

    def __iter__(self) -> Iterator[Row]:
        return _Reading(self, self._open(), _part_of_the_reader(self._has_ranks))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened_in": None, "_has_ranks": self._has_ranks or trains_in_a_group()}

    def _open(self) -> _Files:
        kind = getattr(self._filesystem, "type_name", None)
        if self._opened_in not in (None, os.getpid()) and kind in _LOST_BY_FORK:
            raise RayloaderError(
                f"this ParquetStream has a filesystem, {kind}, that was used in process {self._opened_in} and does not "
                'survive a fork; use workers="ray", or make a stream of URIs for the workers alone'
            )
        self._opened_in = os.getpid()
        if self._files is None:
            self._files = _Files(self._paths, self._filesystem, *self._arguments)
            self._filesystem = self._files.filesystem
        return self._files


class _Files:
    """What the footers say, and how rows are read.

    Attributes:
        filesystem: in which the files are.
        rows: how many rows each row group has.
        bounds: the number, among the rows of all files, of each row group's first row.
        converter: of the columns.
        filters: which rows are given.
    """

    def __init__(self, paths: list[str], filesystem: fs.FileSystem | None, filters: Any, *arguments: Any) -> None:
        try:
            found = _dataset_at(paths, filesystem)
            fragments = list(found.get_fragments())
            with ThreadPoolExecutor(_FOOTERS, "rayloader-footers") as threads:
                groups = list(threads.map(lambda fragment: fragment.row_groups, fragments))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"there is no file or folder for a ParquetStream at {error}") from None
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"a ParquetStream cannot read the footers of all files of {paths}: {error}") from error
        if not fragments:
            raise FileNotFoundError(f"a ParquetStream needs at least one file, and there is none in {paths[0]}")
        self._schema = plain(found.schema)
        self.converter, self.filters = Converter(self._schema, *arguments), filters
        try:
            if filters is not None and not isinstance(filters, dataset.Expression):
                self.filters = parquet.filters_to_expression(filters)
            if filters is not None:
                self._schema.empty_table().filter(self.filters)
        except Exception as error:  # pyarrow checks nothing itself
            raise ValueError(f"filters must be as pyarrow.dataset takes them, got {filters!r:.200}: {error}") from error
        # Pyarrow would take a column that is missing in a file for one of nulls.
        names, text = self.converter.schema.names, "" if filters is None else str(self.filters)
        asked = [name for name in self._schema.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
        needed = [field for field in plain(fragments[0].physical_schema) if field.name in (*names, *asked)]
        for fragment in fragments:
            check_alike(needed, fragments[0].path, plain(fragment.physical_schema), fragment.path)
        self.filesystem, self._format = found.filesystem, found.format
        self._files = [(fragment.path, fragment.partition_expression) for fragment in fragments]
        self._groups = [(file, group.id) for file, inside in enumerate(groups) for group in inside]
        self.rows = np.array([group.num_rows for inside in groups for group in inside], np.int64)
        self.bounds = np.cumsum(self.rows) - self.rows

    def name(self, group: int) -> str:
        """Names a row group in an error."""
        file, number = self._groups[group]
        return f"row group {number} of {self._files[file][0]}"

    def open(self, file: int) -> dataset.ParquetFileFragment:
        """A file, whose footer is read once for all of its row groups."""
        path, partition = self._files[file]
        return self._format.make_fragment(path, self.filesystem, partition)

    def load(self, group: int, opened: Callable[[int], Any], seen: dict[int, Any]) -> pa.Table:
        """The rows of a row group that the filters let through.

        Args:
            group: its number among those of all files.
            opened: `open`, which may keep what it has opened.
            seen: size and time of each file when it was first seen.

        Raises:
            RayloaderError: it cannot be read, or its file was replaced.
        """
        file, number = self._groups[group]
        try:
            first = seen.setdefault(file, self._status(file))
            try:
                fragment = opened(file).subset(row_group_ids=[number])
                table = fragment.to_table(self._schema, columns=self.converter.schema.names, filter=self.filters)
            finally:  # the footer may have been of a file that is there no more, and leads astray in the other
                if self._status(file) != first:
                    raise RayloaderError(
                        f"{self._files[file][0]} was replaced while it is read, so an epoch would have old and new "
                        "rows; write new files under other names, and make the stream again"
                    )
        except RayloaderError:
            raise
        except Exception as error:  # of pyarrow, or of a filesystem in Python, which may raise anything
            raise RayloaderError(f"{self.name(group)} cannot be read: {type(error).__name__}: {error}") from error
        if self.filters is None and table.num_rows != self.rows[group]:
            raise RayloaderError(
                f"{self.name(group)} has {table.num_rows} rows now, and had {self.rows[group]} when the stream was "
                "made; make the stream again"
            )
        return table.combine_chunks()

    def _status(self, file: int) -> tuple[int, int]:
        """By which a file that has replaced another one is told from it."""
        now = self.filesystem.get_file_info(self._files[file][0])
        return now.size, now.mtime_ns

    @property
    def fingerprint(self) -> str:
        """Of the files, by their names, what their folders say, and the rows of their row groups."""
        names = [(os.path.basename(path), str(partition)) for path, partition in self._files]
        content = repr((names, self._groups, self.rows.tolist(), str(self.filters)))
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def pieces(self, order: _Array, part: ShardInfo, equal_steps: str | None) -> list[tuple[int, int, int]]:
        """The part of one reader: row groups, each with its first row and the one after its last."""
        if equal_steps is None:
            return [(group, 0, int(self.rows[group])) for group in order[part.index :: part.count].tolist()]
        total = int(self.rows.sum())
        share = total // part.count if equal_steps == "cut" else -(-total // part.count)
        if not share:
            raise ValueError(
                f"equal_steps={equal_steps!r} needs a row for each of the {part.count} workers of all ranks, and there "
                f"are {total}; use fewer workers"
            )
        order = np.tile(order, 2)  # the last parts may go on with the first rows
        ends = np.cumsum(self.rows[order])
        begin = part.index * share % total - (ends - self.rows[order])
        firsts, lasts = np.maximum(begin, 0), np.minimum(begin + share, self.rows[order])
        kept = firsts < lasts
        return list(zip(order[kept].tolist(), firsts[kept].tolist(), lasts[kept].tolist(), strict=True))


class _Reading(Numbered):
    """One reader's way through an epoch."""

    def __init__(self, stream: ParquetStream, files: _Files, part: ShardInfo) -> None:
        self._stream, self._files, self._part = stream, files, part
        self._opened, self._seen = lru_cache(_OPEN)(files.open), dict[int, Any]()
        self._thread = ThreadPoolExecutor(1, "rayloader-parquet")  # it begins with the first row group
        finalize(self, self._thread.shutdown, cancel_futures=True)
        self._go_to(stream.epoch, 0, 0)

    def _go_to(self, epoch: int, piece: int, row: int) -> None:
        stream, groups = self._stream, len(self._files.rows)
        order = np.arange(groups)
        if stream.shuffle:
            order = np.random.default_rng([stream.seed, epoch]).permutation(groups)
        self._pieces = self._files.pieces(order, self._part, stream.equal_steps)
        self._epoch, self._piece, self._row = epoch, piece, row  # the next row, of those of this piece
        self._tables: dict[int, Future[pa.Table]] = {}  # by the numbers of pieces
        self._ready: list[Row] = []  # the next rows, the last one first

    def __next__(self) -> Row:
        while not self._ready:
            if self._piece == len(self._pieces):
                raise StopIteration
            self._ready = self._made()
        self._row += 1
        return self._ready.pop()

    def _made(self) -> list[Row]:
        """The next rows, only one if there is a null among them; none where a piece ends, after which the next is."""
        group, first, end = self._pieces[self._piece]
        try:
            table = self._table()
        except RayloaderError:
            self._piece, self._row = self._piece + 1, 0
            raise
        left = np.arange(first + self._row, min(end, table.num_rows))
        if not len(left):
            self._piece, self._row = self._piece + 1, 0
            return []
        fitting = _CHUNK_BYTES * table.num_rows // max(1, table.nbytes)
        for count in (max(1, fitting), 1):
            try:
                return self._rows(group, table, left[:count])[::-1]
            except ValueError:
                if count == 1:
                    self._row += 1
                    raise
        return []

    def _rows(self, group: int, table: pa.Table, places: _Array) -> list[Row]:
        """Rows of a row group, in memory of their own: a row must not keep all of the others."""
        converter = self._files.converter
        among = "" if self._files.filters is None else " among those that the filters let through"
        taken = converter.take(table, places)
        ready = converter.ready(taken, lambda row: f"row {places[row]}{among} of {self._files.name(group)}")
        return converter.rows(ready, self._files.bounds[group] + places)

    def _table(self) -> pa.Table:
        """The row group of the next piece; that of the one after it is read meanwhile."""
        wanted = range(len(self._pieces))[self._piece : self._piece + 2]
        self._tables = {piece: self._tables.get(piece) or self._read(self._pieces[piece][0]) for piece in wanted}
        return self._tables[self._piece].result()

    def _read(self, group: int) -> Future[pa.Table]:
        return self._thread.submit(self._files.load, group, self._opened, self._seen)

    def state_dict(self) -> dict[str, Any]:
        """The position: the next row, in the reader's part of the epoch."""
        return {**self._must_fit(), "epoch": self._epoch, "piece": self._piece, "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state.

        Raises:
            StateError: the state is of another stream, or of another part of it.
        """
        if not isinstance(state, Mapping) or not self.state_dict().keys() <= state.keys():
            raise StateError(f"this is not a state of a ParquetStream's iterator: {state!r:.200}")
        for name, here in self._must_fit().items():
            if state[name] != here:
                raise StateError(
                    f"the state of a ParquetStream was saved with {name}={state[name]!r}, and here it is {here!r}; "
                    "make the stream, and the loader, as they were, with the same files"
                )
        self._go_to(state["epoch"], state["piece"], state["row"])

    def numbers(self, samples: Sequence[Row]) -> _Array:
        """Those of rows, among the rows of all files."""
        return np.array([row.number for row in samples], np.int64)

    def found(self, numbers: _Array) -> list[Row]:
        """The rows of these numbers; reads their row groups."""
        groups = np.searchsorted(self._files.bounds + self._files.rows, numbers, "right")
        rows: dict[int, Row] = {}
        for group in np.unique(groups).tolist():
            here, table = numbers[groups == group], self._read(group).result()
            places = here - self._files.bounds[group]
            if places.max() >= table.num_rows:
                raise StateError(
                    f"the state of a ParquetStream has rows of {self._files.name(group)} that the filters let through "
                    "no more; make the stream as it was, with the same files"
                )
            found = self._rows(group, table, places)
            rows.update(zip(here.tolist(), found, strict=True))
        return [rows[number] for number in numbers.tolist()]

    def _must_fit(self) -> dict[str, Any]:
        told = {name: getattr(self._stream, name) for name in ("shuffle", "seed", "equal_steps")}
        return {"files": self._files.fingerprint, "part": [self._part.index, self._part.count], **told}


def _part_of_the_reader(has_ranks: bool) -> ShardInfo:
    """The part of this worker. A worker of torch's own loader has one if there is one rank."""
    worker = get_worker_info()
    try:
        return get_shard_info()
    except RayloaderError:
        if worker is None or has_ranks or trains_in_a_group():
            raise
        return ShardInfo(worker.id, worker.num_workers, 0, 1, worker.id, worker.num_workers)


def _dataset_at(paths: list[str], filesystem: fs.FileSystem | None) -> dataset.FileSystemDataset:
    """The files as a dataset of pyarrow's, which knows the schema of the first one and the names of Hive's folders."""
    if filesystem is None and "://" in paths[0]:
        filesystem = fs.FileSystem.from_uri(paths[0])[0]
        paths = [filesystem.from_uri(path)[1] for path in paths]
    elif filesystem is None:  # an actor may work in another folder
        paths = [path if "://" in path else os.path.abspath(path) for path in paths]
    options = dataset.ParquetFragmentScanOptions(pre_buffer=True)
    kind = dataset.ParquetFileFormat(default_fragment_scan_options=options)
    return dataset.dataset(
        paths if len(paths) > 1 else paths[0], format=kind, filesystem=filesystem, partitioning="hive"
    )
