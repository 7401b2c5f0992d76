"""The state in a sampler: its attributes, and the random generators that its code names.

Promise: no code of the user's runs. Torch's own samplers, which are often read, cost a few microseconds.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from rayloader.namespaces import is_a, names_in
from rayloader.random.generator_kinds import KINDS
from rayloader.random.object_paths import functions_of, held_by, named_by, slots_of

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
    """The generators that a sampler does not hold itself, but that its methods can name.

    They are attributes of its classes; cells, defaults and module globals of its methods, and attributes of the modules
    among these; and attributes of the dataset whose names are in the methods' code.
    """
    if not (classes := own_classes(sampler)):
        return []
    found: list[Any] = []
    names: set[str] = set()
    for kind in classes:
        for value in list(vars(kind).values()):
            found.append(value)
            for function in functions_of(value):
                found += held_by(function)
                found += named_by(function)
                names.update(names_in(function.__code__))
    held = attributes_of(sampler)
    for data in (held[name] for name in DATA if name in held):
        found += [value for name, value in attributes_of(data).items() if name in names]
    return [value for value in found if is_a(value, KINDS)]


@functools.lru_cache(maxsize=256)
def _is_stock(module: str) -> bool:
    return module.partition(".")[0] in _STOCK
