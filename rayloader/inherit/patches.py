"""What the program's code has bound anew in installed modules, and in their classes.

Promise: no code of the user's runs, and no library's own changes count, such as caches and modules that it imports
when it needs them.

NOTE [patches]
A process has 160,000 names in its modules and classes. To look at all of them after each epoch would take tens of
milliseconds, and the counts of references that this writes would make 40 MB of memory, shared with the fork server, the
worker's own. But the program's code can bind only names that occur in it: as names, or as strings for `setattr` and
`mock.patch`. So each function of the program's is followed from its globals through modules and classes as far as its
own names lead, and what these names are bound to is noted once the replica has arrived. What modules of the program's
have changed by then, as they were imported, belongs to the program: the trainer has it too.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayloader.namespaces import attributes_of, is_a, is_own_name, is_own_namespace, namespace_of

_MISSING = object()
_CONSTANTS = {bool, int, float, str, bytes, type(None)}


@dataclass(slots=True)
class _Space:
    """The names of an installed module, or of a class of such a module."""

    owner: Any
    bound: Mapping[str, Any]
    size: int  # the number of names when they were noted
    noted: dict[str, Any]  # what those that the program's code contains were bound to


class Patches:
    """The names that the program's code might bind anew, of a process in which the collector's objects are frozen."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Space] = {}  # by identity of the owner

    def note(self, *, anew: bool) -> None:
        """Notes what the names of functions that have come since `gc.freeze` are bound to, if that is not known yet.

        Args:
            anew: modules were imported: what the known names are bound to by now, counts.
        """
        for space in self._spaces.values() if anew else ():
            space.size = len(space.bound)
            space.noted = {name: space.bound[name] for name in space.noted if name in space.bound}
        functions = _functions(gc.get_objects())
        for function in functions:
            if is_own_namespace(function.__globals__):
                self._follow(set(_names(function.__code__)), function.__globals__)

    def _follow(self, names: set[str], scope: dict[str, Any]) -> None:
        reached = [space[name] for space in (scope, sys.modules) for name in names if name in space]
        seen: set[int] = set()
        for owner in reached:
            bound = _names_in(owner)
            if bound is None or id(owner) in seen or owner is sys:  # what counts of `sys` is in left_behind.py
                continue
            seen.add(id(owner))
            known = {name: bound[name] for name in names & bound.keys()}
            reached += known.values()
            if not is_programs(owner):
                space = self._spaces.setdefault(id(owner), _Space(owner, bound, len(bound), {}))
                space.noted = known | space.noted

    def undo(self) -> str:
        """Puts back constants, which are known by their capital letters.

        Returns:
            The name of something else that is bound anew; empty if there is nothing.
        """
        for space in self._spaces.values():
            for name, value in space.noted.items():
                now = space.bound.get(name, _MISSING)
                if now is value:
                    continue
                if not (name.isupper() and type(now) in _CONSTANTS and type(value) in _CONSTANTS):
                    return f"{_name_of(space.owner)}.{name}"
                setattr(space.owner, name, value)
            if len(space.bound) > space.size:
                for name, value in itertools.islice(list(space.bound.items()), space.size, None):
                    if is_programs(value):
                        return f"{_name_of(space.owner)}.{name}"
        return ""


def _functions(objects: list[Any]) -> list[types.FunctionType]:
    """Those among these objects; entirely in C, because there may be millions."""
    return list(
        itertools.compress(objects, map(operator.is_, map(type, objects), itertools.repeat(types.FunctionType)))
    )


def _names(code: types.CodeType) -> Iterator[str]:
    """The names in a function's code and in functions within it; strings that are names, or paths of names."""
    yield from code.co_names
    for constant in code.co_consts:
        if is_a(constant, types.CodeType):
            yield from _names(constant)
        elif type(constant) is str and len(constant) < 100:
            yield from filter(str.isidentifier, constant.split("."))


def _names_in(owner: Any) -> Mapping[str, Any] | None:
    if is_a(owner, types.ModuleType):
        return namespace_of(owner)
    return attributes_of(owner) if is_a(owner, type) else None


def is_programs(value: Any) -> bool:
    """Whether the program has written a module, function or class, or the class of any other object.

    A class whose module is not imported here has been pickled by value.
    """
    if is_a(value, types.ModuleType):
        return is_own_namespace(namespace_of(value))
    if is_a(value, types.FunctionType):
        return is_own_namespace(value.__globals__)
    kind = value if is_a(value, type) else type(value)
    return kind.__module__ == "__main__" or kind.__module__ not in sys.modules or is_own_name(kind.__module__)


def _name_of(owner: Any) -> str:
    return owner.__name__ if is_a(owner, types.ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
