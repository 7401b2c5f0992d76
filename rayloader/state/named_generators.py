"""Random generators that the program's code names without holding them: `RNG.random()`, `settings.RNG.random()`.

Promise: `NamedGenerators.look` gives those behind some objects as they are now: it searches again once another object
is bound where the last search has come by. It is for states without workers; workers have `generators.Generators`.
"""

from __future__ import annotations

import operator
import types
from typing import Any

from rayloader.state.generator_kinds import distinct, is_a
from rayloader.state.module_globals import is_own_module, is_own_name
from rayloader.state.namespaces import namespace_of
from rayloader.state.object_paths import ATOMS, Node, attributes_in, path_of, walk

_MOST_BEHIND_CODE = 100_000  # objects: functions may name whole datasets
_MOST_WATCHED = 10_000  # values: a state may be taken before each batch


class NamedGenerators:
    """Those behind some objects.

    Args:
        objects: which hold or are functions.
    """

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._found: list[Any] | None = None
        # Where generators may be bound later, with what is bound there: namespaces of modules and classes, attributes
        # of objects, dicts and lists. Those that the objects hold are searched for each state in any case.
        self._watched: dict[int, tuple[Any, list[Any]]] = {}
        self._values = 0  # in all of these

    def look(self) -> list[Any]:
        """Those that the objects hold, and those that the program's code behind them can name."""
        if self._found is None or any(_has_changed(place, bound) for place, bound in self._watched.values()):
            self._watched, self._values = {}, 0
            root = (None, ("root", "objects")), self._objects
            walked = walk([root], passed=_is_not_own, reads=_is_read, met=self._note, most=_MOST_BEHIND_CODE)
            self._found = distinct(generator for _, generator in walked)
        return self._found

    def _note(self, node: Node, obj: Any) -> None:
        if is_a(obj, types.FunctionType):
            if _is_read(obj):
                self._watch(obj.__globals__)
                for value in list(obj.__globals__.values()):
                    if is_a(value, types.ModuleType) and is_own_module(value):
                        self._watch(namespace_of(value))
        elif is_a(obj, type):
            if not _is_not_own(obj):
                self._watch(vars(obj))
        elif None in path_of(node):
            self._watch(obj if is_a(obj, (dict, list)) else attributes_in(obj))

    def _watch(self, place: Any) -> None:
        if id(place) not in self._watched and is_a(place, (dict, list, types.MappingProxyType)):
            bound = _bound_in(place)
            self._values += len(bound)
            if self._values <= _MOST_WATCHED:
                self._watched[id(place)] = place, bound


def _bound_in(place: Any) -> list[Any]:
    return list.copy(place) if is_a(place, list) else list(place.values())


def _has_changed(place: Any, bound: list[Any]) -> bool:
    """Whether something else is bound there that can lead to a generator; what can't is noted."""
    now = _bound_in(place)
    if len(now) == len(bound) and all(map(operator.is_, now, bound)):
        return False
    if len(now) != len(bound) or any(
        one is not other and type(one) not in ATOMS for one, other in zip(now, bound, strict=True)
    ):
        return True
    bound[:] = now
    return False


def _is_read(function: types.FunctionType) -> bool:
    return is_own_name(function.__globals__.get("__name__"))


def _is_not_own(kind: type) -> bool:
    return not is_own_name(kind.__module__)
