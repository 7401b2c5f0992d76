"""The random generators of a worker, restored in another process where they were: in the replica and in modules.

Promise: a worker's `Generators` restores the states that those of the same worker had in another process: at all the
places where each was, and as one object.

NOTE [Given and later]. The pickler of a replica meets each generator in it, and `reduce_generator` makes the
worker's unpickler record each one: these are *given*, first those that a search finds, in its order, which is the same
in every worker. A fork was not unpickled, and has only what the search finds.
The *later* ones (created by `worker_init_fn`, by `__setstate__`, at the first or at the hundredth sample), and those of
the program's modules that were drawn from, are found by `search`. In another process they are looked up by their paths
and given their states; one that does not exist yet is created. Where that fails, batches that are rebuilt differ.

NOTE [Named by a state]. A state may come from a file that anybody has written. Its paths lead only where a search
looks. Its modules must be the program's own and imported already, or workers of this program had generators in them
(`unknown_modules`): so a worker may import what it is told to.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rayloader.errors import ReplayError
from rayloader.namespaces import is_a, is_own_name, own_modules
from rayloader.random.generator_kinds import (
    KINDS,
    distinct,
    engine,
    global_generators,
    kind_of,
    make_generator,
    set_state,
    state_of,
    suits,
)
from rayloader.random.search import Found, Path, follow, in_words, put, search
from rayloader.transport.pickler import Special

_collected: list[Any] | None = None


@contextlib.contextmanager
def collecting() -> Iterator[list[Any]]:
    """Yields a list that collects the generators unpickled meanwhile, in the process's one thread that unpickles."""
    global _collected
    _collected = []
    try:
        yield _collected
    finally:
        _collected = None


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
    return _collect, (make, *arguments), *rest


# For the pickler of a replica.
RECORDED = Special(KINDS, reduce_generator)


def _without_state(kind: Any, attributes: dict[str, Any]) -> Any:
    generator = kind.__new__(kind)
    vars(generator).update(attributes)
    return generator


def _collect(make: Callable[..., Any], *arguments: Any) -> Any:
    generator = make(*arguments)
    if _collected is not None and isinstance(generator, KINDS):
        _collected.append(generator)
    return generator


class Located(NamedTuple):
    """A generator of another process.

    Attributes:
        paths: all paths that lead to it.
        kind: of which to create one where it is missing; empty: only the program can.
        state: its state.
        lasts: whether its next draws may depend on its state; False of one in the place of another.
    """

    paths: tuple[Path, ...]
    kind: str
    state: Any
    lasts: bool = False

    @property
    def modules(self) -> set[str]:
        """The names of those where its paths begin."""
        return {name for (kind, name), *_ in self.paths if kind == "module"}

    def is_like(self, generator: Any) -> bool:
        """Whether it can be that generator."""
        return is_a(generator, KINDS) and kind_of(generator) == self.kind and suits(generator, self.state)


def located(found: Iterable[Found]) -> tuple[Located, ...]:
    """Generators with their states."""
    return tuple(Located(paths, kind_of(generator), state_of(generator)) for generator, paths in found)


# The names of modules in which workers of this program had generators: see NOTE [Named by a state].
_known: set[str] = set()


def note_modules(those: Iterable[Located]) -> None:
    """Workers of this program had these generators."""
    for one in those:
        _known.update(one.modules)


def unknown_modules(those: Iterable[Located]) -> list[str]:
    """Modules of generators that are not known to be the program's; see NOTE [Named by a state]."""
    return sorted({name for one in those for name in one.modules - _known if not is_own_name(name)})


def import_modules(those: Iterable[Located]) -> None:
    """Imports the modules of generators, which the other process had imported; see NOTE [Named by a state]."""
    for module in {name for one in those for name in one.modules} - sys.modules.keys():
        with contextlib.suppress(Exception):  # the program may have to do something else first
            importlib.import_module(module)


def place(one: Located, objects: Mapping[str, Any], avoid: Collection[int] = ()) -> tuple[Any, list[Path]]:
    """Gives the generator at its paths its state, and creates it where there is none.

    Args:
        one: the generator.
        objects: from which paths start, by name.
        avoid: identities of the engines of those that are others.

    Returns:
        The generator, and the paths where it could not be put.
    """
    there = [follow(path, objects) for path in one.paths]
    fitting = [obj for obj in there if one.is_like(obj) and id(engine(obj)) not in avoid]
    try:
        generator = fitting[0] if fitting else make_generator(one.kind, one.state)
        set_state(generator, one.state)
    except Exception:  # a class of the user's
        return None, list(one.paths)
    return generator, bind(generator, one.paths, objects)


def bind(generator: Any, paths: Iterable[Path], objects: Mapping[str, Any]) -> list[Path]:
    """Makes paths lead to a generator; returns those that cannot."""
    failed = []
    for path in paths:
        try:
            if follow(path, objects) is not generator:
                put(path, objects, generator)
        except Exception:  # depends on the object that is there instead
            failed.append(path)
    return failed


class Generators:
    """The generators of one worker.

    Args:
        replica: the objects of the replica, by name.
        unpickled: the generators that were collected when it was unpickled; None: it is a fork's, and was not.
        modules: gives the names and contents of those that are searched; None: of the program's own.

    Attributes:
        given: those of the replica.
        found_new: whether the last look has found one where there was none.
    """

    def __init__(
        self,
        replica: dict[str, Any],
        unpickled: list[Any] | None,
        modules: Callable[[], Iterable[tuple[str, Mapping[str, Any]]]] | None = None,
    ) -> None:
        self._replica = replica
        self._modules = modules or functools.partial(own_modules, main=unpickled is None)
        found = search(replica, self._modules())
        of_replica = [one.generator for one in found if not _is_global(one)]
        if unpickled is None:
            unpickled = of_replica
        self._unpickled = unpickled  # keeps their identities
        self._known = {id(engine(generator)) for generator in unpickled}
        # In an order that depends on the replica alone, and not on how this process has got it.
        self.given = distinct([*(one for one in of_replica if id(engine(one)) in self._known), *unpickled])
        self._at: dict[Path, Any] = {}  # those of the last look
        self.found_new = False
        # In another process those of modules are like that too: as imports create them, or as a fork inherits them.
        of_modules = [one for one in found if _is_global(one) and id(engine(one.generator)) not in self._known]
        self._at_start = {id(one.generator): (one.generator, _picture(one.generator)) for one in of_modules}
        self._put_back: set[int] = set()  # of modules, and in another state than at the start

    def _others(self) -> list[Found]:
        """Those that are not given."""
        found = search(self._replica, self._modules())
        return [one for one in found if id(engine(one.generator)) not in self._known]

    def look(self) -> tuple[Located, ...]:
        """The current later ones, and those of modules that were drawn from since the start."""
        found = [one for one in self._others() if not (_is_global(one) and self._is_as_at_start(one))]
        before, self._at = self._at, {path: one.generator for one in found for path in one.paths}
        self.found_new = not self._at.keys() <= before.keys()
        renewed = {path for path, generator in self._at.items() if before.get(path, generator) is not generator}
        places = located(found)
        return tuple(one._replace(lasts=renewed.isdisjoint(one.paths)) for one in places)

    def _is_as_at_start(self, found: Found) -> bool:
        if (number := id(found.generator)) in self._put_back:
            return False
        _, picture = self._at_start.get(number, (None, None))
        return picture is not None and picture == _picture(found.generator)

    def of_modules(self) -> list[tuple[Any, Any]]:
        """The generators that modules had at the start, and their states: all workers of a process have the same."""
        return [(generator, state_of(generator)) for generator, _ in self._at_start.values()]

    def rewind_modules(self) -> None:
        """Sets those to their states at the start, for another worker of this process."""
        for generator, picture in self._at_start.values():
            set_state(generator, pickle.loads(picture))

    def put_back(self, later: tuple[Located, ...]) -> None:
        """Restores the states that the later ones had in another process.

        Raises:
            ReplayError: one does not exist, and can't be created.
        """
        import_modules(later)
        given = {id(engine(generator)) for generator in self.given}
        self._at = {}
        for one in later:
            generator, failed = place(one, self._replica, given)
            self._put_back.add(id(generator))
            self._at.update(dict.fromkeys(one.paths, generator))
            # Otherwise it may be created again for each sample, so that nothing depends on its state.
            if one.lasts and len(failed) == len(one.paths):
                raise ReplayError(
                    f"the random generator at {in_words(failed[0])} was made while loading, and can't be made again in "
                    "another process; make it in __init__ or in worker_init_fn, or give the dataset state_dict() and "
                    "load_state_dict()"
                )


def _is_global(found: Found) -> bool:
    """Whether only modules hold it, and nothing of the replica."""
    return all(path[0][0] == "module" for path in found.paths)


def _picture(generator: Any) -> bytes:
    """Its state, to be compared: protocol 5 would also tell which arrays are writable."""
    return pickle.dumps(state_of(generator), 4)
