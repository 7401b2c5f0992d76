"""Random generators in the program's own modules: a forked worker would have them as they are in the program.

Promise: those that `Found` meets in the driver are restored in a worker as soon as it has imported their module:
in the same state, at all the places where they were, and as one object wherever they were one.

NOTE [As imported]. Modules may draw while they are imported: `NOISE = common.RNG.normal(size=4)`. In the driver that
mostly happened before the program seeded anything, and later draws are included in the states that are sent. So while a
worker imports modules, the generators continue from where earlier imports have left them; then they are set to the
driver's states, or back to where they were before.
"""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from rayloader.namespaces import is_a
from rayloader.random.generator_kinds import distinct, kind_of, make_generator, set_state, state_of, suits
from rayloader.random.object_paths import (
    ATOMS,
    Path,
    follow,
    functions_of,
    held_by,
    in_words,
    plain_containers,
    put,
    walk,
)

# How many objects behind one global are searched for generators, at each `iter()`: a model may hold very many.
MOST = 1_000
# A container with more items holds data: generators are found among the items, but not within them.
LONG = 100

# See NOTE [As imported]: the states of this process's generators, by a path to each.
_as_imported: dict[Path, Any] = {}


class Carried(NamedTuple):
    """A generator of the driver's.

    Attributes:
        paths: all paths that lead to it.
        made_of: its kind (see `generator_kinds.make_generator`) and its state, pickled.
    """

    paths: tuple[Path, ...]
    made_of: bytes


class Found:
    """The generators in the modules of this process, the driver.

    Args:
        modules: the program's own, by name: the contents of each.
    """

    def __init__(self, modules: Mapping[str, Mapping[str, Any]]) -> None:
        self._modules = modules
        self._reached: dict[int, tuple[Any, list[Path]]] = {}
        self._classes: dict[int, bool] = {}  # by identity: whether it contains nothing but code

    def look_in(self, module: str, name: str, value: Any) -> None:
        """Searches a global of a module."""
        if is_a(value, (type, types.FunctionType)) and self._is_only_code(value):
            return
        root = ((None, ("module", module)), ("attribute", name)), value
        for path, generator in walk(
            [root],
            passed=lambda one: is_a(one, type) and one is not value and self._is_passed(one),
            most=MOST,
            longest=LONG,
        ):
            if None in path:  # it can't be reached in a worker
                continue
            self._reached.setdefault(id(generator), (generator, []))[1].append(path)

    def carried(self) -> tuple[Carried, ...]:
        """The current generators, except for those of a device, and those whose state can't be read or pickled."""
        carried = []
        for generator in distinct(generator for generator, _ in self._reached.values()):
            if is_a(generator, torch.Generator) and generator.device.type != "cpu":
                continue
            with contextlib.suppress(Exception):  # a class of the user's
                made_of = pickle.dumps((kind_of(generator), state_of(generator)), pickle.HIGHEST_PROTOCOL)
                carried.append(Carried(tuple(self._reached[id(generator)][1]), made_of))
        return tuple(carried)

    def _is_only_code(self, definition: Any) -> bool:
        """Whether a function or class holds nothing else; there may be thousands, and each `iter()` asks."""
        if not is_a(definition, type):
            return self._are_only_code([*held_by(definition), *vars(definition).values()])
        if id(definition) not in self._classes:
            self._classes[id(definition)] = True  # for a class that refers to itself
            held = list(definition.__bases__)
            for name, value in list(vars(definition).items()):
                for function in (functions := functions_of(value)):
                    held += [*held_by(function), *vars(function).values()]
                if not functions and not name.startswith("__"):
                    held.append(value)
            self._classes[id(definition)] = self._are_only_code(held)
        return self._classes[id(definition)]

    def _are_only_code(self, held: list[Any]) -> bool:
        return all(
            (self._is_passed(one) or self._is_only_code(one))
            if is_a(one, type)
            else type(one) in ATOMS or plain_containers(one) is not None
            for one in held
        )

    def _is_passed(self, kind: type) -> bool:
        """Whether a class is not the program's, or is a global of its module, and so is searched under that name."""
        attributes = self._modules.get(kind.__module__)
        return attributes is None or attributes.get(kind.__qualname__) is kind


class Placed:
    """Generators of the driver, or of another process, in a worker: placed when their modules are imported."""

    def __init__(self, carried: tuple[Carried, ...] = ()) -> None:
        self._carried = list(carried)
        self._generators: dict[int, Any] = {}  # by their number in that list
        self._paths: dict[int, list[Path]] = {}
        self._states: dict[int, bytes] = {}  # to which they were set

    def is_untouched(self, generator: Any, state: Any) -> bool:
        """Whether it is in place, and has not been drawn from since, according to its current state."""
        numbers = [number for number, one in self._generators.items() if one is generator]
        return bool(numbers) and pickle.dumps(state) == self._states[numbers[0]]

    @property
    def generators(self) -> dict[tuple[Path, ...], Any]:
        """The generators in place, by the paths that lead to each here."""
        return {tuple(self._paths[number]): generator for number, generator in self._generators.items()}

    def wait(self, paths: tuple[Path, ...], kind: str, state: Any) -> None:
        """In modules that are not imported yet, this will be one's state, instead of the driver's."""
        self._carried = [
            one._replace(paths=tuple(path for path in one.paths if path not in paths)) for one in self._carried
        ]
        self._carried.append(Carried(paths, pickle.dumps((kind, state))))

    def waits_for(self, module: str) -> bool:
        """Whether a generator is still to be placed there."""
        return any(path[0] == ("module", module) for one in self._carried for path in one.paths)

    @contextlib.contextmanager
    def as_imported(self) -> Iterator[None]:
        """Around the import of modules; see NOTE [As imported]."""
        here = [(self._paths[number][0], generator) for number, generator in self._generators.items()]
        here = [(path, generator) for path, generator in here if path in _as_imported]
        states = [state_of(generator) for _, generator in here]
        for path, generator in here:
            set_state(generator, _as_imported[path])
        try:
            yield
        finally:
            for (path, generator), state in zip(here, states, strict=True):
                _as_imported[path] = state_of(generator)
                set_state(generator, state)

    def put_in(self, module: str) -> list[str]:
        """A module has been imported: places its generators. Returns, in words, those that could not be placed."""
        failed = []
        for number, (paths, made_of) in enumerate(self._carried):
            for path in paths:
                if path[0] == ("module", module):
                    try:
                        self._put(number, path, made_of)
                    except Exception:  # depends on the object that is there instead
                        failed.append(in_words(path))
        return failed

    def _put(self, number: int, path: Path, made_of: bytes) -> None:
        found, generator = follow(path), self._generators.get(number)
        if generator is None:
            kind, state = pickle.loads(made_of)
            taken = any(found is other for other in self._generators.values())
            fits = not taken and distinct([found]) and kind_of(found) == kind and suits(found, state)
            generator = found if fits else make_generator(kind, state)
            if fits:
                _as_imported.setdefault(path, state_of(found))
            set_state(generator, state)
            self._states[number] = pickle.dumps(state_of(generator))
        if found is not generator:
            put(follow(path[:-1]), path[-1], generator)
        self._generators[number] = generator
        self._paths.setdefault(number, []).append(path)
