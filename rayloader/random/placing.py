"""The states of generators with the paths to them: read in one process, and restored in another.

Promise: a generator that `Placed` has from the driver is restored in a worker as soon as the worker has imported its
module, as a forked worker would have it: in the same state, at all the places where it was, and as one object.

NOTE [As imported]. Modules may draw while they are imported: `NOISE = common.RNG.normal(size=4)`. In the driver that
mostly happened before the program seeded anything, and later draws are included in the states that are sent. So while a
worker imports modules, the generators continue from where earlier imports have left them; then they are set to the
driver's states, or back to where they were before.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from rayloader.namespaces import is_a
from rayloader.random.generator_kinds import KINDS, engine, kind_of, make_generator, set_state, state_of, suits
from rayloader.random.search import Found, Path, follow, in_words, put

# See NOTE [As imported]: generators of this process that modules have created, with their states, by identity.
_as_imported: dict[int, tuple[Any, Any]] = {}


class Located(NamedTuple):
    """A generator of another process.

    Attributes:
        paths: all paths that lead to it.
        kind: of which to create one where it is missing; empty: only the program can.
        state: its state.
        lasting: whether it was there at an earlier search too: its next draws depend on its state.
    """

    paths: tuple[Path, ...]
    kind: str
    state: Any
    lasting: bool = False

    def is_like(self, generator: Any) -> bool:
        """Whether it can be that generator."""
        return is_a(generator, KINDS) and kind_of(generator) == self.kind and suits(generator, self.state)


def located(found: Iterable[Found], lasting: Collection[int] = ()) -> tuple[Located, ...]:
    """Generators with their states; `lasting`: identities of those that were there at an earlier search."""
    return tuple(
        Located(paths, kind_of(generator), state_of(generator), id(generator) in lasting) for generator, paths in found
    )


def import_modules(those: Iterable[Located]) -> None:
    """Imports the modules of generators, which the other process had imported."""
    for module in {name for one in those for (kind, name), *_ in one.paths if kind == "module"} - sys.modules.keys():
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


class Placed:
    """Generators of the driver in a worker: placed when their modules are imported.

    Args:
        carried: their states.
    """

    def __init__(self, carried: tuple[Located, ...] = ()) -> None:
        self._carried = carried
        self._generators: dict[int, Any] = {}  # those in place, by their number in `carried`

    @contextlib.contextmanager
    def as_imported(self) -> Iterator[None]:
        """Around the import of modules; see NOTE [As imported]."""
        here = [generator for generator in self._generators.values() if id(generator) in _as_imported]
        states = list(map(state_of, here))
        for generator in here:
            set_state(*_as_imported[id(generator)])
        try:
            yield
        finally:
            for generator, state in zip(here, states, strict=True):
                _as_imported[id(generator)] = generator, state_of(generator)
                set_state(generator, state)

    def put_in(self, module: str) -> list[str]:
        """A module has been imported: places its generators. Returns, in words, those that could not be placed."""
        failed = []
        for number, one in enumerate(self._carried):
            paths = tuple(path for path in one.paths if path[0] == ("module", module))
            if number in self._generators:
                failed += bind(self._generators[number], paths, {})
            elif paths:
                for there in (follow(path, {}) for path in paths):
                    if one.is_like(there):
                        _as_imported.setdefault(id(there), (there, state_of(there)))
                others = {id(engine(other)) for other in self._generators.values()}
                generator, missing = place(one._replace(paths=paths), {}, others)
                failed += missing
                if generator is not None:
                    self._generators[number] = generator
        return list(map(in_words, failed))
