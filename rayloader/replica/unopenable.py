"""Decodes a replica; if unpickling fails, names the part of it that cannot be made here, in a note below the error.

The error itself says only what was called. So the pickle is loaded a second time, by Python's own unpickler, which
counts its operations; and then read without loading, to find out what the operation that failed is a part of.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rayloader.errors import add_note
from rayloader.transport import codec, rebuilding
from rayloader.transport.memory import no_collection

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

_SETTERS = f"{rebuilding.__name__}.set_"


def decode(
    skeleton: Buffer, buffers: Sequence[Buffer | torch.UntypedStorage], carried: Sequence[Any], names: Sequence[str]
) -> Any:
    """As `codec.decode`, with a note below an error of unpickling.

    Args:
        skeleton: from `codec.encode`.
        buffers: of the skeleton.
        carried: parts that travelled unchanged.
        names: the user's names for the items of the object's state, or for the object itself.
    """
    with no_collection():
        try:
            return codec.decode(skeleton, buffers, carried)
        except Exception as error:  # the user's objects may raise anything
            with contextlib.suppress(Exception):  # this only adds to an error that is already raised
                add_note(error, f"It cannot be opened in the worker: {_what(error, skeleton, buffers, carried, names)}")
            raise


def _what(error: Exception, skeleton: Buffer, buffers: Any, carried: Any, names: Sequence[str]) -> str:
    unpickler = _Counting(io.BytesIO())

    def loads(pickled: Buffer, **options: Any) -> Any:
        nonlocal unpickler
        unpickler = _Counting(io.BytesIO(pickled), **options)
        return unpickler.load()

    with contextlib.suppress(type(error)):
        codec.decode(skeleton, buffers, carried, loads)
    path = _path_to(bytes(skeleton), unpickler.count)
    numbers = {f"[{number}]": name for number, name in enumerate(names)}
    part = next((numbers[one] + path[len(one) :] for one in numbers if path.startswith(one)), names[0] + path)
    remedy = "its class must allow what unpickling does (see __getnewargs__, __reduce__)"
    if isinstance(error, ImportError) or _is_name(unpickler.operands):
        remedy = "workers must be able to import its module"
    return (
        f"{part}: {_made(unpickler.operands)} ({type(error).__name__}: {error}); {remedy}; or create it in "
        "worker_init_fn or lazily on first use, and drop it in __getstate__"
    )


def _made(operands: list[Any]) -> str:
    """What an operation makes that has these operands: a module and a name; a callable, or an object, and a second."""
    if _is_name(operands):
        return ".".join(operands)
    kind, *others = operands
    if getattr(kind, "__module__", None) == rebuilding.__name__ and others and isinstance(others[0], tuple):
        kind = others[0][0]
    kind = kind if isinstance(kind, (type, types.FunctionType)) else type(kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_name(operands: list[Any]) -> bool:
    return all(isinstance(operand, str) for operand in operands)


class _Counting(pickle._Unpickler):
    """An unpickler that counts the operations it has begun, and holds the top of its stack before the last one."""

    count = 0
    operands: list[Any]


def _counted(load: Any) -> Any:
    def counted(self: Any) -> None:
        self.count += 1
        self.operands = self.stack[-2:]
        load(self)

    return counted


_Counting.dispatch = {code: _counted(load) for code, load in pickle._Unpickler.dispatch.items()}


# ---- where in a pickle an operation is


class _Value:
    """Something on the stack of an unpickler.

    Attributes:
        start: number of the operation with which it began.
        content: a string, or the name of a class or function.
        length: how many items it has been given.
    """

    __slots__ = ("content", "length", "start")

    def __init__(self, start: int, content: Any) -> None:
        self.start, self.content, self.length = start, content, 0


_Path = list[tuple[str, Any]]  # from the inside out: format of a step, and the key or the index


def _path_to(pickled: bytes, failed: int) -> str:
    """The path to the part of an object that the operation of that number belongs to."""
    stack: list[_Value] = []
    memo: list[_Value] = []
    path: _Path = []
    for number, (operation, argument, _) in enumerate(pickletools.genops(pickled), start=1):
        name, before = operation.name, operation.stack_before
        if name == "MEMOIZE":
            memo.append(stack[-1])
            continue
        taken = len(before)
        if pickletools.markobject in before:  # whose items are all after the mark
            taken -= 2
            mark = max(index for index, value in enumerate(stack) if value.content is pickletools.markobject)
            popped = [*stack[mark - taken : mark], *stack[mark + 1 :]]
            start = stack[mark - taken].start
            del stack[mark - taken :]
        else:
            popped = stack[len(stack) - taken :]
            start = popped[0].start if popped else number
            del stack[len(stack) - taken :]
        inside = max((index for index, value in enumerate(popped) if value.start <= failed), default=-1)
        if number > failed and inside >= 0:
            _step(path, name, popped, inside)
        if not operation.stack_after:
            continue
        if name in _CHANGES:
            popped[0].length += len(popped) - 1
            stack.append(popped[0])
        else:
            stack.append(_Value(start, _content(name, argument, popped, memo)))
    return "".join(step.format(key) for step, key in reversed(path))


_CHANGES = {"SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS", "BUILD"}
_ATTRIBUTE, _ITEM, _ARGUMENT = ".{}", "[{!r}]", "[{}]"


def _content(name: str, argument: Any, popped: list[_Value], memo: list[_Value]) -> Any:
    if name == "MARK":
        return pickletools.markobject
    if name == "STACK_GLOBAL":
        return ".".join(str(value.content) for value in popped)
    return memo[argument].content if name.endswith("BINGET") else argument


def _step(path: _Path, name: str, popped: list[_Value], inside: int) -> None:
    """Adds the step from a container to that of the values popped for it in which the failure is."""
    if name in ("SETITEM", "SETITEMS"):
        if inside and inside % 2 == 0:
            path.append((_ITEM, popped[inside - 1].content))
    elif name in ("APPEND", "APPENDS"):
        if inside:
            path.append((_ITEM, popped[0].length + inside - 1))
    elif name.startswith("TUPLE"):
        path.append((_ARGUMENT, inside))
    elif inside and path and name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"):
        if path[-1][0] == _ARGUMENT:
            path.pop()  # the place in a tuple of arguments, or in one of attributes and slots
        if path and isinstance(path[-1][1], str) and (name == "BUILD" or str(popped[0].content).startswith(_SETTERS)):
            path[-1] = _ATTRIBUTE, path[-1][1]
