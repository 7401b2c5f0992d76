"""Objects that are nested deeply, such as a linked list: pickled at a bounded depth.

Pickling takes room on the thread's stack for each level. Python's recursion limit bounds that, but a program may have
raised it past what the stack holds, which before Python 3.12 ends the process. So `bounded` keeps it below that, and
what is too deep for it is pickled in turn: first the whole without the attributes of its ordinary objects, then
these, one object after the other. Any thread may call.

NOTE [In turn]. An object gets its attributes later than others that refer to it. Only what does not look at them before
they are complete may be like that: objects without code of their own for pickling, hashing or equality. So an object is
pickled this way only where the usual one has failed.
"""

from __future__ import annotations

import collections
import contextlib
import operator
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rayloader.transport.rebuilding import Incomplete

DEEPEST = 10_000  # levels; as Python's own bound since 3.12. A third of what has ended a thread with a stack of 8 MiB.
_MAY_DIFFER = "__reduce_ex__", "__reduce__", "__getstate__"

_lock = threading.Lock()
_users = 0
_limit = 0  # the program's


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Keeps the recursion limit from being too high, in all threads."""
    global _users, _limit
    if sys.version_info >= (3, 12):
        yield
        return
    with _lock:
        if not _users:
            _limit = sys.getrecursionlimit()
            if _limit > DEEPEST:
                sys.setrecursionlimit(DEEPEST)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _limit > DEEPEST:
                sys.setrecursionlimit(_limit)


def is_too_deep(error: BaseException) -> bool:
    """Whether pickling has failed with this error because of the recursion limit."""
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def too_deep() -> pickle.PicklingError:
    """The error for what is nested too deeply in turn too."""
    return pickle.PicklingError(
        f"objects are nested deeper than pickling can follow (the recursion limit is {sys.getrecursionlimit()}, of "
        f"which {DEEPEST} are used at most), or a method that pickling calls does not end; hold them side by side, for "
        "instance in one list, and let them refer to each other by index"
    )


class InTurn:
    """An object to be pickled in turn: what is pickled in its place, and becomes it; see NOTE [In turn]."""

    def __init__(self, obj: object) -> None:
        self.later: collections.deque[tuple[Any, Any]] = collections.deque()
        self._obj = obj

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.attrgetter("whole"), (_Whole(self._obj, self.later),)

    def without_attributes(self, obj: Any, reduced: Any) -> Any:
        """The object's usual reduction, without its attributes if they can come later."""
        kind, rest = type(obj), list(reduced[2:]) if isinstance(reduced, tuple) else []
        own = [name for name in _MAY_DIFFER if getattr(kind, name, None) is not getattr(object, name, None)]
        hashed: Any = kind.__hash__
        if own or hasattr(kind, "__setstate__") or not (hashed is None or hashed is object.__hash__):
            return reduced
        if not rest or rest[0] is None or any(part is not None for part in rest[1:3]):
            return reduced
        self.later.append((obj, rest[0]))
        return reduced[:2]


class _Whole:
    """The object, and then the attributes, of which there are more while they are pickled."""

    def __init__(self, obj: object, later: collections.deque[tuple[Any, Any]]) -> None:
        self._obj, self._later = obj, later

    def __reduce__(self) -> tuple[Any, ...]:
        return Incomplete, (self._obj,), None, self._items()

    def _items(self) -> Iterator[tuple[Any, ...]]:
        while self._later:
            yield self._later.popleft()
            if not self._later:
                yield ()  # pickle asks for two items before it pickles the first, which may add more
