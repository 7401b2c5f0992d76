"""Random generators that the program's code names without holding them: `RNG.random()`, `settings.RNG.random()`.

Promise: `NamedGenerators.look` gives those behind some objects as they are now, in the order in which a search in
another process finds them. It is for states without workers; workers have `generators.Generators`.

NOTE [After a change]. A search goes through all that the code names, whole datasets too, and a state may be taken
before each batch. So it notes the *places* on its way, which are objects where something else may be bound later, with
what is bound there. Where a later look finds something else, it walks only from the values that were bound there since,
and from those that are gone. If these lead to no generator, the others would still be found in the same order, so the
place is noted as it is now, with new places behind the new values; else all is searched again. Such a walk stops at a
place to which a shorter way leads already, for that one decides the order.
"""

from __future__ import annotations

import collections
import gc
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rayloader.state.generator_kinds import KINDS, distinct, is_a
from rayloader.state.module_globals import is_own_name, is_own_namespace
from rayloader.state.object_paths import (
    ATOMS,
    Node,
    Step,
    attributes_in,
    is_opaque,
    is_plain_all_through,
    modules_of,
    slots_of,
    spaces_of,
    walk,
)

_MOST_BEHIND_CODE = 100_000  # objects: functions may name whole datasets
_MOST_WATCHED = 10_000  # values: a state may be taken before each batch
_BETWEEN = (object(),)  # two parts: what goes from one to the next shows


class NamedGenerators:
    """Those behind some objects.

    Args:
        objects: which hold or are functions.
    """

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._found: list[Any] | None = None
        self._places = _Places()
        self._modules = 0  # that were imported at the last look

    def look(self) -> list[Any]:
        """Those that the program's code behind the objects can name, and that only the collector finds in them."""
        if self._found is None or self._has_imported() or self._places.lead_elsewhere():
            self._places, self._modules = _Places(), len(sys.modules)
            walked = _Walk(self._places, -1).generators((("root", "objects"), self._objects))
            self._found = distinct(walked)
            self._places.note()
        return self._found

    def _has_imported(self) -> bool:
        """Whether modules that the code may import have been imported since."""
        before, self._modules = self._modules, len(sys.modules)
        return before != self._modules and not self._places.missing.isdisjoint(list(sys.modules))


class _Place:
    """Where something else may be bound later.

    Attributes:
        obj: the object.
        parts: of it, whose referents are bound there; none if there are too many.
        bound: these referents, as they were noted.
        names: of a namespace, in which code chooses by name, likewise.
        depth: of the shortest way.
        is_passed: whether a longer way that leads to it need not be followed.
        met_with: the places that were noted by the same walk.
        is_shared: whether another walk has come by.
        behind: by identity of a value that was bound since the search: the places that were noted behind it.
    """

    __slots__ = ("behind", "bound", "depth", "is_passed", "is_shared", "met_with", "names", "obj", "parts")

    def __init__(self, obj: Any, parts: list[Any], depth: int, met_with: list[_Place], *, is_passed: bool) -> None:
        self.obj, self.parts, self.depth, self.met_with, self.is_passed = obj, parts, depth, met_with, is_passed
        self.bound = gc.get_referents(*parts)
        self.names = None if is_passed else dict(obj)
        self.behind: dict[int, list[_Place]] = {}
        self.is_shared = False

    def leads_elsewhere(self, places: _Places) -> bool:
        """Whether other values than before lead to generators, or may do so; others are noted."""
        before, now = self.bound, gc.get_referents(*self.parts)
        if _are_same(before, now):
            return False
        self.bound = now
        places.values += len(now) - len(before)
        depth = self.depth if is_a(self.obj, types.FunctionType) else self.depth + 1  # its defaults are in a tuple
        if self.names is None:
            gone, new = _differences(before, now)
        else:
            names, self.names = self.names, dict(self.obj)
            gone, new = _differences_by_name(names, self.names)
        for value in gone:
            if (behind := self.behind.pop(id(value), None)) is not None:
                if any(place.is_forgotten_in_vain(places) for place in behind):
                    return True
            elif _leads_on(value, _Walk(places, depth, notes=False)):
                return True
        for value in new:
            walk_on = _Walk(places, depth)
            if id(value) in self.behind or _leads_on(value, walk_on):
                return True
            self.behind[id(value)] = walk_on.noted
        return places.values > _MOST_WATCHED and self._is_left_in_vain(places)

    def _is_left_in_vain(self, places: _Places) -> bool:
        """It has grown too large. Returns as `is_forgotten_in_vain` does."""
        places.values -= len(self.bound) + len(self.parts)
        self.parts, self.bound, self.names, behind, self.behind = [], [], None, self.behind, {}
        return any(place.is_forgotten_in_vain(places) for each in behind.values() for place in each)

    def is_forgotten_in_vain(self, places: _Places) -> bool:
        """The value that led here is gone. Returns whether another one may lead here too."""
        if self.is_shared:
            return True
        if places.by_id.pop(id(self.obj), None) is not None:
            places.values -= len(self.bound) + len(self.parts)
        return any(inner.is_forgotten_in_vain(places) for behind in self.behind.values() for inner in behind)


class _Places:
    """All that were noted; see NOTE [After a change].

    Attributes:
        by_id: by identity of the object.
        values: how many there are in these.
        missing: modules that the code may import and that were not there.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, _Place] = {}
        self.values = 0
        self.missing: set[str] = set()
        self._parts: list[Any] = []
        self._bound: list[Any] = []

    def note(self) -> None:
        """What is bound now was bound before."""
        self._parts = [part for place in self.by_id.values() for part in (*place.parts, _BETWEEN)]
        self._bound = gc.get_referents(*self._parts)

    def lead_elsewhere(self) -> bool:
        """Whether generators may be reached by other ways than before; all in C where nothing has changed."""
        if _are_same(self._bound, gc.get_referents(*self._parts)):
            return False
        for key, place in list(self.by_id.items()):
            if self.by_id.get(key) is place and place.leads_elsewhere(self):
                return True
        self.note()
        return False

    def add(self, obj: Any, parts: list[Any], depth: int, noted: list[_Place], *, is_passed: bool) -> bool:
        """Returns whether there is room."""
        place = _Place(obj, parts, depth, noted, is_passed=is_passed)
        has_room = self.values + len(place.bound) + len(parts) <= _MOST_WATCHED
        if has_room:
            self.values += len(place.bound) + len(parts)
        else:
            place.parts, place.bound, place.names = [], [], None
        self.by_id[id(obj)] = place
        noted.append(place)
        return has_room


class _Walk:
    """One walk, which notes the places on its way.

    Args:
        places: that are noted.
        depth: of the value where it begins; negative: of the objects, from which a search begins.
        notes: whether it notes any.

    Attributes:
        noted: those that it has noted.
    """

    def __init__(self, places: _Places, depth: int, *, notes: bool = True) -> None:
        self._places, self._depth, self._notes = places, depth, notes
        # Of nodes by identity: their depths, and whether there are places. What the objects hold without the help of
        # code is searched for each state in any case.
        self._nodes: dict[int, tuple[int, bool]] = {}
        self.noted: list[_Place] = []

    def generators(self, root: tuple[Step, Any]) -> Iterator[Any]:
        """Those that are reached with the help of code or of the collector."""
        roots = [((None, root[0]), root[1])]
        walked = walk(
            roots, passed=_is_not_own, reads=_is_read, met=self._is_passed, plain=True, most=_MOST_BEHIND_CODE
        )
        return (generator for path, generator in walked if None in path)

    def _is_passed(self, node: Node, obj: Any) -> bool:
        assert node is not None
        parent, step = node
        above, has_places = self._nodes.get(id(parent), (self._depth - 1, self._depth >= 0))
        depth, has_places = above + 1, has_places or step is None
        if not has_places and is_plain_all_through(obj):
            return True
        known = self._places.by_id.get(id(obj))
        if known is not None:
            known.is_shared |= self._notes and known.met_with is not self.noted
            if known.is_passed and known.depth < depth:
                return True
        elif self._notes:
            has_places = self._note(obj, depth, has_places)
        self._nodes[id(node)] = depth, has_places
        return False

    def _note(self, obj: Any, depth: int, has_places: bool) -> bool:
        """Returns whether there are places behind it."""
        if is_a(obj, types.FunctionType):
            if _is_read(obj):
                self._places.missing.update(name for name in modules_of(obj) if name not in sys.modules)
                for space, _ in spaces_of(obj):
                    if space is obj.__globals__ or is_own_namespace(space):
                        self._note_space(space, depth)
        elif is_a(obj, type):
            if _is_not_own(obj):
                return has_places
        elif not has_places:
            return False
        parts = _parts_of(obj)
        return not parts or self._places.add(obj, parts, depth, self.noted, is_passed=True)

    def _note_space(self, space: dict[str, Any], depth: int) -> None:
        known = self._places.by_id.get(id(space))
        if known is None:
            self._places.add(space, [space], depth, self.noted, is_passed=False)
        else:
            known.is_shared |= known.met_with is not self.noted


def _parts_of(obj: Any) -> list[Any]:
    """What an object is made of where something else may be bound, so that the collector tells what is."""
    if is_a(obj, type):
        return gc.get_referents(vars(obj))  # its dict
    if is_a(obj, (types.ModuleType, torch.Tensor, np.ndarray, *KINDS)):
        return []
    attributes, slots = attributes_in(obj), slots_of(type(obj))
    parts = [] if attributes is None else [attributes]
    if is_a(obj, types.FunctionType):
        named = [obj.__kwdefaults__] if obj.__kwdefaults__ else []
        return [*parts, *named, *([obj] if named or obj.__defaults__ else [])]
    is_mutable = is_a(obj, (dict, list, set, collections.deque)) or slots or is_opaque(obj, attributes, slots)
    return [obj, *parts] if is_mutable else parts


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _differences(before: list[Any], now: list[Any]) -> tuple[list[Any], list[Any]]:
    """The values that are gone, and the new ones; all of them where others have changed places."""
    old, new = ({id(value): value for value in values if _may_lead_on(value)} for values in (before, now))
    if [key for key in old if key in new] != [key for key in new if key in old]:
        return list(old.values()), list(new.values())
    return [old[key] for key in old if key not in new], [new[key] for key in new if key not in old]


def _differences_by_name(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The same of a namespace."""
    return _not_in(now, before), _not_in(before, now)


def _not_in(other: dict[str, Any], one: dict[str, Any]) -> list[Any]:
    values = (value for name, value in one.items() if other.get(name) is not value and _may_lead_on(value))
    return list({id(value): value for value in values}.values())


def _may_lead_on(value: Any) -> bool:
    return type(value) not in ATOMS or is_a(value, (type, types.ModuleType))


def _leads_on(value: Any, walk_on: _Walk) -> bool:
    return is_a(value, types.ModuleType) or next(walk_on.generators((None, value)), None) is not None


def _is_read(function: types.FunctionType) -> bool:
    return is_own_name(function.__globals__.get("__name__"))


def _is_not_own(kind: type) -> bool:
    return not is_own_name(kind.__module__)
