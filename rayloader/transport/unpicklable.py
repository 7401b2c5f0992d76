"""Names the part of a replica or a batch that cannot be pickled, for the error's text. Never raises, never hangs."""

from __future__ import annotations

import contextlib
import pickle
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from rayloader._compat import COMPILED
from rayloader.errors import add_note
from rayloader.transport import codec

# What to hold in place of an object that only a fork inherits, by the beginning of the name of its type.
_INSTEAD = {
    "multiprocessing.sharedctypes.": "a tensor after share_memory_()",
    "multiprocessing.connection.": "a tensor after share_memory_(), or multiprocessing.Manager().Queue(),",
    "multiprocessing.queues.": "multiprocessing.Manager().Queue()",
    "multiprocessing.synchronize.": "that of a manager, such as multiprocessing.Manager().Lock(),",
}

_Encode = Callable[[object], object]


class _Culprit(NamedTuple):
    """The part that can't be pickled."""

    path: str
    kind: str  # its type
    reason: str  # the error that pickling it raises


def explain(obj: object, name: str) -> str | None:
    """Names the part of a replica that can't be pickled, and the remedy.

    Args:
        obj: the object that `codec.encode` failed on.
        name: the user's name for it.

    Returns:
        `dataset.file: _io.FileIO can't be sent to a worker (reason); remedy`, or None if nothing was found.
        At most 2000 objects and 6 levels are searched, and nothing is raised.
    """
    if (found := _search(obj, name, partial(codec.encode, replica=True))) is None:
        return None
    remedy = "create it in worker_init_fn or lazily on first use, or drop it in __getstate__"
    for beginning, instead in _INSTEAD.items():
        if found.kind.startswith(beginning):
            remedy = f"use {instead} instead, which all workers on this machine share, or {remedy}"
    return f"{found.path}: {found.kind} can't be sent to a worker ({found.reason}); {remedy}"


def note_batch(error: Exception, batch: object, encode: _Encode) -> None:
    """Adds a note to an error of `encode`: which part of the batch can't be pickled, and the remedy."""
    found = _search(batch, "batch", encode)
    if found is not None:
        add_note(
            error,
            "What the dataset or collate_fn has returned cannot be sent to the trainer: "
            f"{found.path}: {found.kind} ({found.reason}); let them return what it can be made from, or leave it out",
        )


def _search(obj: object, name: str, encode: _Encode) -> _Culprit | None:
    try:
        return _culprit(obj, name, 6, iter(range(2000)), [], encode)
    except Exception:  # the user's objects may raise anything, and this only adds to an error that is already raised
        return None


def _culprit(
    obj: object, path: str, depth: int, budget: Iterator[int], above: list[object], encode: _Encode
) -> _Culprit | None:
    if any(obj is one for one in above) or next(budget, None) is None:
        return None
    try:
        encode(obj)
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # an object that can't even be taken apart is the culprit itself
        for suffix, part in _parts(obj) if depth else ():
            if found := _culprit(part, path + suffix, depth - 1, budget, [*above, obj], encode):
                return found
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    return _Culprit(path, kind, reason)


def _parts(obj: Any) -> Iterator[tuple[str, object]]:
    """The objects that pickling an object pickles in turn, each with its addition to the path."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.40}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, types.FunctionType):
        if COMPILED in vars(obj):
            return  # it is the culprit, and not what torch has put into it
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f".<closure>.{name}", cell.cell_contents
        used = set(obj.__code__.co_names) & obj.__globals__.keys()
        yield from ((f".<globals>.{name}", obj.__globals__[name]) for name in sorted(used))
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    else:  # through its reduction, not its attributes, because __getstate__ may drop some
        _, args, *rest = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        states = rest[0] if rest and isinstance(rest[0], tuple) else rest[:1]
        for state in (*states, args):
            if isinstance(state, dict):
                yield from ((f".{name}", value) for name, value in state.items())
            elif state is not None:
                yield "", state
