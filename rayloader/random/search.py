"""The one search for random generators: in the program's objects and at the top of its modules, without its code.

Promise: `search` finds the generators that are reached through attributes and items, each with the paths that lead to
it; another process follows these paths to its own.

NOTE [Where a search ends]. Each epoch begins with a search, so it is a short one. It looks at no more than `MOST`
objects behind those where it begins, and at as many for each module, the nearest first; of a container with more than
`LONG` items it looks at the items but not into them. Of modules and classes it enters the program's own, and no
functions there. A generator that it does not find is not followed: batches that are rebuilt are compared with the
delivered ones (digest.py).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rayloader.namespaces import attributes_in, attributes_of, is_a, is_own_name, namespace_of, slots_of
from rayloader.random.generator_kinds import KINDS, distinct

Step = tuple[str, Any]  # "attribute" or "item", with its name, key or number; first: "object" or "module"
Path = tuple[Step, ...]

# How many objects are looked at, and how many items of one container: a model may hold very many.
MOST = 1_000
# A container with more items holds data: generators are found among the items, but not within them.
LONG = 100

ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, types.ModuleType, torch.Tensor, range}
ATOMS |= {torch.dtype, torch.device, torch.Size, types.CodeType, np.dtype}
# Passed over in modules and classes.
_CODE = ATOMS | {types.FunctionType, staticmethod, classmethod, property, functools.cached_property}
_CODE |= {types.MemberDescriptorType, types.GetSetDescriptorType, type(functools.lru_cache(len))}
_PLACEHOLDERS = ATOMS - {types.ModuleType, types.CodeType} | {object}
_SEQUENCES = list, tuple, collections.deque
_ENDS = (types.ModuleType, torch.Tensor, np.ndarray, *KINDS)
# What a loader of the program's, or its iterator, notes of its epochs: many objects, which no generator is reached from
# that the dataset, `collate_fn` and the samplers do not hold.
_BOOKKEEPING = (
    "rayloader.epoch.draws",
    "rayloader.epoch.engine",
    "rayloader.epoch.schedule",
    "rayloader.observe.",
    "rayloader.resume.journal",
    "rayloader.resume.position",
    "rayloader.task",
    "rayloader.workers.",
)
# What objects of Python's own kinds hold beside their attributes.
_HELD = {
    types.FunctionType: ("__closure__", "__defaults__", "__kwdefaults__"),
    types.CellType: ("cell_contents",),
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
}


class Found(NamedTuple):
    """A generator, with the paths that lead to it."""

    generator: Any
    paths: tuple[Path, ...]


def search(objects: Mapping[str, Any], modules: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> list[Found]:
    """The generators that are reached from some objects, and from the globals of modules.

    Args:
        objects: by name.
        modules: the names and contents of some of the program's own.
    """
    reached: dict[int, tuple[Any, list[Path]]] = {}
    for path, obj in walk(((("object", name),), obj) for name, obj in objects.items()):
        if is_a(obj, KINDS):
            reached.setdefault(id(obj), (obj, []))[1].append(path)
    for path, generator in _in(modules):
        reached.setdefault(id(generator), (generator, []))[1].append(path)
    followed = distinct(generator for generator, _ in reached.values())
    return [Found(generator, tuple(reached[id(generator)][1])) for generator in followed]


def _in(modules: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[Path, Any]]:
    """Generators that are reached from globals; by the names of these in all modules, for not all may be imported."""
    names: dict[int, list[Path]] = {}
    seen: dict[int, Any] = {}
    roots: dict[str, list[tuple[Path, Any]]] = {}
    for module, contents in modules:
        roots[module] = []
        for step, value in _parts_but_code(contents):
            path: Path = (("module", module), step)
            if id(value) not in seen:
                seen[id(value)] = value
                roots[module].append((path, value))
            names.setdefault(id(value), []).append(path)
    paths = {root: names[id(value)] for begun in roots.values() for root, value in begun}
    for begun in roots.values():
        for path, obj in walk(begun, seen):
            if is_a(obj, KINDS):
                yield from ((root + path[2:], obj) for root in paths[path[:2]])


def walk(roots: Iterable[tuple[Path, Any]], seen: dict[int, Any] | None = None) -> Iterator[tuple[Path, Any]]:
    """Objects that are reached from some, these included, with the shortest path to each; generators with each path.

    Args:
        roots: paths and objects.
        seen: those that are not entered, by identity; the reached ones are added, so that no identity is used twice.
    """
    queue = collections.deque(roots)
    seen = {} if seen is None else seen
    seen.update((id(obj), obj) for _, obj in queue)
    for _ in range(len(queue) + MOST):
        if not queue:
            return
        path, obj = queue.popleft()
        yield path, obj
        for step, part in _parts(obj):
            if type(part) not in ATOMS and (id(part) not in seen or is_a(part, KINDS)):
                seen[id(part)] = part
                queue.append(((*path, step), part))


def _parts(obj: Any) -> Iterator[tuple[Step, Any]]:
    kind = type(obj)
    if issubclass(kind, type) and is_own_name(attributes_of(obj).get("__module__")):
        yield from _parts_but_code(attributes_of(obj))
    if issubclass(kind, (type, *_ENDS)) or str(attributes_of(kind).get("__module__")).startswith(_BOOKKEEPING):
        return
    for name in _HELD.get(kind, ()):
        with contextlib.suppress(ValueError):  # an empty cell
            yield ("attribute", name), getattr(obj, name)
    keys, parts = _items(obj)
    if not ATOMS.issuperset(map(type, parts)):  # a long list of numbers is skipped in C
        is_long = len(parts) > LONG
        items = zip(keys, parts, strict=False)
        yield from ((("item", key), part) for key, part in items if not is_long or is_a(part, KINDS))
    for name in slots_of(kind):
        with contextlib.suppress(AttributeError):  # not set
            yield ("attribute", name), object.__getattribute__(obj, name)
    yield from ((("attribute", name), part) for name, part in list((attributes_in(obj) or {}).items()))


def _parts_but_code(contents: Mapping[str, Any]) -> Iterator[tuple[Step, Any]]:
    for name, value in list(contents.items()):
        if type(value) not in _CODE and not name.startswith("__"):
            yield ("attribute", name), value


def _items(obj: Any) -> tuple[Iterable[Any], list[Any]]:
    """Keys and items of a container, read at once, because threads may change it, and by the interpreter's own methods.

    A class of the user's may do anything when it is iterated: packages fill lazy containers then, with imports.
    """
    if is_a(obj, dict):
        items = list(itertools.islice(dict.items(obj), MOST))
        items = [(key, value) for key, value in items if type(value) not in ATOMS and _is_plain(key)]
        return [key for key, _ in items], [value for _, value in items]
    base = _sequence(obj)
    return itertools.count(), [] if base is None else list(itertools.islice(base.__iter__(obj), MOST))


def _sequence(obj: Any) -> Any:
    return next((base for base in _SEQUENCES if is_a(obj, base)), None)


def _is_plain(key: Any) -> bool:
    return type(key) in (str, int, float, bool, bytes, type(None)) or (
        type(key) is tuple and all(map(_is_plain, key))
    )  # fmt: skip


# ---- paths


def is_path(path: Any) -> bool:
    """Whether it is one that a search can give."""
    (root, name), *steps = path
    return (
        root in ("object", "module")
        and type(name) is str
        and all(_is_plain(key) if kind == "item" else kind == "attribute" and type(key) is str for kind, key in steps)
    )


def follow(path: Path, objects: Mapping[str, Any]) -> Any:
    """The object at the end of a path, from the program's modules or from objects by name; None if there is none.

    A path may come from a file: it leads only where a search looks.
    """
    (kind, name), *steps = path
    obj: Any = objects.get(name) if kind == "object" else sys.modules.get(name) if is_own_name(name) else None
    try:
        for kind, key in steps:
            is_code = is_a(obj, types.ModuleType) or (is_a(obj, type) and is_own_name(attributes_of(obj)["__module__"]))
            obj = _attribute(obj, key) if kind == "attribute" else _item(obj, key)
            if is_a(obj, types.ModuleType) or (is_code and type(obj) in _CODE):
                return None
    except Exception:  # depends on the object that is there instead
        return None
    return obj


def _attribute(obj: Any, name: str) -> Any:
    if is_a(obj, (types.ModuleType, type)):
        return (namespace_of(obj) or attributes_of(obj))[name]
    attributes = attributes_in(obj) or {}
    if name not in attributes and name not in (*_HELD.get(type(obj), ()), *slots_of(type(obj))):
        raise AttributeError(name)
    return attributes[name] if name in attributes else object.__getattribute__(obj, name)


def _item(obj: Any, key: Any) -> Any:
    return dict.__getitem__(obj, key) if is_a(obj, dict) else _sequence(obj).__getitem__(obj, key)


def put(path: Path, objects: Mapping[str, Any], value: Any) -> None:
    """Makes a path lead to a value.

    Raises:
        TypeError: it can't be put there.
    """
    obj, (kind, key) = follow(path[:-1], objects), path[-1]
    is_free = _is_free(obj, kind, key)
    if is_free and kind == "item" and is_a(obj, dict):
        dict.__setitem__(obj, key, value)
    elif is_free and kind == "item" and is_a(obj, list) and 0 <= key <= len(obj):
        obj[key : key + 1] = [value]  # a list that is one item short is extended
    elif not is_free or kind != "attribute" or obj is None:
        raise TypeError("it can't be put there")
    elif is_a(obj, type):
        type.__setattr__(obj, key, value)
    elif (attributes := attributes_in(obj)) is not None and key not in slots_of(type(obj)):
        attributes[key] = value
    else:
        object.__setattr__(obj, key, value)


def _is_free(obj: Any, kind: str, key: Any) -> bool:
    """Whether nothing lies there, or a generator, or what programs have in its place until they make it."""
    if kind == "attribute" and key.startswith("__"):
        return False
    try:
        there = _attribute(obj, key) if kind == "attribute" else _item(obj, key)
    except Exception:  # there is nothing
        return True
    return type(there) in _PLACEHOLDERS or is_a(there, KINDS)


def in_words(path: Path) -> str:
    """A path as the user would write it."""
    (_, name), *steps = path
    return str(name) + "".join(f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in steps)
