"""Columns of Arrow's as tensors, arrays or Python objects: the one place that says what becomes of each type.

Promise: a type, a name or a value for which there is no rule is an error when a `Converter` is made; a null for which
there is none is an error that names column and row. Tensors and arrays have the memory that they are converted from, no
copy of it: whoever calls `convert` gives it memory of its own, as `take` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch.utils.dlpack import from_dlpack

from rayloader.data.rows import Columns, Lists
from rayloader.errors import add_note

Form = Literal["tensors", "numpy", "arrow"]
FORMS = ("tensors", "numpy", "arrow")

_WHOLE = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
_PLAIN = {*_WHOLE, pa.float16(), pa.float32(), pa.float64()}  # as tensors have them
_LISTS = types.is_list, types.is_large_list
_TEXTS = types.is_string, types.is_large_string
_BYTES = types.is_binary, types.is_large_binary, types.is_fixed_size_binary
_DAYS_AND_SECONDS = types.is_date32, types.is_time32  # those that have 32 bits


class _Null(Exception):
    """There is a null in the column of this path."""


class Converter:
    """Converts tables of one schema.

    Args:
        schema: of the files or the table.
        columns: names, in the order that rows have them; None: all.
        as_: what columns become.
        decode: functions that are called with each value of these columns.
        fill_null: by the paths of columns, what stands for a null.

    Raises:
        TypeError: an argument, or a column, is of a type for which there is no rule.
        ValueError: an argument has a value for which there is none.

    Attributes:
        schema: of the columns that are converted.
    """

    def __init__(
        self,
        schema: pa.Schema,
        columns: Sequence[str] | None,
        as_: Form,
        decode: Mapping[str, Callable[[Any], Any]] | None,
        fill_null: Mapping[str, Any] | None,
    ) -> None:
        if as_ not in FORMS:
            raise ValueError(f'as_ must be "tensors", "numpy" or "arrow", got {as_!r}')
        self._form = as_
        names = _names(schema, columns)
        self.schema = pa.schema([schema.field(name) for name in names])
        self._decode = _functions(decode)
        paths = [pair for field in self.schema for pair in _paths(field.type, field.name)]
        for path, kind in paths if as_ != "arrow" else ():
            if not _has_rule(kind):
                raise TypeError(
                    f"column {path!r} is of type {kind}, which has no form as {as_}; leave it out by columns=, cast it "
                    'before, or use as_="arrow"'
                )
            if types.is_struct(kind) and len({field.name for field in kind}) < len(kind):
                raise ValueError(f"a row has each field once, and column {path!r} is a {kind}; rename its fields")
        for name in self._decode:
            _check_named("decode", name, names)
            if not _is(self.schema.field(name).type, *_BYTES, *_TEXTS):
                raise TypeError(
                    f"decode is called with each value of a column of binary data or text, and column {name!r} is of "
                    f"type {self.schema.field(name).type}"
                )
        # Arrow's own arrays are filled as they are; a struct has no form of its own, in which it could be filled.
        filled = [pair for pair in paths if (pair[0] in names if as_ == "arrow" else not types.is_struct(pair[1]))]
        self._fill = _fillings(fill_null, dict(filled))
        self._sliced = [field.name for field in self.schema if _is_fixed_in_fixed(field.type)]

    def take(self, table: pa.Table | pa.RecordBatch, places: Any) -> pa.Table | pa.RecordBatch:
        """Rows of a table, in memory of their own.

        `take` of pyarrow 26 gives other values than there are for lists of fixed size within such lists, where the
        column is a slice. These are put together row by row.
        """
        if not self._sliced:
            return table.take(pa.array(places))
        taken = table.drop_columns(self._sliced).take(pa.array(places))
        for name in self._sliced:
            column = _in_one(table[name])
            rows = [column.slice(place, 1) for place in places] or [column.slice(0, 0)]
            taken = taken.append_column(table.schema.field(name), pa.concat_arrays(rows))
        return taken

    def convert(
        self, table: pa.Table | pa.RecordBatch, name_row: Callable[[int], str], *, decodes: bool = True
    ) -> Columns:
        """Converts the columns of the schema.

        Args:
            table: with columns in memory of its own.
            name_row: names a row of the table in an error.
            decodes: False if `decode` will be called for each row.

        Raises:
            ValueError: there is a null.
            Exception: `decode` raised it; a note names column and row.
        """
        values: dict[str, Any] = {}
        for name in self.schema.names:
            array = _in_one(table[name])
            try:
                if name in self._decode:
                    values[name] = self._filled(array, name).to_pylist()
                else:
                    values[name] = self._of(array, name)
            except _Null as null:
                raise self._refusal(array, name, str(null), name_row) from None
        columns = Columns(values, table.num_rows, self)
        for index in range(columns.length if decodes and self._decode else 0):
            self.decode(columns, index, name_row)
        return columns

    def decode(self, columns: Columns, index: int, name_row: Callable[[int], str]) -> None:
        """Calls the user's functions for one row, which may draw from random generators."""
        for name, function in self._decode.items():
            values = columns.values[name]
            try:
                values[index] = function(values[index])
            except Exception as error:  # the user's function may raise anything
                add_note(error, f"decode[{name!r}] raised this for {name_row(index)}")
                raise

    def batch(self, columns: Columns) -> dict[str, Any]:
        """A batch, as the default collate makes it for tensors; arrays are left as they are."""
        return columns.whole(collated=self._form == "tensors")

    @property
    def decodes(self) -> bool:
        """Whether functions of the user's are called."""
        return bool(self._decode)

    def _refusal(self, array: pa.Array, name: str, path: str, name_row: Callable[[int], str]) -> ValueError:
        for index in range(len(array)):
            try:
                self._of(array.slice(index, 1), name)
            except _Null:
                break
        return ValueError(
            f"column {path!r} is null in {name_row(index)}, and there is no null among {self._form}; give what stands "
            f"for it, fill_null={{{path!r}: ...}}, leave such rows out, in a ParquetStream by filters, or use "
            'as_="arrow"'
        )

    def _filled(self, array: pa.Array, path: str) -> pa.Array:
        if array.null_count and path in self._fill:
            array = pc.fill_null(array, self._fill[path])
        if array.null_count and self._form != "arrow":
            raise _Null(path)
        return array

    def _of(self, array: pa.Array, path: str) -> Any:
        """A column's value in `Columns`."""
        if self._form == "arrow" or array.type in _PLAIN:
            array = self._filled(array, path)
            return array if self._form == "arrow" else self._as_form(_tensor(array))
        if isinstance(array.type, pa.FixedShapeTensorType):
            return self._of_shaped(array, path)
        if isinstance(array, pa.ExtensionArray):
            return self._of(array.storage, path)
        if types.is_dictionary(array.type):
            return self._of(array.dictionary_decode(), path)
        if types.is_struct(array.type):  # a null of its own is one of each of its fields
            parts = zip(array.type, array.flatten(), strict=True)
            values = {field.name: self._of(part, f"{path}.{field.name}") for field, part in parts}
            return Columns(values, len(array), self)
        array = self._filled(array, path)
        if types.is_fixed_size_list(array.type):
            return self._of_fixed(array, path)
        if _is(array.type, *_LISTS):
            return _split(self._of(array.flatten(), f"{path}[]"), pc.list_value_length(array).to_pylist())
        if _is(array.type, *_TEXTS, *_BYTES):
            return array.to_pylist()
        return self._numbers(array)

    def _of_fixed(self, array: pa.Array, path: str) -> Any:
        size = array.type.list_size
        inner = self._of(array.flatten(), f"{path}[]")
        if isinstance(inner, (torch.Tensor, np.ndarray)):
            return inner.reshape(len(array), size, *inner.shape[1:])
        return _split(inner, [size] * len(array))

    def _of_shaped(self, array: pa.Array, path: str) -> Any:
        kind, flat = array.type, self._of(array.storage, path)
        shaped = flat.reshape(len(array), *kind.shape)
        if kind.permutation is not None:
            axes = [0, *(1 + axis for axis in kind.permutation)]
            shaped = shaped.permute(axes) if isinstance(shaped, torch.Tensor) else shaped.transpose(axes)
        return shaped

    def _numbers(self, array: pa.Array) -> Any:
        """Of types that tensors do not have."""
        kind = array.type
        if types.is_boolean(kind):
            return self._as_form(_tensor(array.cast(pa.uint8())).view(torch.bool))
        if types.is_decimal(kind):
            return self._as_form(_tensor(array.cast(pa.float64())))
        numbers = _tensor(array.cast(pa.int32() if _is(kind, *_DAYS_AND_SECONDS) else pa.int64()))
        if self._form == "tensors":
            return numbers
        unit = "D" if types.is_date32(kind) else "ms" if types.is_date64(kind) else kind.unit
        letter = "M" if types.is_date(kind) or types.is_timestamp(kind) else "m"
        return numbers.numpy().astype(np.int64, copy=False).view(f"{letter}8[{unit}]")

    def _as_form(self, numbers: torch.Tensor) -> Any:
        return numbers if self._form == "tensors" else numbers.numpy()


def without_views(schema: pa.Schema) -> pa.Schema:
    """The schema with text and binary data as everywhere: pyarrow cannot take rows of views, which others write."""
    return _changed(schema, _without_view)


def with_wide_indices(schema: pa.Schema) -> pa.Schema:
    """The schema with dictionaries whose indices have 32 bits at least.

    Each file, row group or batch has a dictionary of its own. Where rows of several are put together, so are these, and
    the result need not fit the index type that was large enough for each.
    """
    return _changed(schema, _with_wide_index)


def has_dictionaries(schema: pa.Schema) -> bool:
    """Whether a column is a dictionary, or holds one."""
    kinds: list[pa.DataType] = []

    def noted(kind: pa.DataType) -> pa.DataType:
        kinds.append(kind)
        return kind

    _changed(schema, noted)
    return any(map(types.is_dictionary, kinds))


def _changed(schema: pa.Schema, change: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    return pa.schema([field.with_type(_rebuilt(field.type, change)) for field in schema], schema.metadata)


def _rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type after a change of each type in it."""

    def within(field: pa.Field) -> pa.Field:
        return field.with_type(_rebuilt(field.type, change))

    if types.is_dictionary(kind):
        kind = pa.dictionary(kind.index_type, _rebuilt(kind.value_type, change), kind.ordered)
    elif types.is_struct(kind):
        kind = pa.struct([within(field) for field in kind])
    elif types.is_map(kind):
        kind = pa.map_(within(kind.key_field), within(kind.item_field), kind.keys_sorted)
    elif types.is_fixed_size_list(kind):
        kind = pa.list_(within(kind.value_field), kind.list_size)
    elif types.is_list(kind) or types.is_large_list(kind):
        kind = (pa.list_ if types.is_list(kind) else pa.large_list)(within(kind.value_field))
    return change(kind)


def _without_view(kind: pa.DataType) -> pa.DataType:
    if types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if types.is_binary_view(kind) else kind


def _with_wide_index(kind: pa.DataType) -> pa.DataType:
    if types.is_dictionary(kind) and kind.index_type.bit_width < 32:
        return pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return kind


def _tensor(array: pa.Array) -> torch.Tensor:
    """A tensor over the array's memory."""
    tensor: torch.Tensor = from_dlpack(array)
    return tensor


def _in_one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column if isinstance(column, pa.Array) else column.combine_chunks()


def _split(values: Any, lengths: Sequence[int]) -> Lists:
    """One value for each length, of what lies one behind the other."""
    if isinstance(values, torch.Tensor):
        return Lists(values.split(list(lengths)))
    bounds = [0, *itertools.accumulate(lengths)]
    if isinstance(values, Columns):
        values = values.rows()
    return Lists(
        list.__getitem__(values, slice(*pair)) if isinstance(values, list) else values[slice(*pair)]
        for pair in itertools.pairwise(bounds)
    )


def _is(kind: pa.DataType, *tests: Callable[[pa.DataType], bool]) -> bool:
    return any(test(kind) for test in tests)


def _is_fixed_in_fixed(kind: pa.DataType, within: bool = False) -> bool:
    """Whether a type has lists of fixed size within lists of fixed size."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_fixed_in_fixed(kind.storage_type, within)
    if types.is_fixed_size_list(kind):
        return within or _is_fixed_in_fixed(kind.value_type, True)
    if types.is_struct(kind):
        return any(_is_fixed_in_fixed(field.type, within) for field in kind)
    return _is(kind, *_LISTS) and _is_fixed_in_fixed(kind.value_type, within)


def _has_rule(kind: pa.DataType) -> bool:
    """Whether a type, without what it holds, can be converted."""
    containers = types.is_struct, types.is_fixed_size_list, types.is_dictionary, *_LISTS
    numbers = types.is_boolean, types.is_decimal
    times = types.is_date, types.is_time, types.is_timestamp, types.is_duration
    return kind in _PLAIN or _is(kind, *containers, *numbers, *times, *_TEXTS, *_BYTES)


def _paths(kind: pa.DataType, path: str) -> Iterable[tuple[str, pa.DataType]]:
    """The names of a column and of what it holds, with their types: `a.b` of a struct, `a[]` of a list."""
    if isinstance(kind, pa.BaseExtensionType):
        yield from _paths(kind.storage_type, path)
    elif types.is_dictionary(kind):
        yield from _paths(kind.value_type, path)
    else:
        yield path, kind
        if types.is_struct(kind):
            for field in kind:
                yield from _paths(field.type, f"{path}.{field.name}")
        elif types.is_fixed_size_list(kind) or _is(kind, *_LISTS):
            yield from _paths(kind.value_type, f"{path}[]")


def _names(schema: pa.Schema, columns: Sequence[str] | None) -> list[str]:
    if columns is None:
        names = list(schema.names)
    elif isinstance(columns, str) or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns must be a list of names, or None for all, got {columns!r}")
    else:
        names = list(columns)
    if not names:
        raise ValueError("columns must name at least one column, got none")
    for name in names:
        _check_named("columns", name, schema.names)
    if twice := sorted({name for name in names if names.count(name) > 1 or schema.names.count(name) > 1}):
        raise ValueError(f"a row has each column once, and {twice} come more than once; rename them, or leave them out")
    return names


def _check_named(argument: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ValueError(f"{argument} must name columns that exist, got {name!r}; there are {', '.join(names)}")


def _functions(decode: Mapping[str, Callable[[Any], Any]] | None) -> dict[str, Callable[[Any], Any]]:
    found = {} if decode is None else decode
    if not isinstance(found, Mapping) or not all(map(callable, found.values())):
        raise TypeError(f"decode must be a dict of column names to functions, got {decode!r}")
    return dict(found)


def _fillings(fill_null: Mapping[str, Any] | None, paths: Mapping[str, pa.DataType]) -> dict[str, pa.Scalar]:
    found = {} if fill_null is None else fill_null
    if not isinstance(found, Mapping):
        raise TypeError(f"fill_null must be a dict of column names to values, got {fill_null!r}")
    scalars = {}
    for path, value in found.items():
        _check_named("fill_null", path, paths)
        try:
            scalars[path] = pa.scalar(value, paths[path])
            pc.fill_null(pa.nulls(1, paths[path]), scalars[path])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"fill_null must have values of the columns' types, got {value!r} for {path!r}, which is of type "
                f"{paths[path]}: {error}"
            ) from None
    return scalars
