"""A list of Python objects in two buffers, for datasets of strings, paths, labels, records.

Promise: `SharedList` is immutable, and its items become Python objects only on access. So workers share its
memory, whatever loader they belong to: reading an item of a plain list writes to its reference count, which makes a
forked worker copy the page; and a worker that was not forked has its own copy of each item. This module does not import
Ray.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from rayloader.errors import add_note
from rayloader.transport.pickler import ByValuePickler, dumped

_T = TypeVar("_T")

_Array = np.ndarray[Any, Any]

_LOADERS: dict[str, Callable[[memoryview], Any]] = {
    "str": lambda raw: str(raw, "utf-8", "surrogatepass"),
    "bytes": bytes,
    "pickle": pickle.loads,
}


class SharedList(Sequence[_T]):
    """An immutable sequence whose items are stored in shared buffers and created again at each access.

    Strings and `bytes` take their own length and 8 bytes each, if all items are of the same type. Other items are
    pickled one by one: an item comes back equal, but as another object, and items no longer share objects with each
    other.

    Args:
        items: the items; anything that cloudpickle can pickle. Not kept.

    Raises:
        Exception: an error of pickling an item, mostly a TypeError; a note names the item's index and type.

    `list[i]` accepts negative indices. A slice is a `SharedList` too: with step 1 a view of the same memory, otherwise
    a new one. Equal to a list or another `SharedList` of equal items; not hashable, as lists are not.
    """

    __slots__ = ("_bounds", "_data", "_kind", "_load", "_raw")

    def __init__(self, items: Iterable[_T] = ()) -> None:
        parts: Any = items if isinstance(items, (list, tuple)) else list(items)
        kinds = {type(item) for item in parts}
        kind = "str" if kinds == {str} else "bytes" if kinds == {bytes} else "pickle"
        if kind == "str":
            parts = [text.encode("utf-8", "surrogatepass") for text in parts]
        elif kind == "pickle":
            parts = _pickled(parts)
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        self._set(kind, np.frombuffer(b"".join(parts), np.uint8), offsets)

    def _set(self, kind: str, data: _Array, offsets: _Array) -> None:
        self._kind, self._data = kind, data
        self._load = _LOADERS[kind]
        self._raw: memoryview = memoryview(data)  # type: ignore[arg-type]
        self._bounds: memoryview = memoryview(offsets)  # type: ignore[arg-type] # int64: an item from each to the next

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):  # Sequence's own would treat an IndexError of an item as the end
            yield self[index]

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[_T]: ...
    def __getitem__(self, index: int | slice) -> _T | SharedList[_T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return type(self)([self[i] for i in range(start, stop, step)])
            return _made(type(self), self._kind, self._data, np.asarray(self._bounds)[start : max(start, stop) + 1])
        number = operator.index(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"SharedList index {index} is out of range for {len(self)} items")
        item: _T = self._load(self._raw[self._bounds[number] : self._bounds[number + 1]])
        return item

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (SharedList, list)):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{item!r:.40}" for item in self[:3])
        return f"SharedList([{shown}{', ...' if len(self) > 3 else ''}], {len(self)} items)"

    @property
    def nbytes(self) -> int:
        """Bytes that the items take."""
        return self._bounds[-1] - self._bounds[0] + self._bounds.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        low, high = self._bounds[0], self._bounds[-1]
        offsets = np.asarray(self._bounds)
        return _made, (type(self), self._kind, self._data[low:high], offsets - low if low else offsets)


def _made(cls: type[SharedList[Any]], kind: str, data: _Array, offsets: _Array) -> SharedList[Any]:
    """Creates one from these buffers. A function, because a class method would be pickled with its code."""
    made = cls.__new__(cls)
    made._set(kind, data, offsets)
    return made


def _pickled(items: Sequence[Any]) -> list[bytes]:
    parts = []
    for index, item in enumerate(items):
        try:
            parts.append(dumped(item, ByValuePickler))  # each item separately
        except Exception as error:  # the item's own pickling may raise anything
            kind = f"{type(item).__module__}.{type(item).__qualname__}"
            add_note(
                error,
                f"A SharedList pickles its items, and item {index}, of type {kind}, cannot be pickled; hold what it "
                "can be made from instead, such as a path or an address, and create it where it is used",
            )
            raise
    return parts
