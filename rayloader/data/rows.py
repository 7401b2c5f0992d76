"""Rows of a table, which are cut from its columns only when somebody looks at them.

Promise: `default_collate` of rows gives the same whether their columns are put together, or the values of each row are
stacked, and nothing is converted that nobody has looked at. A row is a mapping of names to values, and what is changed
in it stays changed. This module does not need pyarrow: a process that only receives rows does without.

NOTE [collate]. torch's `default_collate` looks up the type of the first sample in its map, which is its documented way
to add types. `Row` is in that map, so torch's loader and ours collate alike, in any process that has imported this
module; unpickling a row does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import default_collate

from rayloader._compat import default_collate_fn_map
from rayloader.fetching import collates


class Chunk:
    """Some rows of a table, in memory of their own.

    Args:
        table: without nulls that have no form.
        converter: of its columns, a `Converter` of columns.py.
        numbers: of the rows, by which a stream finds them again.
    """

    def __init__(self, table: Any, converter: Any, numbers: Any) -> None:
        self.table, self.converter, self.numbers = table, converter, numbers

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The columns as they are converted, when somebody looks at one of the rows."""
        values: dict[str, Any] = self.converter.columns(self.table)
        return values


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
    columns: dict[str, Any] = converter.columns(converter.gathered([chunk.table for chunk in starts], indices))
    return columns


default_collate_fn_map[Row] = collates[Row] = collate_rows


def _stacked(values: list[Any], path: str, lists: frozenset[str]) -> Any:
    """What `Converter.columns` gives, of values from single rows."""
    first = values[0]
    if path in lists:
        return values
    if isinstance(first, dict):
        return {name: _stacked([value[name] for value in values], f"{path}.{name}", lists) for name in first}
    if hasattr(first, "as_py"):  # a scalar of Arrow's
        import pyarrow

        if isinstance(first, pyarrow.ExtensionScalar):
            stored = pyarrow.array([value.value for value in values], first.type.storage_type)
            return pyarrow.ExtensionArray.from_storage(first.type, stored)
        return pyarrow.array(values, first.type)
    return default_collate(values)
