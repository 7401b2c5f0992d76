"""Values that mean the same in every process: numbers, texts, paths, and containers and objects made of these.

Promise: whatever the program has defined is neither called nor asked.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import enum
import itertools
import pathlib
import types
from typing import Any

import numpy as np
import torch

from rayloader.namespaces import functions_of, is_a, is_own_name, slots_of
from rayloader.random.generator_kinds import KINDS

_ATOMS = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_ATOMS |= {type(pathlib.PurePath()), type(pathlib.Path())}
_EXACT = _ATOMS - {float, complex}  # whose equality is that of `same`
_SEQUENCES = {tuple, list, set, frozenset}
_DICTS = {dict, collections.OrderedDict, collections.Counter}
_NAMESPACES = {argparse.Namespace, types.SimpleNamespace}
# Plain ones whose contents can be set.
MUTABLE = {list, set} | _DICTS | _NAMESPACES
_SIZED: tuple[Any, ...] = (tuple, list, set, frozenset, dict, collections.deque, bytearray)
# Recognized by their names.
_DEFINITIONS = type, types.FunctionType, types.BuiltinFunctionType
# A value with more parts than this is data, and too much to compare at each `iter()`.
_MAX_PARTS = 100_000
# Pickling, copying and comparing are recursive.
_MAX_DEPTH = 100

# Class, attributes, and the items of a dict, list or set.
Content = tuple[str, dict[str, Any], "dict[Any, Any] | list[Any] | set[Any] | None"]


def is_plain(value: Any) -> bool:
    """Whether it consists of types that are sent, and is small enough."""
    parts, count = [(value, 0)], 0
    while parts:
        part, depth = parts.pop()
        kind = type(part)
        if kind in _NAMESPACES:
            part, kind = vars(part), dict
        if kind in _DICTS or kind in _SEQUENCES:
            count += len(part)
            if count > _MAX_PARTS or depth > _MAX_DEPTH:
                return False
            inners = itertools.chain(part.keys(), part.values()) if kind in _DICTS else part
            parts += [(inner, depth + 1) for inner in inners if type(inner) not in _ATOMS]
        elif kind not in _ATOMS and not issubclass(kind, (np.number, np.bool_)):
            return False
    return True


def same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, with equal types at every level."""
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if kind in _NAMESPACES:
        one, other, kind = vars(one), vars(other), dict
    if kind in _DICTS:
        one, other, kind = *(list(itertools.chain(*each.items())) for each in (one, other)), list
    if kind in (tuple, list):
        kinds = list(map(type, one))
        if _EXACT.issuperset(kinds):  # in C, because there may be very many
            return kinds == list(map(type, other)) and bool(one == other)
        return len(one) == len(other) and all(map(same, one, other))
    if kind in (float, complex):
        return repr(one) == repr(other)  # 0.0 is not -0.0
    return bool(one == other)


def copied(content: Content, here: dict[int, Any]) -> Content:
    """A copy of plain contents from `content_of`; `here` represents parts, by their identities."""
    _, attributes, items = content
    parts = itertools.chain(attributes.values(), items.values() if isinstance(items, dict) else items or ())
    return content if _ATOMS.issuperset(map(type, parts)) else copy.deepcopy(content, here)


def content_of(value: Any) -> Content | None:
    """The contents of a container or an object, read by the interpreter's own methods; None if that is impossible.

    Also None for a random generator, whose attributes do not contain its state.
    """
    kind = type(value)
    if kind in _ATOMS or issubclass(kind, (*_DEFINITIONS, enum.Enum, *KINDS)):
        return None
    if kind in (list, set):
        return _name_of(kind), {}, kind(value)
    slots = slots_of(kind) if is_own_name(kind.__module__) else []
    attributes: dict[str, Any] = {}
    try:
        attributes.update(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        if not slots and not issubclass(kind, dict):
            return None
    for name in slots:
        with contextlib.suppress(AttributeError):  # not set
            attributes[name] = object.__getattribute__(value, name)
    base = _dict_of(kind)
    return _name_of(kind), attributes, None if base is None else dict(base.items(value))


def set_content(value: Any, content: Content) -> None:
    """Sets the contents of a container or an object of the same class, by the interpreter's own methods."""
    _, attributes, items = content
    if type(value) in (list, set):
        value.clear()
        (value.extend if type(value) is list else value.update)(items or ())
        return
    slots = slots_of(type(value))
    with contextlib.suppress(AttributeError):  # it may have slots only
        held = object.__getattribute__(value, "__dict__")
        held.clear()
        held.update({name: one for name, one in attributes.items() if name not in slots})
    for name in slots:
        with contextlib.suppress(AttributeError):  # not set
            object.__delattr__(value, name)
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
    base = _dict_of(type(value))
    if base is not None and isinstance(items, dict):
        base.clear(value)
        for key, item in items.items():
            base.__setitem__(value, key, item)


def empty_like(value: Any) -> Any:
    """Another object of its class, without contents, for `set_content`; None if it has to be made by its class."""
    base = _dict_of(type(value)) or object
    try:
        return base.__new__(type(value))
    except TypeError:
        return None


def _dict_of(kind: type) -> Any:
    """The class whose methods access the items of a dict; None if it is no dict. Ordered ones keep their own order."""
    return next((base for base in (collections.OrderedDict, dict) if issubclass(kind, base)), None)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def described(value: Any) -> str:
    """A description of any value that calls nothing that the program has defined."""
    definition = next(iter(functions_of(value)), value)
    if is_a(definition, _DEFINITIONS):
        return f"{definition.__module__}.{definition.__qualname__}"
    kind = type(value)
    text = _name_of(kind)
    if (base := next((base for base in _SIZED if issubclass(kind, base)), None)) is not None:
        return f"{text} of {base.__len__(value)}"
    return f"{text} {value._name_}" if issubclass(kind, enum.Enum) else text
