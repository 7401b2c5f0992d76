"""What modules, classes, objects and code name, and of which class an object is.

Promise: no code of the user's runs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

_DICT = vars(types.ModuleType)["__dict__"]
_CLASS_DICT = vars(type)["__dict__"]


def namespace_of(module: Any) -> dict[str, Any]:
    """A module's globals; none if `sys.modules` holds something else.

    Read through the slot of `ModuleType`: an attribute access imports a lazy module, and subclasses may define
    `__dict__`.
    """
    namespace = _DICT.__get__(module) if issubclass(type(module), types.ModuleType) else None
    return namespace if isinstance(namespace, dict) else {}


def attributes_of(definition: type) -> Mapping[str, Any]:
    """The attributes that a class itself defines, without inherited ones; a metaclass may define `__dict__` too."""
    return _CLASS_DICT.__get__(definition)  # type: ignore[no-any-return]


def attributes_in(obj: Any) -> dict[str, Any] | None:
    """The attributes in an object's `__dict__`."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return attributes if is_a(attributes, dict) else None


def slots_of(kind: type) -> list[str]:
    """The names of the attributes that objects of a class have in `__slots__`."""
    return [
        name
        for base in kind.__mro__
        if vars(base).get("__slots__")
        for name, member in vars(base).items()
        if is_a(member, types.MemberDescriptorType)
    ]


def functions_of(value: Any) -> list[types.FunctionType]:
    """The functions behind an attribute of a class, if it is a method, a property or the like."""
    found: tuple[Any, ...] = (value,)
    if is_a(value, (staticmethod, classmethod)):
        found = (value.__func__,)
    elif is_a(value, functools.cached_property):
        found = (value.func,)
    elif is_a(value, property):
        found = value.fget, value.fset, value.fdel
    return [one for one in found if is_a(one, types.FunctionType)]


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function, and in those within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if is_a(constant, types.CodeType):
            yield from names_in(constant)


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like `isinstance`, but without asking the user's objects what they claim to be."""
    return issubclass(type(obj), kinds)
