"""Random generators that user code holds: found in an object, in a replica, and where its code creates them later.

Promise: `find_generators` lists the generators that an object holds, however many and however deep. A worker's
`Generators` also knows those that were created after its replica was opened, by the paths that lead to them, and
restores their states in another process that has the same replica.

NOTE [Given and later]. The pickler of a replica meets each generator in it, and `reduce_generator` makes the
worker's unpickler record each one: these are *given*, in an order that is the same in every worker, and need no search.
The *later* ones (created by `worker_init_fn`, by `__setstate__`, at the first or at the hundredth sample) are found by
a walk from the replica, and from the globals of the program's own modules and the attributes of their classes. Each
epoch begins with one, so it is a short one: it enters no classes, functions and modules of installed packages; of a
container with more than `LONG` items it looks at the items but not into them; and it ends after `MOST` objects. In
another process a later one is looked up by its path and given its state; if it does not exist yet it is created. A
generator that is not found is not followed: rebuilt batches are compared with the delivered ones (digest.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from rayloader.errors import ReplayError
from rayloader.namespaces import attributes_of, is_a
from rayloader.own_modules import is_own_name, own_modules
from rayloader.random.generator_kinds import (
    KINDS,
    distinct,
    engine,
    engines,
    generator_types,
    global_generators,
    kind_of,
    make_generator,
    set_state,
    state_of,
    suits,
)
from rayloader.random.module_generators import LONG, MOST, Placed
from rayloader.random.object_paths import ATOMS, Node, Path, follow, in_words, put, walk
from rayloader.transport.pickler import Special

_WITHOUT = {*ATOMS, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property}
_WITHOUT |= {functools.cached_property, types.MemberDescriptorType, types.GetSetDescriptorType}


def find_generators(obj: Any) -> list[Any]:
    """The random generators that an object holds, in an order that depends only on the object.

    Of classes that the program has not written, only attributes of themselves and of their bases are searched.
    """
    kinds: dict[int, type] = {}
    walked = walk(
        [((None, ("root", "object")), obj)],
        passed=lambda definition: is_a(definition, type) and _is_foreign(definition),
        met=lambda _, one: kinds.setdefault(id(type(one)), type(one)),
    )
    found = [generator for _, generator in walked]
    named = generator_types()
    values = (value for kind in kinds.values() for base in kind.__mro__ for value in list(vars(base).values()))
    return distinct([*found, *(value for value in values if type(value) in named)])


def _is_foreign(definition: Any) -> bool:
    """Whether a class or a function belongs to an installed package."""
    return not is_own_name(definition.__module__)


# ---- given ones: noted while a replica is unpickled

_noted: list[Any] | None = None


@contextlib.contextmanager
def noting() -> Iterator[list[Any]]:
    """Yields a list that collects the generators unpickled meanwhile, in the process's one thread that unpickles."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def reduce_generator(obj: Any, reduced: Callable[[Any], Any]) -> Any:
    """How a replica's pickler reduces a generator: as usual (`reduced`), and recorded when it is unpickled.

    The global ones are pickled by name: a reference to one of them in the driver becomes one to the worker's, as
    after a fork.
    """
    for one, owner, name in global_generators():
        if obj is one:
            return getattr, (owner, name)
    if isinstance(obj, random.SystemRandom) and type(obj).__reduce__ is random.Random.__reduce__:
        return _without_state, (type(obj), vars(obj))
    usual = reduced(obj)
    if not isinstance(usual, tuple):
        return usual
    make, arguments, *rest = usual
    return _note, (make, *arguments), *rest


# For the pickler of a replica.
RECORDED = Special(KINDS, reduce_generator)


def _without_state(kind: Any, attributes: dict[str, Any]) -> Any:
    generator = kind.__new__(kind)
    vars(generator).update(attributes)
    return generator


def _note(make: Callable[..., Any], *arguments: Any) -> Any:
    generator = make(*arguments)
    if _noted is not None and isinstance(generator, KINDS):
        _noted.append(generator)
    return generator


# ---- later ones


class Later(NamedTuple):
    """The state of a generator that was created after the replica was opened."""

    paths: tuple[Path, ...]
    kind: str  # what to create if it is missing; empty: unknown
    state: Any
    lasting: bool  # it was not replaced since the last look: its next draws depend on its state


class Generators:
    """The generators of one worker.

    Args:
        replica: the objects of the replica, by name.
        noted: the generators that were recorded when it was unpickled.
        before: those that existed in the process before: those that other loaders have left in modules are not
            followed.
        placed: those of the program's modules.
        alone: whether no other worker of this process follows these.

    Attributes:
        given: those of the replica.
        settled: whether the last look found no new ones.
    """

    def __init__(
        self,
        replica: dict[str, Any],
        noted: list[Any],
        before: Iterable[Any] = (),
        placed: Placed | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._placed = placed or Placed()
        followed = self._placed.generators if alone else {}
        self._replica = replica
        self.given = distinct(noted)
        self.settled = True
        self._others = [*noted, *before]  # keeps their identities
        self._known = engines(self._others) - engines(followed.values())
        self._later: list[tuple[tuple[Path, ...], Any, bool]] = [(*one, True) for one in followed.items()]
        self._waiting: list[Later] = []  # for modules that are not imported yet
        # Those that modules created while the replica was opened: in another process they create them again.
        self._at_start: dict[int, tuple[Any, bytes]] = {}
        for one in self._reached().values() if replica else []:
            if id(engine(one)) not in self._known:
                with contextlib.suppress(Exception):  # a class of the user's
                    self._at_start[id(one)] = one, pickle.dumps(state_of(one))
        _in_this_process.add(self)

    def look(self, *, new_last: bool = True) -> tuple[Later, ...]:
        """The current later ones; `new_last`: those that are seen for the first time count as lasting."""
        followed = []
        for paths, before, _ in self._later:
            now = self._at(paths[0])
            if is_a(now, KINDS) and id(engine(now)) not in self._known:
                followed.append((paths, now, now is before))
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not any(map(_is_there, one.paths)):
                self._waiting.append(one)
            elif is_a(generator := self._at((paths := _those_there_first(one.paths))[0]), KINDS):
                followed.append((paths, generator, one.lasting))
        seen = engines(generator for _, generator, _ in followed)
        others = set().union(*(worker._known for worker in _in_this_process))  # whose replicas are in this process too
        known = len(followed)
        followed += [
            (paths, generator, new_last)
            for paths, generator in self._reached().items()
            if id(engine(generator)) not in others | seen
        ]
        self.settled = len(followed) == known
        self._later = followed
        found = []
        for paths, generator, lasting in followed:
            state = state_of(generator)
            # Otherwise another process has it in the driver's state, or as its module has created it.
            if not self._placed.is_untouched(generator, state) and not self._is_as_made(paths, generator, state):
                found.append(Later(paths, kind_of(generator), state, lasting))
        return (*found, *self._waiting)

    def _is_as_made(self, paths: tuple[Path, ...], generator: Any, state: Any) -> bool:
        """Whether one that no path leads to in another process has not been drawn from since the start."""
        made = self._at_start.get(id(generator))
        return all(None in path for path in paths) and made is not None and made[1] == pickle.dumps(state)

    def put_back(self, later: tuple[Later, ...]) -> None:
        """Restores the states that the later ones had in another process, and goes on following the others.

        Raises:
            ReplayError: one does not exist, and can't be created.
        """
        restored = {path for one in later for path in one.paths}
        # Nobody had drawn from these there: a search from here may not reach them, as those in nested classes.
        self._later = [one for one in self._later if restored.isdisjoint(one[0])]
        self._waiting = []
        given = engines(self.given)
        for one in later:
            if not any(map(_is_there, one.paths)):
                self._placed.wait(one.paths, one.kind, one.state)
                self._waiting.append(one)
                continue
            paths, kind, state, lasting = one._replace(paths=_those_there_first(one.paths))
            generator = self._at(paths[0])
            fits = is_a(generator, KINDS) and id(engine(generator)) not in self._known
            if not fits and is_a(generator, KINDS) and paths[0][0] is not None and paths[0][0][0] == "module":
                # A worker that this process hosted before has imported the module: workers share its contents.
                fits = id(engine(generator)) not in given
                self._known -= {id(engine(generator))} - given
            try:
                if not fits or kind_of(generator) != kind or not suits(generator, state):
                    generator = make_generator(kind, state)
                    for path in paths:
                        put(self._at(path[:-1]), path[-1], generator)
                set_state(generator, state)
            except Exception as error:
                if not lasting:
                    continue  # created again for each sample: nothing depends on its state
                raise ReplayError(
                    f"the random generator at {in_words(paths[0])} was made while loading, and can't be made again in "
                    "another process; make it in __init__ or in worker_init_fn, or give the dataset state_dict() and "
                    "load_state_dict()"
                ) from error
            self._later.append((paths, generator, lasting))

    def _reached(self) -> dict[tuple[Path, ...], Any]:
        """The generators that are reached from the replica and from modules, by the paths to each."""
        reached: dict[int, tuple[list[Path], Any]] = {}
        roots: list[tuple[Node, Any]] = [((None, ("root", name)), obj) for name, obj in self._replica.items()]
        for path, generator in itertools.chain(_short_walk(roots), in_modules()):
            reached.setdefault(id(generator), ([], generator))[0].append(path)
        followed = engines(distinct(generator for _, generator in reached.values()))
        return {tuple(paths): one for paths, one in reached.values() if id(engine(one)) in followed}

    def _at(self, path: Path) -> Any:
        return follow(path, self._replica)


def in_modules() -> Iterator[tuple[Path, Any]]:
    """The generators that are reached from globals of the program's modules and from attributes of their classes."""
    roots: list[tuple[Node, Any]] = []
    classes: dict[int, tuple[Node, type]] = {}
    for module_name, attributes in own_modules():
        module: Node = (None, ("module", module_name))
        for name, value in list(attributes.items()):
            if is_a(value, type):
                if is_own_name(value.__module__):
                    classes.setdefault(id(value), ((module, ("attribute", name)), value))
            elif not name.startswith("__") and type(value) not in _WITHOUT:
                roots.append(((module, ("attribute", name)), value))
    for node, kind in classes.values():
        held = [(name, value) for name, value in list(attributes_of(kind).items()) if type(value) not in _WITHOUT]
        roots += [((node, ("attribute", name)), value) for name, value in held if not name.startswith("__")]
    return _short_walk(roots)


def _short_walk(roots: list[tuple[Node, Any]]) -> Iterator[tuple[Path, Any]]:
    return walk(roots, passed=_is_foreign, most=MOST, longest=LONG)


def _is_there(path: Path) -> bool:
    """Whether the module that a path starts from is imported, if it starts from one."""
    return path[0] is None or path[0][0] != "module" or path[0][1] in sys.modules


def _those_there_first(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(sorted(paths, key=_is_there, reverse=True))


_in_this_process: weakref.WeakSet[Generators] = weakref.WeakSet()
