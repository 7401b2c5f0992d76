"""Rows of a table, which are cut from its columns only when somebody looks at them.

Promise: `default_collate` of rows gives the same whether their columns are put together, or the values of each row are
stacked, and it never takes apart what nobody has looked at. A row is a mapping of names to values, and what is changed
in it stays changed. This module does not need pyarrow: a process that only receives rows does without.

NOTE [collate]. torch's `default_collate` looks up the type of the first sample in its map, which is its documented way
to add types. `Row` is in that map, so torch's loader and ours collate alike, in any process that has imported this
module; unpickling a row does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from rayloader._compat import default_collate_fn_map
from rayloader.fetching import collates


class Lists(list[Any]):
    """A column whose values may differ in length from row to row: a batch has a list of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Rows, column by column; as the value of a column: a struct.

    Attributes:
        values: by the names of columns. Each is a tensor, an array of NumPy's or of Arrow's, `Lists`, a list or
            `Columns`, with an item for each row.
        length: how many rows there are.
        maker: rows of one maker have the same columns of the same types.
    """

    values: Mapping[str, Any]
    length: int
    maker: object

    def rows(self) -> list[Row]:
        """All rows."""
        return [Row.at(self, index) for index in range(self.length)]

    def part(self, indices: list[int]) -> Columns:
        """Some of the rows, in memory of their own: who changes a batch does not change the rows."""
        if indices == list(range(self.length)):
            return Columns({name: _copied(column) for name, column in self.values.items()}, self.length, self.maker)
        places = torch.tensor(indices)
        values = {name: _part(column, indices, places) for name, column in self.values.items()}
        return Columns(values, len(indices), self.maker)

    def whole(self, *, collated: bool) -> dict[str, Any]:
        """The columns as the default collate makes them of the rows, or as they are."""
        return {name: _whole(column, collated) for name, column in self.values.items()}


class Row(MutableMapping[str, Any]):
    """One row of a table: a mapping of its columns' names to values.

    It is no `dict`, which would have to hold all values from the start; `dict(row)` makes one. Libraries that map a
    function over samples make a row of a dict, `type(row)(values)`.

    Args:
        values: by the names of columns.
        lists: the names of columns whose values may differ in length from row to row.
    """

    __slots__ = ("_columns", "_index", "_lists", "_own")

    def __init__(self, values: Mapping[str, Any], lists: frozenset[str] = frozenset()) -> None:
        self._columns, self._index = _NOWHERE, 0
        self._own: dict[str, Any] | None = dict(values)  # None as long as they are those of the columns
        self._lists: frozenset[str] | None = lists  # None until somebody asks for it

    @classmethod
    def at(cls, columns: Columns, index: int) -> Row:
        """The row that lies there."""
        row = cls.__new__(cls)
        row._columns, row._index = columns, index
        row._own = row._lists = None
        return row

    @property
    def place(self) -> tuple[Columns, int] | None:
        """The columns in which it lies, and where; None if its values may have been changed."""
        return (self._columns, self._index) if self._own is None else None

    @property
    def lists(self) -> frozenset[str]:
        """The names of columns whose values may differ in length from row to row."""
        if self._lists is None:
            self._lists = frozenset(name for name, column in self._columns.values.items() if type(column) is Lists)
        return self._lists

    def __getitem__(self, name: str) -> Any:
        if self._own is None:
            column = self._columns.values[name]
            if type(column) is not Columns:
                return column[self._index]
        return self._taken_out()[name]  # a struct is always the same object: it may be changed

    def __setitem__(self, name: str, value: Any) -> None:
        self._taken_out()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._taken_out()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.values if self._own is None else self._own)

    def __len__(self) -> int:
        return len(self._columns.values if self._own is None else self._own)

    def __repr__(self) -> str:
        return f"Row({dict(self)})"

    def copy(self) -> Row:
        """Another row with these values."""
        return Row(self, self.lists)

    def __or__(self, other: Mapping[str, Any]) -> Row:
        if not isinstance(other, Mapping):
            return NotImplemented
        row = self.copy()
        row.update(other)
        return row

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self} if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: Mapping[str, Any]) -> Row:
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (dict(self), self.lists)

    def _taken_out(self) -> dict[str, Any]:
        if self._own is None:
            self._own = {
                name: Row.at(column, self._index) if type(column) is Columns else column[self._index]
                for name, column in self._columns.values.items()
            }
        return self._own


_NOWHERE = Columns({}, 0, None)


def collate_rows(batch: Sequence[Any], *, collate_fn_map: Any = None) -> dict[str, Any]:
    """The batch of rows, a column for each name; see NOTE [collate]."""
    parts = _parts(batch)
    if parts is not None:
        return _joined([columns.part(indices) for columns, indices in parts]).whole(collated=True)
    first = batch[0]
    values = {name: [row[name] for row in batch] for name in first}
    return {name: column if name in first.lists else _stacked(column) for name, column in values.items()}


default_collate_fn_map[Row] = collates[Row] = collate_rows


def _parts(batch: Sequence[Any]) -> list[tuple[Columns, list[int]]] | None:
    """Where the rows lie, in order; None if a value may have been changed, or they are of several makers."""
    parts: list[tuple[Columns, list[int]]] = []
    for row in batch:
        place = row.place if type(row) is Row else None
        if place is None:
            return None
        columns, index = place
        if not parts or columns is not parts[-1][0]:
            if parts and columns.maker is not parts[0][0].maker:
                return None
            parts.append((columns, []))
        parts[-1][1].append(index)
    return parts


def _part(column: Any, indices: list[int], places: torch.Tensor) -> Any:
    match column:
        case torch.Tensor():
            return column[places]
        case np.ndarray():
            return column[indices]
        case Columns():
            return column.part(indices)
        case list():
            return type(column)(column[index] for index in indices)
    return column.take(indices)


def _copied(column: Any) -> Any:
    """What `_part` gives of all rows, in a fraction of the time."""
    match column:
        case torch.Tensor():
            return column.clone()
        case np.ndarray():
            return column.copy()
        case Columns():
            return column.part(list(range(column.length)))
        case list():
            return type(column)(column)
    return column  # of Arrow's, which nobody can change


def _joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    values = {name: _concatenated([part.values[name] for part in parts]) for name in parts[0].values}
    return Columns(values, sum(part.length for part in parts), parts[0].maker)


def _concatenated(columns: list[Any]) -> Any:
    first = columns[0]
    match first:
        case torch.Tensor():
            return torch.cat(columns)
        case np.ndarray():
            return np.concatenate(columns)
        case Columns():
            return _joined(columns)
        case list():
            return type(first)(value for column in columns for value in column)
    import pyarrow

    return pyarrow.concat_arrays(columns)


def _whole(column: Any, collated: bool) -> Any:
    match column:
        case Columns():
            return column.whole(collated=collated)
        case Lists():
            return list(column)
        case np.ndarray() if collated:
            return torch.from_numpy(column)
        case list() if collated and column:
            return default_collate(column)
    return column


def _stacked(values: list[Any]) -> Any:
    """What `_whole` gives where it collates, of values from single rows."""
    first = values[0]
    if isinstance(first, (np.ndarray, np.generic)):
        return torch.from_numpy(np.stack(values))
    if hasattr(first, "as_py"):  # a scalar of Arrow's
        import pyarrow

        if not isinstance(first, pyarrow.ExtensionScalar):
            stacked = pyarrow.array(values, first.type)
            # pyarrow before 25 forgets that a dictionary is ordered
            return stacked if stacked.type == first.type else stacked.cast(first.type)
        return first.type.wrap_array(pyarrow.array([scalar.value for scalar in values], first.type.storage_type))
    return default_collate(values)
