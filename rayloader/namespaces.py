"""What modules, classes, objects and code name, and which modules the program itself has written.

Promise: no code of the user's runs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
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


_INSTALLED = {"site-packages", "dist-packages"}
# Wherever they are installed: these are large.
_PACKAGES = filter(None, map(importlib.util.find_spec, ("rayloader", "torch", "numpy", "ray", "pyarrow")))
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *(os.path.dirname(os.path.abspath(package.origin or "")) for package in _PACKAGES),
    )
)


def is_own_name(name: Any) -> bool:
    """Whether the program has written the module of this name; in a worker `__main__` is another one's.

    What is here without its module was sent by value, as is done with the program's own.
    """
    if name == "__main__" or name not in sys.modules:
        return isinstance(name, str)
    namespace = namespace_of(sys.modules[name])
    if (file := namespace.get("__file__")) is not None:
        return _is_own(file)
    origin = getattr(namespace.get("__spec__"), "origin", None)
    return bool(namespace) and origin not in ("built-in", "frozen")


@functools.cache
def _is_own(file: Any) -> bool:
    """Whether the program has written the module of this file: it is none of Python's, of ours, or of a package's."""
    if not isinstance(file, str):
        return False
    path = os.path.abspath(file)
    return not _INSTALLED.intersection(path.split(os.sep)) and not path.startswith(_LIBRARIES)
