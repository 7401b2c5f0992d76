"""Columns of Arrow's as tensors or Python objects, what becomes of each type, and rows that are cut from columns.

Promise: a type, a name or a value for which there is no rule is an error when a `Converter` is made; a null for which
there is none is an error that names column and row. Tensors have the memory that they are converted from, no copy
of it: `take` gives memory of its own. `default_collate` of rows gives the same whether their columns are put together,
or the values of each row are stacked, and nothing is converted that nobody has looked at. What is changed in a row
stays changed.

NOTE [collate]. torch's `default_collate` looks up the type of the first sample in its map, which is its documented way
to add types. `Row` is in that map, so torch's loader and ours collate alike, in any process that has imported this
module; unpickling a row does.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch.utils.data import default_collate
from torch.utils.dlpack import from_dlpack

from rayloader._compat import default_collate_fn_map
from rayloader.fetching import collates

Form = Literal["tensors", "arrow"]

_NUMBERS = types.is_integer, types.is_floating  # as tensors have them
_is_fixed = types.is_fixed_size_list
_LISTS = types.is_list, types.is_large_list
_TEXTS = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary
_CAST = types.is_boolean, types.is_decimal, types.is_date, types.is_time, types.is_timestamp, types.is_duration


class Converter:
    """Converts tables of one schema.

    Args:
        schema: of the files or the table.
        columns: names, in the order that rows have them; None: all.
        as_: what columns become.
        fill_null: by the names of columns, what stands for a null.

    Raises:
        KeyError: there is no such column.
        TypeError: an argument, or a column, is of a type for which there is no rule.
        ValueError: an argument has a value for which there is none.

    Attributes:
        schema: of the columns that are converted, in which dictionaries are their values.
        lists: the paths of columns whose values may differ in length, such as `a`, and `a.b` in a struct.
    """

    def __init__(
        self, schema: pa.Schema, columns: Sequence[str] | None, as_: Form, fill_null: Mapping[str, Any] | None
    ) -> None:
        if as_ not in ("tensors", "arrow"):
            raise ValueError(f'as_ must be "tensors" or "arrow", got {as_!r}')
        if columns is not None and not (columns and {str}.issuperset(map(type, columns)) and type(columns) is not str):
            raise TypeError(f"columns must be a list of at least one name, or None for all, got {columns!r}")
        self._is_arrow = as_ == "arrow"
        self.schema = plain(pa.schema(schema if columns is None else [schema.field(name) for name in columns]))
        within = [pair for field in self.schema for pair in _within(field.type, field.name)]
        self._slices = any(_is_fixed(kind) and _is_fixed(kind.value_type) for _, kind in within)
        if self._is_arrow:  # has a form for each type
            within = []
        for path, kind in within:
            if not _is(kind, *_NUMBERS, *_CAST, *_TEXTS, *_LISTS, _is_fixed, types.is_struct):
                raise TypeError(
                    f"column {path!r} is of type {kind}, which no tensor has; leave it out by columns=, cast it "
                    'before, or use as_="arrow"'
                )
        counts = Counter([path for path, _ in within] or self.schema.names)
        if twice := sorted(path for path, count in counts.items() if count > 1):
            raise ValueError(f"a row has each column once, and {twice} come more than once; rename or leave them out")
        self.lists = frozenset(path for path, kind in within if _is_ragged(kind))
        self._fill = {}
        for name, value in dict({} if fill_null is None else fill_null).items():
            kind = self.schema.field(name).type
            self._fill[name] = pa.scalar(value, kind)
            pc.fill_null(pa.nulls(1, kind), self._fill[name])  # which pyarrow can't do for each type

    def take(self, table: pa.Table | pa.RecordBatch, places: Any) -> pa.Table:
        """Rows of a table, in memory of their own.

        `take` of pyarrow 26 gives other values than there are for lists of fixed size within such lists, where the
        column is a slice. Tables with these are put together row by row.
        """
        if self._slices:
            return self.joined([table.slice(place, 1) for place in places])
        return self.joined([table.take(pa.array(places, pa.int64()))])

    def joined(self, parts: Sequence[pa.Table | pa.RecordBatch]) -> pa.Table:
        """Tables, one after the other, with each column in one piece."""
        if all(isinstance(part, pa.RecordBatch) for part in parts):
            return pa.Table.from_batches(parts).combine_chunks()
        return pa.concat_tables(parts).combine_chunks()

    def ready(self, table: pa.Table, name_row: Callable[[int], str]) -> pa.Table:
        """The columns of the schema, without nulls that have no form.

        Args:
            table: with columns in memory of its own.
            name_row: names a row of the table in an error.

        Raises:
            ValueError: there is a null.
        """
        for place, name in enumerate(table.schema.names):
            if name in self._fill and table[name].null_count:
                table = table.set_column(place, table.schema.field(name), pc.fill_null(table[name], self._fill[name]))
        for name in self.schema.names if not self._is_arrow else ():
            if path := _null_in(array := table[name].combine_chunks(), name):
                row = next(index for index in range(len(array)) if _null_in(array.slice(index, 1), name))
                raise ValueError(
                    f"column {path!r} is null in {name_row(row)}, and no tensor has a null; pass fill_null={{{name!r}: "
                    '...}, leave such rows out, in a ParquetStream by filters, or use as_="arrow"'
                )
        return table

    def rows(self, table: pa.Table, numbers: Any = None) -> list[Row]:
        """The rows of a table that is ready, each of which keeps its number, if they have some."""
        chunk = Chunk(table, self, numbers)
        return [Row(None, self.lists, chunk, index) for index in range(table.num_rows)]

    def columns(self, table: pa.Table) -> dict[str, Any]:
        """Of a table that is ready; each a tensor, an array of Arrow's, a list, or a dict of a struct."""
        return {name: self._of(table[name].combine_chunks()) for name in self.schema.names}

    def _of(self, array: pa.Array) -> Any:
        kind = array.type
        if self._is_arrow:
            return array
        if _is(kind, *_NUMBERS):
            return from_dlpack(array)  # over the array's memory
        if isinstance(kind, pa.FixedShapeTensorType):
            shaped = self._of(array.storage).reshape(len(array), *kind.shape)
            return shaped.permute(0, *(1 + axis for axis in kind.permutation or range(len(kind.shape))))
        if isinstance(array, pa.ExtensionArray):
            return self._of(array.storage)
        if types.is_struct(kind):
            return {field.name: self._of(part) for field, part in zip(kind, array.flatten(), strict=True)}
        if _is_fixed(kind):
            inner = self._of(array.flatten())
            if isinstance(inner, torch.Tensor):
                return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
            return _split(inner, [kind.list_size] * len(array))
        if _is(kind, *_LISTS):
            return _split(self._of(array.flatten()), pc.list_value_length(array).to_pylist())
        if _is(kind, *_TEXTS):
            return array.to_pylist()
        if types.is_boolean(kind):
            return from_dlpack(array.cast(pa.uint8())).view(torch.bool)
        if types.is_decimal(kind):
            return from_dlpack(array.cast(pa.float64()))
        return from_dlpack(array.cast(pa.int32() if types.is_date32(kind) or types.is_time32(kind) else pa.int64()))


class Chunk:
    """Some rows of a table, in memory of their own.

    Args:
        table: without nulls that have no form.
        converter: of its columns.
        numbers: of the rows, by which a stream finds them again.
    """

    def __init__(self, table: pa.Table, converter: Converter, numbers: Any) -> None:
        self.table, self.converter, self.numbers = table, converter, numbers

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """The columns as they are converted, when somebody looks at one of the rows."""
        return self.converter.columns(self.table)


def item(column: Any, index: int) -> Any:
    """One value of a column; that of a struct is a dict."""
    if type(column) is dict:
        return {name: item(part, index) for name, part in column.items()}
    return column[index]


class Row(MutableMapping[str, Any]):
    """One row of a table: a mapping of its columns' names to values.

    It is no `dict`, which would have to hold all values from the start; `dict(row)` makes one. Libraries that map a
    function over samples make a row of a dict, `type(row)(values)`.

    Args:
        values: by the names of columns; None if there is a chunk.
        lists: the paths of columns whose values may differ in length from row to row: a batch has a list of them.
        chunk: in place of values, the `Chunk` in which the row lies.
        index: its place there.
    """

    __slots__ = ("_chunk", "_index", "_own", "lists")

    def __init__(
        self, values: Mapping[str, Any] | None, lists: frozenset[str] = frozenset(), chunk: Any = None, index: int = 0
    ) -> None:
        self._own = None if values is None else dict(values)  # once somebody has looked at it
        self.lists, self._chunk, self._index = lists, chunk, index

    @property
    def place(self) -> tuple[Chunk, int] | None:
        """Where it lies in columns; None if somebody has looked at one of these rows, and could change it."""
        is_untouched = self._own is None and "values" not in vars(self._chunk)
        return (self._chunk, self._index) if is_untouched else None

    @property
    def number(self) -> int:
        """By which its stream finds it again."""
        return int(self._chunk.numbers[self._index])

    @property
    def _values(self) -> dict[str, Any]:
        if self._own is None:
            self._own = {name: item(column, self._index) for name, column in self._chunk.values.items()}
        return self._own

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Row({self._values})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self._values, self.lists)


def collate_rows(batch: Sequence[Any], *, collate_fn_map: Any = None) -> dict[str, Any]:
    """The batch of rows, a column for each name; see NOTE [collate]."""
    starts: dict[Chunk, int] = {}  # of each chunk, among the rows of all: those of a ShuffleBuffer come from many
    count, indices = 0, list[int]()
    converter: Any = None
    for row in batch:
        place = row.place if type(row) is Row else None
        if place is None or place[0].converter is not (converter or place[0].converter):
            return {name: _stacked([row[name] for row in batch], name, batch[0].lists) for name in batch[0]}
        chunk, index = place
        converter = chunk.converter
        if chunk not in starts:
            starts[chunk], count = count, count + chunk.table.num_rows
        indices.append(starts[chunk] + index)
    # To take some from each table would take three times as long.
    table = converter.take(pa.concat_tables([chunk.table for chunk in starts]), indices)
    return converter.columns(table)  # type: ignore[no-any-return]


default_collate_fn_map[Row] = collates[Row] = collate_rows


def _stacked(values: list[Any], path: str, lists: frozenset[str]) -> Any:
    """What `Converter.columns` gives, of values from single rows."""
    first = values[0]
    if path in lists:
        return values
    if isinstance(first, dict):
        return {name: _stacked([value[name] for value in values], f"{path}.{name}", lists) for name in first}
    if isinstance(first, pa.Scalar):
        if isinstance(first, pa.ExtensionScalar):
            stored = pa.array([value.value for value in values], first.type.storage_type)
            return pa.ExtensionArray.from_storage(first.type, stored)
        return pa.array(values, first.type)
    return default_collate(values)


def plain(schema: pa.Schema, decodes: bool = True) -> pa.Schema:
    """The schema with views as text or binary data, and, if it `decodes`, dictionaries as their values.

    Dictionaries differ from file to file. Pyarrow cannot take rows of views, which other libraries write. What files
    say beyond types is left out.
    """
    return pa.schema([pa.field(field.name, _plain(field.type, decodes)) for field in schema])


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a table that a plain schema has. Pyarrow decodes no dictionary whose values are views."""
    chosen = table.select(schema.names)
    return chosen.cast(plain(chosen.schema, decodes=False)).cast(schema)


def paths_of(given: Any, reader: str) -> list[str]:
    """The paths that the user gave.

    Args:
        given: a path, or several.
        reader: the class that reads them.

    Raises:
        TypeError: it is something else, or there is none.
    """
    paths = [*given] if isinstance(given, Iterable) and not isinstance(given, (str, os.PathLike)) else [given]
    if not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise TypeError(f"{reader} takes a path, or a list of some, of type str or pathlib.Path, got {given!r:.200}")
    return [os.fspath(path) for path in paths]


def check_alike(wanted: Iterable[pa.Field], first: str, schema: pa.Schema, path: str) -> None:
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


def _plain(kind: pa.DataType, decodes: bool) -> pa.DataType:
    within = functools.partial(_plain, decodes=decodes)
    if types.is_dictionary(kind):
        return within(kind.value_type) if decodes else pa.dictionary(kind.index_type, within(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(within(field.type)) for field in kind])
    if _is_fixed(kind):
        return pa.list_(kind.value_field.with_type(within(kind.value_type)), kind.list_size)
    if types.is_map(kind):
        return pa.map_(*(part.with_type(within(part.type)) for part in (kind.key_field, kind.item_field)))
    if _is(kind, *_LISTS):
        inner = kind.value_field.with_type(within(kind.value_type))
        return pa.list_(inner) if types.is_list(kind) else pa.large_list(inner)
    if types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if types.is_binary_view(kind) else kind


def _within(kind: pa.DataType, path: str) -> Iterator[tuple[str, pa.DataType]]:
    """The names of a column and of what it holds, with their types: `a.b` of a struct, `a[]` of a list."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    yield path, kind
    if types.is_struct(kind):
        for field in kind:
            yield from _within(field.type, f"{path}.{field.name}")
    elif _is(kind, _is_fixed, *_LISTS):
        yield from _within(kind.value_type, f"{path}[]")


def _is_ragged(kind: pa.DataType, within: bool = False) -> bool:
    """Whether a batch has a list of these lists: they are of several lengths, or of what tensors do not have."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_ragged(kind.storage_type, within)
    if _is_fixed(kind):
        return _is_ragged(kind.value_type, True)
    return _is(kind, *_LISTS) or (within and not _is(kind, *_NUMBERS, *_CAST))


def _null_in(array: pa.Array, path: str) -> str:
    """The path of what is null in a column; empty if nothing is."""
    if array.null_count:
        return path
    if isinstance(array, pa.ExtensionArray):
        return _null_in(array.storage, path)
    if types.is_struct(array.type):
        parts = zip(array.type, array.flatten(), strict=True)
        return next((found for field, part in parts if (found := _null_in(part, f"{path}.{field.name}"))), "")
    return _null_in(array.flatten(), f"{path}[]") if _is(array.type, _is_fixed, *_LISTS) else ""


def _is(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]) -> bool:
    return any(test(kind) for test in tests)


def _split(values: Any, lengths: Sequence[int]) -> list[Any]:
    """One value for each length, of what lies one behind the other."""
    if isinstance(values, torch.Tensor):
        return list(values.split(list(lengths)))
    ends = list(itertools.accumulate(lengths, initial=0))
    if type(values) is dict:
        values = [item(values, index) for index in range(ends[-1])]
    return [values[begin:end] for begin, end in itertools.pairwise(ends)]
