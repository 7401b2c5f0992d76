"""The state in a sampler: its attributes, and the random generators of its classes.

Promise: no code of the user's runs. Torch's own samplers, which are often read, cost a few microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

from rayloader.namespaces import functions_of, is_a, names_in, namespace_of, slots_of
from rayloader.random.generator_kinds import KINDS

DATA = ("data_source", "dataset")  # names of the attributes for what samplers sample from
_STOCK = {"torch", "rayloader", "typing", "abc", "collections", "builtins"}  # their classes have no state


def attributes_of(obj: Any) -> dict[str, Any]:
    """The attributes of an object by name, including those in `__slots__`."""
    attributes: dict[str, Any] = getattr(obj, "__dict__", {})
    if _is_stock(type(obj).__module__) or not (slots := slots_of(type(obj))):
        return attributes
    attributes = dict(attributes)
    for name in slots:
        with contextlib.suppress(AttributeError):  # not set
            attributes[name] = object.__getattribute__(obj, name)
    return attributes


def set_attributes(obj: Any, values: dict[str, Any]) -> None:
    """Sets attributes from `attributes_of`."""
    slots = slots_of(type(obj))
    for name, value in values.items():
        if name in slots:
            object.__setattr__(obj, name, value)
        else:
            vars(obj)[name] = value


def own_classes(sampler: Any) -> list[type]:
    """The classes of a sampler that do not belong to torch or Python."""
    if _is_stock(type(sampler).__module__):
        return []
    return [kind for kind in type(sampler).__mro__ if not _is_stock(kind.__module__)]


def named_generators(sampler: Any) -> list[Any]:
    """The generators that a sampler does not hold itself: attributes of its classes, and globals that these name."""
    found: list[Any] = []
    for kind in own_classes(sampler):
        members, contents = list(vars(kind).values()), namespace_of(sys.modules.get(kind.__module__))
        names = {name for member in members for one in functions_of(member) for name in names_in(one.__code__)}
        found += [*members, *(value for name, value in list(contents.items()) if name in names)]
    return [value for value in found if is_a(value, KINDS)]


@functools.lru_cache(maxsize=256)
def _is_stock(module: str) -> bool:
    return module.partition(".")[0] in _STOCK
