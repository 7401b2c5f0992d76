"""The one search for random generators: in objects, and in the globals that their code names.

Promise: `search` gives the generators that are reached through attributes, items and code, each with a name that is the
same in every process that has these objects. No code of the user's runs.

NOTE [Where a search ends]. It looks at no more than `MOST` objects behind those where it begins, the nearest first; of
a container with more than `LONG` items it looks at the items but not into them. Of classes and functions it enters the
program's own: their attributes, and the globals that they name, as pickling them by value would take these along. So
an actor, whose `__main__` is another one, has the same generators by the same names as a fork. Not followed are those
in modules of installed packages, in sets and in iterators, and those that are made later: batches that are rebuilt are
compared with the delivered ones (digest.py).
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rayloader.namespaces import attributes_in, attributes_of, is_a, is_own_name, names_in, namespace_of, slots_of
from rayloader.random.generators import KINDS, distinct

# How many objects are looked at, and how many items of one container: a model may hold very many.
MOST = 2_000
# A container with more items holds data: generators are found among the items, but not within them.
LONG = 100

ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, types.ModuleType, torch.Tensor, range}
ATOMS |= {torch.dtype, torch.device, torch.Size, types.CodeType, np.dtype}
ATOMS |= {types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType}
_SEQUENCES = list, tuple, collections.deque
_ENDS = (types.ModuleType, torch.Tensor, np.ndarray, *KINDS)
# What objects of Python's own kinds hold beside their attributes.
_HELD = {
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__"),
    types.CellType: ("cell_contents",),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}


def search(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The generators that are reached from some objects, which have names, by names of their own."""
    found = {name: obj for name, obj in walk(objects) if is_a(obj, KINDS)}
    followed = set(map(id, distinct(found.values())))
    return {name: generator for name, generator in found.items() if id(generator) in followed}


def walk(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Objects that are reached from some, these included, each once and by the shortest way to it."""
    queue = collections.deque(objects.items())
    seen = {id(obj): obj for obj in objects.values()}  # keeps them, so that no identity is used twice
    for _ in range(len(queue) + MOST):
        if not queue:
            return
        name, obj = queue.popleft()
        yield name, obj
        for step, part in _parts(obj):
            if type(part) not in ATOMS and id(part) not in seen:
                seen[id(part)] = part
                queue.append((name + step, part))


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds or names, each with the step that leads to it."""
    kind = type(obj)
    if issubclass(kind, type):
        yield from _of_class(obj)
        return
    if issubclass(kind, _ENDS):
        return
    yield ".__class__", kind
    if kind is types.FunctionType and is_own_name(obj.__globals__.get("__name__")):
        yield from _named(obj)
    for name in _HELD.get(kind, ()):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f".{name}", getattr(obj, name)
    keys, parts = _items(obj)
    if not ATOMS.issuperset(map(type, parts)):  # a long list of numbers is skipped in C
        is_long = len(parts) > LONG
        items = zip(keys, parts, strict=False)
        yield from ((f"[{key!r}]", part) for key, part in items if not is_long or is_a(part, KINDS))
    for name in slots_of(kind):
        with contextlib.suppress(AttributeError):  # not set
            yield f".{name}", object.__getattribute__(obj, name)
    yield from ((f".{name}", part) for name, part in list((attributes_in(obj) or {}).items()))


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The attributes of a class and of its bases, if the program has written them."""
    for base in kind.__mro__:
        contents = attributes_of(base)
        if is_own_name(contents.get("__module__")):
            for name, value in list(contents.items()):
                if not name.startswith("__") or is_a(value, types.FunctionType):
                    yield f".{name}", value


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals that a function names, and those of the program's modules that it names with them."""
    used = dict.fromkeys(names_in(function.__code__))
    spaces = [(":", function.__globals__, _globals_in(function.__code__))]
    for prefix, contents, names in spaces:  # which grows
        for name in names:
            value = contents.get(name)
            inner = namespace_of(value)
            if inner and is_own_name(inner.get("__name__")) and all(inner is not space for _, space, _ in spaces):
                spaces.append((f"{prefix}{name}.", inner, tuple(used)))
            yield f"{prefix}{name}", value


@functools.lru_cache(maxsize=4096)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals in a function, and in those within it, without those of attributes."""
    own = [one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for one in code.co_consts if is_a(one, types.CodeType) for name in _globals_in(one)]
    return tuple(dict.fromkeys((*own, *inner)))


def _items(obj: Any) -> tuple[Iterable[Any], list[Any]]:
    """Keys and items of a container, read at once, because threads may change it, and by the interpreter's own methods.

    A class of the user's may do anything when it is iterated: packages fill lazy containers then, with imports.
    """
    if is_a(obj, dict):
        items = list(itertools.islice(dict.items(obj), MOST))
        items = [(key, value) for key, value in items if type(value) not in ATOMS and _is_plain(key)]
        return [key for key, _ in items], [value for _, value in items]
    base = next((base for base in _SEQUENCES if is_a(obj, base)), None)
    return itertools.count(), [] if base is None else list(itertools.islice(base.__iter__(obj), MOST))


def _is_plain(key: Any) -> bool:
    return type(key) in (str, int, float, bool, bytes, type(None)) or (
        type(key) is tuple and all(map(_is_plain, key))
    )  # fmt: skip
