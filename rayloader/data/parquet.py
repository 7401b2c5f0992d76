"""A stream of the rows of Parquet files, divided among ranks and workers: `ParquetStream`.

Promise: the parts of all workers of all ranks together are the whole, each row once, unless equal steps were asked
for. Order and parts depend on the files, the arguments and the epoch alone. The state of an iterator holds places of
rows, no rows, and loading it reads the row groups in which these lie and nothing before them.

NOTE [The pool]. An iterator holds a table, the pool, and two lists of places in it: the rows that come next, in their
order, and the shuffle buffer. When nothing comes next, a block of rows is read and joins the buffer, all of these are
permuted, and as many as the buffer cannot hold come next. So each row is drawn from those of the buffer and a block,
and a permutation of NumPy's takes the place of a draw for each row. Without a buffer the block comes next as it is.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import finalize

import numpy as np
import pyarrow as pa
from pyarrow import dataset, fs, parquet
from torch.utils.data import IterableDataset, get_worker_info

from rayloader.data.columns import Converter, Form, with_wide_indices, without_views
from rayloader.data.footers import Footers
from rayloader.data.paths import check_alike, data_files, partitioning_of, paths_of, with_columns
from rayloader.data.rows import Row
from rayloader.data.shuffle import whole
from rayloader.errors import RayloaderError, StateError
from rayloader.host.shard_info import ShardInfo, get_shard_info
from rayloader.resume.samplers import trains_in_a_group

logger = logging.getLogger("rayloader")

_BLOCK = 4096  # rows that are read at a time, or as many as the shuffle buffer holds if these are more
# Rows that are converted at a time where single rows are asked for; and if there is a `decode`, whose values are large.
_CHUNK, _DECODED = 256, 16
_FOOTERS = 16  # that are read at the same time
# Filesystems of pyarrow whose threads and connections a fork does not have.
_LOST_BY_FORK = {"s3", "gcs", "abfs", "hdfs"}

_Array = np.ndarray[Any, Any]
if TYPE_CHECKING:
    _DatasetOfAny = IterableDataset[Any]
else:  # as in loader.py: what parameters torch's classes have may change
    _DatasetOfAny = IterableDataset


class ParquetStream(_DatasetOfAny):
    """The rows of Parquet files, for workers of all ranks, each of which reads its part.

    Rows are mappings of names to values, and become a dict of columns in a batch, as those of an `ArrowDataset` do.
    Row groups are divided among the workers of all ranks by `get_shard_info`. Each worker holds the row group that it
    gives, and the next one, which it reads meanwhile. The iterator has `state_dict()` and `load_state_dict()`, which
    rayloader's loader and torchdata's call.

    Args:
        paths: a path, several, or a folder, whose files that end in `.parquet` are read, those of the folders in it
            too; also URIs, such as `s3://bucket/folder`.
        filesystem: of pyarrow, in which the paths are; None: that of the URI, or this machine's.
        columns: their names; None: all.
        filters: which rows: an expression of `pyarrow.compute`, or a list as `pyarrow.parquet.read_table` takes it.
        as_: "tensors", "numpy" or "arrow", as for `ArrowDataset`; so are `decode` and `fill_null`.
        decode: functions by names of columns.
        fill_null: what stands for a null, by names of columns.
        shuffle_buffer: of how many rows, at least, each worker draws the next one; the row groups then come in another
            order in each epoch. 0: all in the order of the files.
        seed: of the shuffled order.
        equal_steps: "cut": all workers give the same number of rows, and a few rows of the epoch, fewer than there are
            workers, are left out; "pad": likewise, and that few rows come twice; None: row groups stay whole.
        batch_size: the stream gives batches of so many rows, made of columns, for a loader with `batch_size=None`.
            None: it gives rows.
        on_error: what becomes of a row group that cannot be read. "raise": it is an error, and the next `next()` goes
            on after it; "skip": it is a line in the log.

    Attributes:
        epoch: of which `iter()` gives the order; see `set_epoch`.

    Raises:
        TypeError: an argument, or a column, is of a wrong type.
        ValueError: an argument has a wrong value, or the files differ in their columns.
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
        decode: Mapping[str, Callable[[Any], Any]] | None = None,
        fill_null: Mapping[str, Any] | None = None,
        shuffle_buffer: int = 0,
        seed: int = 0,
        equal_steps: Literal["cut", "pad"] | None = None,
        batch_size: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        self.shuffle_buffer = whole("shuffle_buffer", shuffle_buffer, 0, "ParquetStream")
        self.seed = whole("seed", seed, 0, "ParquetStream")
        self.batch_size = None if batch_size is None else whole("batch_size", batch_size, 1, "ParquetStream")
        if equal_steps not in (None, "cut", "pad"):
            raise ValueError(f'equal_steps must be "cut", "pad" or None, got {equal_steps!r}')
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
        if equal_steps is not None and (filters is not None or on_error == "skip"):
            other = "filters" if filters is not None else 'on_error="skip"'
            raise ValueError(
                f"equal_steps={equal_steps!r} counts rows before they are read, and {other} leaves some of them out; "
                "use one of the two, and filter the files beforehand"
            )
        self.equal_steps, self.on_error = equal_steps, on_error
        self.epoch = 0
        self._paths = paths_of(paths, "a ParquetStream")
        self._filesystem = filesystem
        self._arguments = columns, as_, decode, fill_null
        self._filters = _expression(filters)
        self._files: _Files | None = None
        # The process that has used the filesystem.
        self._opened_in: int | None = None if filesystem is None else os.getpid()
        self._has_ranks = False  # whether torch.distributed had several where this was pickled
        if filesystem is None and not any("://" in path for path in self._paths):
            self._open()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, on which the shuffled order depends; `DataLoader.set_epoch` calls it."""
        self.epoch = whole("epoch", epoch, 0, "ParquetStream")

    def __iter__(self) -> Iterator[Any]:
        return _Reading(self, self._open(), _part_of_the_reader(self._has_ranks))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened_in": None, "_has_ranks": self._has_ranks or trains_in_a_group()}

    def _open(self) -> _Files:
        used = self._filesystem if self._files is None else self._files.filesystem
        if self._opened_in not in (None, os.getpid()) and used is not None and used.type_name in _LOST_BY_FORK:
            raise RayloaderError(
                f"this ParquetStream has a filesystem, {used.type_name}, that was used in process {self._opened_in} "
                'and does not survive a fork; use workers="ray", or make a stream of URIs for the workers alone'
            )
        self._opened_in = os.getpid()
        if self._files is None:
            filesystem, located = _located(self._paths, self._filesystem)
            self._files = _Files.read(filesystem, located, self._arguments, self._filters)
        return self._files


@dataclass(frozen=True)
class _Files:
    """What the footers say, and how rows are read.

    Attributes:
        filesystem: in which the paths are.
        paths: of the files.
        files: the number of the file of each row group.
        numbers: of each row group in its file.
        rows: how many rows each row group has.
        converter: of the columns.
        filters: which rows are given.
        needed: the columns that are read, in the schema that all files have.
        partitions: what the names of the folders of each file say; empty if they give no column.
    """

    filesystem: fs.FileSystem
    paths: list[str]
    files: _Array
    numbers: _Array
    rows: _Array
    converter: Converter
    filters: dataset.Expression | None
    needed: pa.Schema
    partitions: Sequence[dataset.Expression] = ()

    @classmethod
    def read(
        cls,
        filesystem: fs.FileSystem,
        located: list[tuple[str, str]],
        arguments: tuple[Any, ...],
        filters: dataset.Expression | None,
    ) -> _Files:
        """Reads the footers."""

        def footer(path: str) -> tuple[list[int], pa.Schema]:
            try:
                found = parquet.read_metadata(path, filesystem=filesystem)
                schema = found.schema.to_arrow_schema()
            except FileNotFoundError:
                raise
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path} has no footer of Parquet, it is damaged or not whole: {error}") from error
            return [found.row_group(number).num_rows for number in range(found.num_row_groups)], schema

        paths, names = zip(*located, strict=True)
        with ThreadPoolExecutor(min(_FOOTERS, len(paths)), "rayloader-footers") as threads:
            footers = list(threads.map(footer, paths))
        first = with_wide_indices(without_views(footers[0][1]))
        partitioning = partitioning_of(names, first)
        of_folders = partitioning.schema
        needed = with_columns(first, of_folders)
        converter = Converter(needed, *arguments)
        for path, (_, schema) in zip(paths, footers, strict=True):
            here = with_columns(schema, of_folders)
            check_alike(converter.schema, paths[0], with_wide_indices(without_views(here)), path)
            _check_filters(filters, here, path)  # which pyarrow applies to columns as they are in the file
        return cls(
            filesystem,
            list(paths),
            np.repeat(np.arange(len(paths)), [len(rows) for rows, _ in footers]),
            np.concatenate([np.arange(len(rows)) for rows, _ in footers]),
            np.array([count for rows, _ in footers for count in rows], np.int64),
            converter,
            filters,
            needed,
            [partitioning.parse(name) for name in names] if len(of_folders) else (),
        )

    def place(self, group: int) -> tuple[int, str]:
        """The number of a row group in its file, and the path of that."""
        return int(self.numbers[group]), self.paths[self.files[group]]

    def load(self, group: int, footers: Footers) -> pa.Table:
        """The rows of a row group that the filters let through.

        Raises:
            RayloaderError: it cannot be read.
        """
        number, path = self.place(group)
        try:
            partition = self.partitions[self.files[group]] if self.partitions else None
            fragment = footers.row_group(path, number, partition)
            try:
                table = fragment.to_table(self.needed, columns=self.converter.schema.names, filter=self.filters)
            finally:
                footers.check(path)  # the footer leads astray in a file that has taken the place of its own
        except RayloaderError:
            raise
        except Exception as error:  # of pyarrow, or of a filesystem in Python, which may raise anything
            raise RayloaderError(
                f"row group {number} of {path} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if self.filters is None and table.num_rows != self.rows[group]:
            raise RayloaderError(
                f"row group {number} of {path} cannot be read: it has {table.num_rows} rows now, and had "
                f"{self.rows[group]} when the stream was made; make the stream again"
            )
        return table

    @property
    def fingerprint(self) -> str:
        """Of the files, by their names, what their folders say, and the rows of their row groups."""
        names = [*map(os.path.basename, self.paths), *map(str, self.partitions)]
        content = repr((names, self.files.tolist(), self.rows.tolist(), str(self.filters)))
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def pieces(self, order: _Array, part: ShardInfo, equal_steps: str | None) -> list[tuple[int, int, int | None]]:
        """The part of one reader: row groups, each with its first row and the one after its last; None: to its end."""
        if equal_steps is None:
            return [(int(group), 0, None) for group in order[part.index :: part.count]]
        bounds = np.concatenate([[0], np.cumsum(self.rows[order])])
        total = int(bounds[-1])
        share = total // part.count if equal_steps == "cut" else -(-total // part.count)
        if not share:
            raise ValueError(
                f"equal_steps={equal_steps!r} needs a row for each of the {part.count} workers of all ranks, and there "
                f"are {total}; use fewer workers"
            )
        pieces: list[tuple[int, int, int | None]] = []
        at, left = part.index * share % total, share
        while left:
            place = int(np.searchsorted(bounds, at, "right")) - 1
            first = at - int(bounds[place])
            count = min(left, int(bounds[place + 1]) - at)
            pieces.append((int(order[place]), first, first + count))
            at, left = (at + count) % total, left - count
        return pieces


class _Span(NamedTuple):
    """Rows that follow each other in a row group, and the number of the first."""

    table: pa.Table
    group: int
    first: int


class _Reading(Iterator[Any]):
    """One reader's way through an epoch; see NOTE [The pool].

    Attributes:
        skipped: how many row groups were left out, because they could not be read.
    """

    def __init__(self, stream: ParquetStream, files: _Files, part: ShardInfo) -> None:
        self._stream, self._files, self._part = stream, files, part
        self.skipped = 0
        self._begin(stream.epoch)

    def _begin(self, epoch: int) -> None:
        stream, groups = self._stream, len(self._files.rows)
        self._epoch = epoch
        shuffles = stream.shuffle_buffer > 0
        order = np.random.default_rng([stream.seed, epoch]).permutation(groups) if shuffles else np.arange(groups)
        self._pieces = self._files.pieces(order, self._part, stream.equal_steps)
        self._ahead = _Ahead(self._files)
        self._piece = self._row = 0  # the next to be read: the number of the piece, and a row of it
        self._generator = np.random.default_rng([stream.seed, epoch, 1 + self._part.index])
        self._pool = self._files.converter.schema.empty_table()
        self._groups = self._rows = np.empty(0, np.int32)  # of each row of the pool: row group, and number in it
        self._next = self._buffer = np.empty(0, np.int64)  # places in the pool
        self._at = 0  # in `_next`
        self._ready: list[Row] = []  # rows from there on, the last one first
        self._singly = 0  # rows to convert one by one, because there is an error in one of them

    # ---- what it gives

    def __next__(self) -> Any:
        return self._next_row() if self._stream.batch_size is None else self._next_batch(self._stream.batch_size)

    def _next_batch(self, size: int) -> dict[str, Any]:
        while self._coming < size and self._read_on():
            pass
        count = min(size, self._coming)
        if not count:
            raise StopIteration
        self._at += count  # whatever is raised: the next batch is another one
        return self._files.converter.batch(self._converted(self._at - count, count))

    def _next_row(self) -> Row:
        while not self._ready:
            while not self._coming:
                if not self._read_on():
                    raise StopIteration
            most = _DECODED if self._files.converter.decodes else _CHUNK
            count = 1 if self._singly else min(most, self._coming)
            try:
                self._ready = self._converted(self._at, count, decodes=False).rows()[::-1]
            except Exception:  # a null
                if count > 1:
                    self._singly = count
                    continue
                self._singly = max(0, self._singly - 1)
                self._at += 1
                raise
            self._singly = max(0, self._singly - 1)
        self._at += 1
        row = self._ready.pop()
        if (place := row.place) is not None:  # not earlier: `decode` may draw from generators, whose states are saved
            self._files.converter.decode(*place, lambda _: self._name(self._next[self._at - 1]))
        return row

    @property
    def _coming(self) -> int:
        return len(self._next) - self._at

    def _converted(self, first: int, count: int, *, decodes: bool = True) -> Any:
        places, converter = self._next[first : first + count], self._files.converter
        table = converter.take(self._pool, places)
        return converter.convert(table, lambda row: self._name(places[row]), decodes=decodes)

    def _name(self, place: int) -> str:
        """Names a row of the pool."""
        number, path = self._files.place(self._groups[place])
        among = "" if self._files.filters is None else " among those that the filters let through"
        return f"row {self._rows[place]}{among} of row group {number} of {path}"

    # ---- how it gets there

    def _read_on(self) -> bool:
        """Lets more rows come next; False at the end."""
        block = self._block()
        if not block:
            if not len(self._buffer):
                return False
            rest = self._generator.permutation(self._buffer)
            self._next, self._at, self._buffer = np.concatenate([self._next[self._at :], rest]), 0, rest[:0]
            return True
        coming = self._coming
        self._keep(np.concatenate([self._next[self._at :], self._buffer]), [part.table for part in block])
        groups = [np.full(part.table.num_rows, part.group, np.int32) for part in block]
        rows = [np.arange(part.table.num_rows, dtype=np.int32) + part.first for part in block]
        self._groups = np.concatenate([self._groups, *groups])
        self._rows = np.concatenate([self._rows, *rows])
        drawn = np.arange(coming, self._pool.num_rows)
        if self._stream.shuffle_buffer:
            drawn = self._generator.permutation(drawn)
        given = max(0, len(drawn) - self._stream.shuffle_buffer)
        self._next, self._at = np.concatenate([np.arange(coming), drawn[:given]]), 0
        self._buffer = np.sort(drawn[given:])
        return True

    def _keep(self, places: _Array, block: list[pa.Table]) -> None:
        """Makes the pool of these places of it, and a block."""
        kept = [self._files.converter.take(self._pool, places)] if len(places) else []
        self._pool = pa.concat_tables([*kept, *block]).combine_chunks()
        self._groups, self._rows = self._groups[places], self._rows[places]

    def _block(self) -> list[_Span]:
        """The next rows, none at the end.

        With a shuffle buffer they are of so many row groups as make a large block, for each block costs a look at all
        of the buffer; otherwise of one.
        """
        parts: list[_Span] = []
        left = max(_BLOCK, self._stream.shuffle_buffer)
        while left and self._piece < len(self._pieces) and (not parts or self._stream.shuffle_buffer):
            group, first, end = self._pieces[self._piece]
            following = self._pieces[self._piece + 1][0] if self._piece + 1 < len(self._pieces) else None
            try:
                table = self._ahead.get(group, following)
            except RayloaderError as error:
                if parts and self._stream.on_error == "raise":
                    break  # these rows first; the next call meets the error again
                self._piece, self._row = self._piece + 1, 0
                if self._stream.on_error == "raise":
                    raise
                self.skipped += 1
                logger.warning("rayloader: skipped a row group: %s", error)
                continue
            begin = first + self._row
            count = min(left, (table.num_rows if end is None else end) - begin)
            if count > 0:
                self._row += count
                left -= count
                parts.append(_Span(table.slice(begin, count), group, begin))
            else:
                self._piece, self._row = self._piece + 1, 0
        if not parts:
            self._ahead.close()
        return parts

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """The position: the next row to be read, and the places of rows that were read and not given."""
        return {
            **self._must_fit(),
            "epoch": self._epoch,
            "piece": self._piece,
            "row": self._row,
            "coming": self._runs(self._next[self._at :]),
            "buffer": self._runs(self._buffer),
            "generator": self._generator.bit_generator.state,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; reads the row groups of rows that were read and not given.

        Raises:
            StateError: the state is of another stream, or of another part of it, or a file has changed.
            RayloaderError: such a row group cannot be read.
        """
        if not isinstance(state, Mapping) or not self.state_dict().keys() <= state.keys():
            raise StateError(f"this is not a state of a ParquetStream's iterator: {state!r:.200}")
        for name, here in self._must_fit().items():
            if state[name] != here:
                raise StateError(
                    f"the state of a ParquetStream was saved with {name}={state[name]!r}, and here it is {here!r}; "
                    "make the stream, and the loader, as they were, with the same files"
                )
        self._begin(state["epoch"])
        self._piece, self._row, self.skipped = state["piece"], state["row"], state["skipped"]
        self._generator.bit_generator.state = state["generator"]
        coming, buffer = _places(state["coming"]), _places(state["buffer"])
        groups, rows = np.concatenate([coming, buffer]).T
        parts, order = [], []
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            table = self._ahead.load(int(group))
            if rows[places].max() >= table.num_rows:
                number, path = self._files.place(group)
                raise StateError(
                    f"the state of a ParquetStream has row {rows[places].max()} of row group {number} of {path}, and "
                    f"the filters let {table.num_rows} rows of it through; the file is another one than it was: go on "
                    "with the same files, or begin the epoch anew"
                )
            parts.append(self._files.converter.take(table.combine_chunks(), rows[places]))
            order.append(places)
            if self._piece < len(self._pieces) and self._pieces[self._piece][0] == group:
                self._ahead.hold(int(group), table)
        if parts:
            back = np.argsort(np.concatenate(order))
            self._pool = self._files.converter.take(pa.concat_tables(parts).combine_chunks(), back)
        self._groups, self._rows = groups, rows
        self._next, self._buffer = np.split(np.arange(len(groups)), [len(coming)])

    def _must_fit(self) -> dict[str, Any]:
        stream, part = self._stream, self._part
        return {
            "files": self._files.fingerprint,
            "part": [part.index, part.count],
            "shuffle_buffer": stream.shuffle_buffer,
            "seed": stream.seed,
            "equal_steps": stream.equal_steps,
        }

    def _runs(self, places: _Array) -> _Array:
        """Rows at these places of the pool, as runs: row group, first row, and how many follow each other."""
        groups, rows = self._groups[places], self._rows[places]
        begins = np.flatnonzero(np.diff(groups, prepend=-1) | (np.diff(rows, prepend=-1) != 1))
        lengths = np.diff(begins, append=len(places))
        return np.stack([groups[begins], rows[begins], lengths], 1).astype(np.int32)


def _places(runs: Any) -> _Array:
    """Row group and number of each row, from `_runs`."""
    groups, firsts, lengths = np.asarray(runs, np.int32).reshape(-1, 3).T
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.stack([np.repeat(groups, lengths), np.repeat(firsts, lengths) + within], 1).astype(np.int32)


class _Ahead:
    """Reads row groups, and in a thread the one that comes after that which is asked for."""

    def __init__(self, files: _Files) -> None:
        self._files, self._footers = files, Footers(files.filesystem)
        self._held: tuple[int, pa.Table] | None = None
        self._coming: tuple[int, Future[pa.Table]] | None = None
        self._thread = ThreadPoolExecutor(1, "rayloader-parquet")  # it begins with the first row group
        self.close = finalize(self, self._thread.shutdown, wait=True, cancel_futures=True)

    def get(self, group: int, following: int | None) -> pa.Table:
        """A row group; `following` will be asked for next."""
        if self._held is None or self._held[0] != group:
            self._held = None
            coming = self._coming if self._coming is not None and self._coming[0] == group else self._begin(group)
            self._coming = None if following is None else self._begin(following)
            self.hold(group, coming[1].result())
        assert self._held is not None
        return self._held[1]

    def load(self, group: int) -> pa.Table:
        """A row group, which need not come next."""
        return self._begin(group)[1].result()

    def hold(self, group: int, table: pa.Table) -> None:
        """Keeps a row group that was read, to be asked for next."""
        self._held = group, table

    def _begin(self, group: int) -> tuple[int, Future[pa.Table]]:
        return group, self._thread.submit(self._files.load, group, self._footers)


def _part_of_the_reader(has_ranks: bool) -> ShardInfo:
    """The part of this worker. A worker of torch's own loader has one if there is one rank."""
    worker = get_worker_info()
    try:
        return get_shard_info()
    except RayloaderError:
        if worker is None or has_ranks or trains_in_a_group():
            raise
        return ShardInfo(worker.id, worker.num_workers, 0, 1, worker.id, worker.num_workers)


def _located(paths: list[str], filesystem: fs.FileSystem | None) -> tuple[fs.FileSystem, list[tuple[str, str]]]:
    """The filesystem, and the paths of the files in it, each with its name in the folder that was given."""
    files: list[tuple[str, str]] = []
    for path in paths:
        if filesystem is not None and "://" not in path:
            here, inner = filesystem, path
        else:
            here, inner = fs.FileSystem.from_uri(path if "://" in path else os.path.abspath(path))
        filesystem = here if filesystem is None else filesystem
        if not filesystem.equals(here):
            raise ValueError(
                f"all paths must be in one filesystem, got {path} and others in {filesystem.type_name}; read them by "
                "two streams, or give the filesystem and paths in it"
            )
        files += _files_at(filesystem, inner)
    return filesystem, files


def _files_at(filesystem: fs.FileSystem, path: str) -> list[tuple[str, str]]:
    found = filesystem.get_file_info(path)
    if found.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"there is no file or folder {path} for a ParquetStream")
    if found.type != fs.FileType.Directory:
        return [(path, os.path.basename(path))]
    inside = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    return data_files(path, [one.path for one in inside if one.is_file], (".parquet",))


def _expression(filters: Any) -> dataset.Expression | None:
    if filters is None or isinstance(filters, dataset.Expression):
        return filters
    try:
        return parquet.filters_to_expression(filters)
    except Exception as error:  # it checks nothing itself
        raise ValueError(
            f"filters must be an expression of pyarrow.compute, or a list such as [('year', '>', 2020)], got "
            f"{filters!r:.200}: {error}"
        ) from None


def _check_filters(filters: dataset.Expression | None, schema: pa.Schema, path: str) -> None:
    if filters is not None:
        try:
            schema.empty_table().filter(filters)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ValueError(f"filters do not fit the columns {', '.join(schema.names)} of {path}: {error}") from None
