"""The random generators of a worker, and how the pickler of its replica tells of them.

Promise: a worker's `Generators` restores the states that those of the same worker had in another process.

NOTE [Given and later]. The pickler of a replica meets each generator in it, and `reduce_generator` makes the
worker's unpickler record each one: these are *given*, in an order that is the same in every worker, and need no search.
The *later* ones (created by `worker_init_fn`, by `__setstate__`, at the first or at the hundredth sample), and those of
the program's modules that were drawn from, are found by `search`. In another process they are looked up by their paths
and given their states; one that does not exist yet is created.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

from rayloader.errors import ReplayError
from rayloader.namespaces import own_modules
from rayloader.random.generator_kinds import KINDS, distinct, engine, global_generators, state_of
from rayloader.random.placing import Located, import_modules, located, place
from rayloader.random.search import Found, in_words, search
from rayloader.transport.pickler import Special

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


class Generators:
    """The generators of one worker.

    Args:
        replica: the objects of the replica, by name.
        noted: the generators that were recorded when it was unpickled.

    Attributes:
        given: those of the replica.
    """

    def __init__(self, replica: dict[str, Any], noted: list[Any]) -> None:
        self.given = distinct(noted)
        self._replica = replica
        self._noted = noted  # keeps their identities
        self._known = {id(engine(generator)) for generator in noted}
        self._last: list[Any] = []  # those of the last look
        # In another process those of modules are like that too: as the driver has them, or as imports create them.
        of_modules = [one for one in self._others() if _is_global(one)]
        self._at_start = {id(one.generator): (one.generator, _picture(one)) for one in of_modules}

    def _others(self) -> list[Found]:
        """Those that are not given."""
        return [one for one in search(self._replica, own_modules()) if id(engine(one.generator)) not in self._known]

    def look(self) -> tuple[Located, ...]:
        """The current later ones, and those of modules that were drawn from since the start."""
        found = [one for one in self._others() if not (_is_global(one) and self._is_as_at_start(one))]
        lasting = set(map(id, self._last))
        self._last = [one.generator for one in found]
        return located(found, lasting)

    def _is_as_at_start(self, found: Found) -> bool:
        _, picture = self._at_start.get(id(found.generator), (None, None))
        return picture is not None and picture == _picture(found)

    def put_back(self, later: tuple[Located, ...]) -> None:
        """Restores the states that the later ones had in another process.

        Raises:
            ReplayError: one does not exist, and can't be created.
        """
        import_modules(later)
        given = {id(engine(generator)) for generator in self.given}
        self._last = []
        for one in later:
            generator, failed = place(one, self._replica, given)
            self._last.append(generator)
            self._at_start.pop(id(generator), None)
            # Otherwise it may be created again for each sample, so that nothing depends on its state.
            if one.lasting and len(failed) == len(one.paths):
                raise ReplayError(
                    f"the random generator at {in_words(failed[0])} was made while loading, and can't be made again in "
                    "another process; make it in __init__ or in worker_init_fn, or give the dataset state_dict() and "
                    "load_state_dict()"
                )


def _is_global(found: Found) -> bool:
    """Whether only modules hold it, and nothing of the replica."""
    return all(path[0][0] == "module" for path in found.paths)


def _picture(found: Found) -> bytes:
    """Its state, to be compared."""
    return pickle.dumps(state_of(found.generator))
