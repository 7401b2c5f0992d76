"""Random generators that the program's code refers to by name: `RNG.random()`, `settings.RNG.random()`.

Promise: `NamedGenerators.look` returns those behind some objects as they are now: it searches again if another object
was bound to a place that the last search has visited. It is for states without workers; workers have
`generators.Generators`.
"""

from __future__ import annotations

import collections
import gc
import operator
import sys
import types
from typing import Any

import numpy as np
import torch

from rayloader.namespaces import is_a
from rayloader.own_modules import is_own_name, is_own_namespace
from rayloader.random.generator_kinds import KINDS, distinct
from rayloader.random.object_paths import (
    ATOMS,
    Node,
    attributes_in,
    is_opaque,
    modules_of,
    path_of,
    plain_containers,
    slots_of,
    spaces_of,
    walk,
)

_MOST_BEHIND_CODE = 100_000  # objects: functions may name whole datasets
_MOST_WATCHED = 10_000  # values: a state may be taken before each batch
_LEAD_NOWHERE = ATOMS - {type, types.ModuleType}
_BETWEEN = (object(),)  # two places: changes from one to the next are noticed


class NamedGenerators:
    """The generators behind some objects.

    Args:
        objects: which hold or are functions.
    """

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._found: list[Any] | None = None
        # Where generators may be bound later, and what is bound there according to the garbage collector. The objects'
        # own contents are searched for each state in any case.
        self._places: list[Any] = []
        self._bound: list[Any] = []
        self._watched: set[int] = set()  # identities of these places
        self._missing: set[str] = set()  # modules that the code may import, and that were not imported
        self._modules = 0  # how many were imported at the last look

    def look(self) -> list[Any]:
        """The generators that the objects hold, and those that the program's code behind them can name."""
        found, self._found = self._found, None  # if an interrupt comes in between, everything is searched again
        if found is None or self._has_imported() or self._has_changed():
            found = self._search()
        self._found = found
        return found

    def _search(self) -> list[Any]:
        self._places, self._bound, self._watched, self._missing = [], [], set(), set()
        self._modules = len(sys.modules)
        root = (None, ("root", "objects")), self._objects
        walked = walk([root], passed=_is_not_own, reads=_is_read, met=self._note, most=_MOST_BEHIND_CODE)
        return distinct(generator for _, generator in walked)

    def _has_imported(self) -> bool:
        """Whether modules that the code may import have been imported since."""
        before, self._modules = self._modules, len(sys.modules)
        return before != self._modules and not self._missing.isdisjoint(list(sys.modules))

    def _has_changed(self) -> bool:
        """Whether a new binding somewhere can lead to a generator; bindings that can't are noted."""
        before, now = self._bound, gc.get_referents(*self._places)
        if len(now) != len(before):
            return True
        if not all(map(operator.is_, now, before)):
            pairs = zip(now, before, strict=True)
            if not all(one is other or {type(one), type(other)} <= _LEAD_NOWHERE for one, other in pairs):
                return True
            self._bound = now
        return False

    def _note(self, node: Node, obj: Any) -> None:
        if is_a(obj, types.FunctionType) and _is_read(obj):
            self._missing.update(name for name in modules_of(obj) if name not in sys.modules)
            for space, _ in spaces_of(obj):
                if space is obj.__globals__ or is_own_namespace(space):
                    self._watch([space])
        if is_a(obj, type):
            if not _is_not_own(obj):
                self._watch(gc.get_referents(vars(obj)))  # its dict
        elif None in path_of(node):
            self._watch(_places_in(obj))

    def _watch(self, places: list[Any]) -> None:
        """Watches all of them, or none if they are too many."""
        places = [place for place in places if id(place) not in self._watched]
        bound = gc.get_referents(*(part for place in places for part in (place, _BETWEEN)))
        if len(self._bound) + len(bound) <= _MOST_WATCHED:
            self._watched.update(map(id, places))
            self._places += [part for place in places for part in (place, _BETWEEN)]
            self._bound += bound


def _places_in(obj: Any) -> list[Any]:
    """The parts of an object where something else may be bound."""
    if is_a(obj, (types.ModuleType, torch.Tensor, np.ndarray, *KINDS)):
        return []
    if (containers := plain_containers(obj)) is not None:
        return [container for container in containers if type(container) not in (tuple, frozenset)]
    attributes, slots = attributes_in(obj), slots_of(type(obj))
    places = [] if attributes is None else [attributes]
    if is_a(obj, types.FunctionType):
        return [*places, obj, *([obj.__kwdefaults__] if obj.__kwdefaults__ else [])]
    is_mutable = is_a(obj, (dict, list, set, collections.deque)) or slots or is_opaque(obj, attributes, slots)
    return [obj, *places] if is_mutable else places


def _is_read(function: types.FunctionType) -> bool:
    return is_own_name(function.__globals__.get("__name__"))


def _is_not_own(definition: Any) -> bool:
    return is_a(definition, type) and not is_own_name(definition.__module__)
