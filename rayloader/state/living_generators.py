"""The random generators that exist in this process, whatever holds them.

Promise: `living_generators` returns those that were created, or bound to a name, since the process started and since
`freeze`, in a time that hardly grows with the number of imported modules.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rayloader.state.generator_kinds import distinct, generator_types, is_a, with_subclasses
from rayloader.state.namespaces import namespace_of

_CHUNK = 100_000  # objects whose referents are examined together

MODULES_AT_START: set[str] = set()
_GLOBALS_AT_START: list[dict[str, Any]] = []  # of these modules
_SIZES_AT_START: list[int] = []  # how many globals each had


def note_modules() -> None:
    """The process has imported what it needs: generators in these modules belong to them alone."""
    modules = {name: module for name, module in list(sys.modules.items()) if is_a(module, types.ModuleType)}
    MODULES_AT_START.update(modules)
    _GLOBALS_AT_START[:] = map(namespace_of, modules.values())
    _SIZES_AT_START[:] = map(len, _GLOBALS_AT_START)


def is_imported(kind: type) -> bool:
    """Whether a class belongs to a module that existed when the process started; its attributes are constants."""
    return kind.__module__ in MODULES_AT_START or kind.__module__ == "builtins"


class _Namespaces:
    """The bindings in modules that were imported since the process started, and in their classes.

    The garbage collector does not report frozen objects, nor torch's generators: here they are found
    because another object was bound to the name before.
    """

    def __init__(self) -> None:
        self._modules: dict[str, dict[str, Any]] = {}
        self._classes: dict[int, type] = {}  # by identity
        # Each with its bindings when they were last noted, and the dicts among these: the garbage collector does not
        # track dicts that hold only a generator.
        self._spaces: list[tuple[Mapping[str, Any], list[Any], list[dict[Any, Any]]]] = []

    def note(self) -> None:
        """Notes the current bindings."""
        modules = {
            name: namespace_of(module)
            for name, module in list(sys.modules.items())
            if name not in MODULES_AT_START and is_a(module, types.ModuleType)
        }
        if any(modules.get(name) is not space for name, space in self._modules.items()):
            self.__init__()  # type: ignore[misc]
        new: list[Mapping[str, Any]] = [modules[name] for name in modules.keys() - self._modules.keys()]
        self._modules = modules
        for place, (space, bound, _) in enumerate(self._spaces):
            if _differ(values := list(space.values()), bound):
                self._spaces[place] = space, values, of_types({dict}, values)
                new += self._new_classes(values)
        while new:
            space = new.pop()
            values = list(space.values())
            self._spaces.append((space, values, of_types({dict}, values)))
            new += self._new_classes(values)

    def _new_classes(self, values: list[Any]) -> Iterator[Mapping[str, Any]]:
        for value in values:
            if is_a(value, type) and id(value) not in self._classes and not is_imported(value):
                self._classes[id(value)] = value
                yield vars(value)

    def new(self) -> list[Any]:
        """Objects bound since then, and dicts that the garbage collector does not track."""
        found: list[Any] = []
        for space, bound, dicts in self._spaces:
            found += itertools.filterfalse(gc.is_tracked, dicts)
            if _differ(values := list(space.values()), bound):
                found += values
                found += itertools.filterfalse(gc.is_tracked, of_types({dict}, values))
        return found


def _differ(values: list[Any], bound: list[Any]) -> bool:
    return len(values) != len(bound) or any(map(operator.is_not, values, bound))


_namespaces = _Namespaces()


def freeze() -> None:
    """Excludes all existing objects from the search, and from garbage collection."""
    gc.freeze()
    _namespaces.note()


def living_generators() -> list[Any]:
    """The generators in this process that were created since its start and since `freeze`."""
    kinds = generator_types()
    objects = gc.get_objects()  # not in a new list, which would contain itself
    objects += _namespaces.new()
    found = of_types(kinds, objects)
    # No path leads through a tensor, and there may be very many.
    objects = list(
        itertools.compress(objects, map(operator.is_not, map(type, objects), itertools.repeat(torch.Tensor)))
    )
    torch_kinds = with_subclasses(torch.Generator)  # the collector tracks neither them nor a dict of nothing else
    for begin in range(0, len(objects), _CHUNK):
        holders = objects[begin : begin + _CHUNK]
        while holders:
            referents = of_types({*torch_kinds, dict, tuple}, gc.get_referents(*holders))
            found += of_types(torch_kinds, referents)
            holders = list(itertools.filterfalse(gc.is_tracked, of_types({dict, tuple}, referents)))
    sizes = list(map(len, _GLOBALS_AT_START))
    if sizes != _SIZES_AT_START:
        for names, size, before in zip(_GLOBALS_AT_START, sizes, _SIZES_AT_START, strict=True):
            if size != before:
                found += [obj for obj in list(names.values()) if type(obj) in kinds]
    del objects
    return distinct(found)


def of_types(kinds: set[type], objects: list[Any]) -> list[Any]:
    """The objects whose type is one of these; entirely in C, because there may be millions."""
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))
