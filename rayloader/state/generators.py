"""Random generators that user code holds: found in an object, in a replica, and where its code makes them later.

Promise: `find_generators` lists the generators that an object holds, however many and however deep. A worker's
`Generators` also knows those that were made after its replica was opened, by the paths that lead to them, and puts
their states back in another process that has the same replica.

NOTE [Given and later]. The pickler that ships a replica meets each generator in it, and `reduce_generator` has the
worker's unpickler note each one: these are *given*, in an order that is the same in every worker, and need no search.
The *later* ones (made by `worker_init_fn`, by `__setstate__`, at the first or at the hundredth sample) are found among
the objects that Python's collector tracks and those that names of modules are bound to anew, and the paths to them by a
walk from the replica and from the modules that were imported since the process started. In another process a later one
is looked up by its path and given its state; if it is not there yet it is made. A generator that no path leads to (in
the frame of an iterator, for instance) is not followed: batches that are built again are compared with what was
delivered (digest.py).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rayloader.errors import ReplayError
from rayloader.state.module_globals import is_own

KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)

Step = tuple[str, Any] | None  # None: a step that can't be taken in another process
Path = tuple[Step, ...]
_Node = tuple[Any, Step] | None  # the parent's node, and the step from there

_ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, type, types.ModuleType, torch.Tensor, range}
_ATOMS |= {torch.dtype, torch.device, torch.Size, types.CodeType, property, np.dtype}
_OWN_REFERENCES = 3  # of a list, of a loop over it and of a call, to an object that is nobody else's
_CHUNK = 100_000  # objects whose referents are looked at in one go


# ---- generators


def engine(generator: Any) -> Any:
    """What holds a generator's state: NumPy's generators may share one."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator


def _engines(generators: Iterable[Any]) -> set[int]:
    """Their identities."""
    return {id(engine(generator)) for generator in generators}


def state_of(generator: Any) -> Any:
    """A generator's state as it tells it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        return engine(generator).state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state().numpy().tobytes()


def set_state(generator: Any, state: Any) -> None:
    """The inverse of `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        engine(generator).state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def suit(generators: list[Any], states: Sequence[Any]) -> bool:
    """Whether these states can be of these generators: of as many, each of its kind."""
    return len(generators) == len(states) and all(map(_suits, generators, states))


def distinct(found: Iterable[Any]) -> list[Any]:
    """The generators to be followed: each state once, without the global ones and those that can't tell their state."""
    chosen: dict[int, Any] = {}
    shared = {id(engine(obj)) for obj, *_ in _globals()}
    for generator in found:
        key = id(engine(generator))
        if key in shared or (key in chosen and not isinstance(generator, np.random.RandomState)):
            continue
        with contextlib.suppress(Exception):  # random.SystemRandom, or a class of the user's
            state_of(generator)
            chosen[key] = generator
    return list(chosen.values())


def find_generators(obj: Any) -> list[Any]:
    """The random generators that an object holds, in an order that depends on nothing but the object."""
    return distinct(generator for _, generator in _walk([((None, ("root", "object")), obj)]))


def _globals() -> tuple[tuple[Any, Any, str], ...]:
    numpy = np.random.mtrand
    return (
        (random._inst, random, "_inst"),
        (numpy._rand, numpy, "_rand"),
        (numpy._rand._bit_generator, numpy._rand, "_bit_generator"),
        (torch.default_generator, torch, "default_generator"),
    )


# ---- given ones: noted while a replica is unpickled

_noted: list[Any] | None = None


@contextlib.contextmanager
def noting() -> Iterator[list[Any]]:
    """Gives a list of the generators that are unpickled meanwhile, in the process's one thread that unpickles."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def reduce_generator(obj: Any, reduced: Callable[[Any], Any]) -> Any:
    """How a replica's pickler reduces a generator: as usual (`reduced`), and noted where it is unpickled.

    The global ones are pickled by name: what is bound to one of them in the driver is bound to the worker's there, as
    after a fork.
    """
    for one, owner, name in _globals():
        if obj is one:
            return getattr, (owner, name)
    if isinstance(obj, random.SystemRandom) and type(obj).__reduce__ is random.Random.__reduce__:
        return _without_state, (type(obj), vars(obj))
    usual = reduced(obj)
    if not isinstance(usual, tuple):
        return usual
    make, arguments, *rest = usual
    return _note, (make, *arguments), *rest


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
    """The state of a generator that was made after the replica was opened."""

    paths: tuple[Path, ...]
    kind: str  # what to make where it is missing; empty: that is not known
    state: Any
    lasting: bool  # it was not made anew since the last look: what it gives next depends on its state


class Generators:
    """The generators of one worker.

    Args:
        replica: the objects of the replica, by name.
        noted: the generators that were met when it was unpickled.
        before: those that lived in the process before: what other loaders have left in its modules is not followed.

    Attributes:
        given: of the replica.
        settled: whether the last look found none that the one before it had not.
    """

    def __init__(self, replica: dict[str, Any], noted: list[Any], before: Iterable[Any] = ()) -> None:
        self._replica = replica
        self.given = distinct(noted)
        self.settled = True
        self._others = [*noted, *before]  # keeps their identities
        self._known = _engines(self._others)
        self._later: list[tuple[tuple[Path, ...], Any, bool]] = []
        self._in_vain: list[Any] = []  # to which no path led, not from any module
        _in_this_process.add(self)

    def look(self, *, new_last: bool = True) -> tuple[Later, ...]:
        """The later ones as they are now; `new_last`: those that are seen for the first time count as lasting."""
        self._in_vain = [generator for generator in self._in_vain if sys.getrefcount(generator) > _OWN_REFERENCES]
        followed = []
        for paths, before, _ in self._later:
            now = self._at(paths[0])
            if _is(now, KINDS) and id(engine(now)) not in self._known:
                followed.append((paths, now, now is before))
        seen = _engines(generator for _, generator, _ in followed)
        others = set().union(*(worker._known for worker in _in_this_process))  # whose replicas are beside this one
        living = alive()
        unknown = _engines(living) - others - seen
        known = len(followed)
        if unknown:
            reached = self._reached(unknown, ())
            if missing := unknown - _engines(reached.values()):
                reached = self._reached(unknown, self._module_roots(deep=_is_own))
                missing = unknown - _engines(reached.values())
            if missing - _engines(self._in_vain):  # modules of packages may be thousands, and mostly hold none
                reached = self._reached(unknown, self._module_roots(deep=lambda _: True))
                missing = unknown - _engines(reached.values())
                self._in_vain = [generator for generator in living if id(engine(generator)) in missing]
            followed += [(paths, generator, new_last) for paths, generator in reached.items()]
        self.settled = len(followed) == known
        self._later = followed
        return tuple(
            Later(paths, _kind(generator), state_of(generator), lasting) for paths, generator, lasting in followed
        )

    def put_back(self, later: tuple[Later, ...]) -> None:
        """Gives the later ones the states that they had in another process.

        Raises:
            ReplayError: one is not there, and can't be made.
        """
        self._later = []
        given = _engines(self.given)
        for paths, kind, state, lasting in later:
            generator = self._at(paths[0])
            fits = _is(generator, KINDS) and id(engine(generator)) not in self._known
            if not fits and _is(generator, KINDS) and paths[0][0] is not None and paths[0][0][0] == "module":
                # A worker that this process has hosted before has imported the module: workers share what it holds.
                fits = id(engine(generator)) not in given
                self._known -= {id(engine(generator))} - given
            try:
                if not fits or _kind(generator) != kind or not _suits(generator, state):
                    generator = _make(kind, state)
                    for path in paths:
                        _put(self._at(path[:-1]), path[-1], generator)
                set_state(generator, state)
            except Exception as error:
                if not lasting:
                    continue  # made anew for each sample: nothing depends on its state
                raise ReplayError(
                    f"the random generator at {in_words(paths[0])} was made while loading, and can't be made again in "
                    "another process; make it in __init__ or in worker_init_fn, or give the dataset state_dict() and "
                    "load_state_dict()"
                ) from error
            self._later.append((paths, generator, lasting))

    def _reached(self, wanted: set[int], others: Iterable[tuple[_Node, Any]]) -> dict[tuple[Path, ...], Any]:
        """Those of the wanted generators that are reached from the replica and others, by the paths to each."""
        reached: dict[int, tuple[list[Path], Any]] = {}
        for path, generator in _walk(itertools.chain(self._replica_roots(), others)):
            if id(engine(generator)) in wanted:
                reached.setdefault(id(generator), ([], generator))[0].append(path)
        return {tuple(paths): generator for paths, generator in reached.values()}

    def _replica_roots(self) -> Iterator[tuple[_Node, Any]]:
        for name, obj in self._replica.items():
            yield (None, ("root", name)), obj

    def _module_roots(self, deep: Callable[[types.ModuleType], bool]) -> Iterator[tuple[_Node, Any]]:
        """What modules hold: of those for which `deep` says no, only the generators that they or their classes name.

        Of modules that were there when the process started, only those that they name themselves.
        """
        kinds = _kinds()
        classes: set[int] = set()
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType) or name == __name__:
                continue
            node, is_late = (None, ("module", name)), name not in _MODULES_AT_START
            whole = is_late and deep(module)
            for key, value in list(vars(module).items()):
                if type(value) in kinds or (whole and not key.startswith("__")):
                    yield (node, ("attribute", key)), value
                elif is_late and _is(value, type) and id(value) not in classes and not _is_imported(value):
                    classes.add(id(value))
                    for attribute, held in list(vars(value).items()):
                        if type(held) in kinds:
                            yield ((node, ("attribute", key)), ("attribute", attribute)), held

    def _at(self, path: Path) -> Any:
        """What a path leads to, None if it is not there."""
        obj: Any = None
        try:
            for step in path:
                if step is None:
                    return None
                kind, key = step
                if kind == "root":
                    obj = self._replica[key]
                elif kind == "module":
                    obj = sys.modules[key]
                else:
                    obj = _GET[kind](obj, key)
        except Exception:  # whatever stands there instead
            return None
        return obj


_in_this_process: weakref.WeakSet[Generators] = weakref.WeakSet()
_MODULES_AT_START: set[str] = set()
_GLOBALS_AT_START: list[dict[str, Any]] = []  # of these modules
_SIZES_AT_START: list[int] = []  # how many each had


def note_modules() -> None:
    """The process has imported what it needs: generators in these modules are nobody's but theirs."""
    modules = {name: module for name, module in list(sys.modules.items()) if isinstance(module, types.ModuleType)}
    _MODULES_AT_START.update(modules)
    _GLOBALS_AT_START[:] = map(vars, modules.values())
    _SIZES_AT_START[:] = map(len, _GLOBALS_AT_START)


class _Namespaces:
    """Of the modules that were imported since the process started, and of their classes: what is bound there.

    The collector tells nothing of what was frozen, and nothing of a generator of torch's: in one of these it is found
    because another object was bound to the name before.
    """

    def __init__(self) -> None:
        self._modules: dict[str, dict[str, Any]] = {}
        self._classes: dict[int, type] = {}  # by identity
        # Each, what was bound there when it was last noted, and the dicts of that: the collector does not track those
        # that hold only a generator.
        self._spaces: list[tuple[Mapping[str, Any], list[Any], list[dict[Any, Any]]]] = []

    def note(self) -> None:
        """What is bound by now was bound before."""
        modules = {
            name: vars(module)
            for name, module in list(sys.modules.items())
            if name not in _MODULES_AT_START and isinstance(module, types.ModuleType)
        }
        if any(modules.get(name) is not space for name, space in self._modules.items()):
            self.__init__()  # type: ignore[misc]
        new: list[Mapping[str, Any]] = [modules[name] for name in modules.keys() - self._modules.keys()]
        self._modules = modules
        for place, (space, bound, _) in enumerate(self._spaces):
            if _differ(values := list(space.values()), bound):
                self._spaces[place] = space, values, _of({dict}, values)
                new += self._new_classes(values)
        while new:
            space = new.pop()
            values = list(space.values())
            self._spaces.append((space, values, _of({dict}, values)))
            new += self._new_classes(values)

    def _new_classes(self, values: list[Any]) -> Iterator[Mapping[str, Any]]:
        for value in values:
            if _is(value, type) and id(value) not in self._classes and not _is_imported(value):
                self._classes[id(value)] = value
                yield vars(value)

    def new(self) -> list[Any]:
        """What was bound since, where it was, and dicts that the collector does not track."""
        found: list[Any] = []
        for space, bound, dicts in self._spaces:
            found += itertools.filterfalse(gc.is_tracked, dicts)
            if _differ(values := list(space.values()), bound):
                found += values
                found += itertools.filterfalse(gc.is_tracked, _of({dict}, values))
        return found


def _differ(values: list[Any], bound: list[Any]) -> bool:
    return len(values) != len(bound) or any(map(operator.is_not, values, bound))


_namespaces = _Namespaces()


def freeze() -> None:
    """What is here by now is nobody's: the search passes over it, and so does the collector."""
    gc.freeze()
    _namespaces.note()


def alive() -> list[Any]:
    """The generators that live in this process, made since it has started and since `freeze`."""
    kinds = _kinds()
    objects = gc.get_objects()  # not in a new list, which would hold itself
    objects += _namespaces.new()
    found = _of(kinds, objects)
    # No path leads through a tensor, and there may be a great many.
    objects = list(
        itertools.compress(objects, map(operator.is_not, map(type, objects), itertools.repeat(torch.Tensor)))
    )
    torch_kinds = _with_subclasses(torch.Generator)  # the collector tracks neither them nor a dict of nothing else
    for begin in range(0, len(objects), _CHUNK):
        holders = objects[begin : begin + _CHUNK]
        while holders:
            referents = _of({*torch_kinds, dict, tuple}, gc.get_referents(*holders))
            found += _of(torch_kinds, referents)
            holders = list(itertools.filterfalse(gc.is_tracked, _of({dict, tuple}, referents)))
    sizes = list(map(len, _GLOBALS_AT_START))
    if sizes != _SIZES_AT_START:
        for names, size, before in zip(_GLOBALS_AT_START, sizes, _SIZES_AT_START, strict=True):
            if size != before:
                found += [obj for obj in list(names.values()) if type(obj) in kinds]
    del objects
    return distinct(found)


def _of(kinds: set[type], objects: list[Any]) -> list[Any]:
    """Those of the objects whose type is one of these; all in C, for there may be millions."""
    return list(itertools.compress(objects, map(kinds.__contains__, map(type, objects))))


def _kinds() -> set[type]:
    return set().union(*map(_with_subclasses, KINDS))


def _with_subclasses(kind: type) -> set[type]:
    below: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_with_subclasses, below))


def _kind(generator: Any) -> str:
    kind = type(generator)
    if kind in (random.Random, np.random.Generator, np.random.RandomState):
        return kind.__name__
    if isinstance(generator, np.random.BitGenerator) and getattr(np.random, kind.__name__, None) is kind:
        return "BitGenerator"
    return "torch" if kind is torch.Generator and generator.device.type == "cpu" else ""


def _suits(generator: Any, state: Any) -> bool:
    own = state_of(generator)
    return type(own) is type(state) and (type(own) is not dict or own["bit_generator"] == state["bit_generator"])


def _make(kind: str, state: Any) -> Any:
    match kind:
        case "Random":
            return random.Random()
        case "torch":
            return torch.Generator()
        case "Generator" | "RandomState" | "BitGenerator":
            bits = getattr(np.random, state["bit_generator"])()
            return bits if kind == "BitGenerator" else getattr(np.random, kind)(bits)
    raise TypeError("a class of the user's")


# ---- walking


def _walk(roots: Iterable[tuple[_Node, Any]]) -> Iterator[tuple[Path, Any]]:
    """The generators that are reached from some objects, with each path to them, the shortest first."""
    queue = collections.deque(roots)
    seen: set[int] = set()
    slots: dict[type, list[str]] = {}
    keep: list[Any] = []  # what was made on the way, so that no identity is used twice
    while queue:
        node, obj = queue.popleft()
        if _is(obj, KINDS):
            yield _path(node), obj
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        keep.append(obj)
        queue.extend(((node, step), child) for step, child in _children(obj, slots) if type(child) not in _ATOMS)


def _is(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """As `isinstance`, which asks objects of the user's what they claim to be."""
    return issubclass(type(obj), kinds)


def _path(node: _Node) -> Path:
    steps: list[Step] = []
    while node is not None:
        node, step = node
        steps.append(step)
    return tuple(reversed(steps))


def _children(obj: Any, slots: dict[type, list[str]]) -> Iterator[tuple[Step, Any]]:
    kind = type(obj)
    if _is(obj, (type, types.ModuleType)):
        if _is(obj, type) and not _is_imported(obj):
            yield from ((("attribute", name), value) for name, value in list(vars(obj).items()))
        return
    if _is(obj, (torch.Tensor, *KINDS[1:])):
        return
    if not _is_imported(kind):
        yield ("class", None), kind
    if _is(obj, dict):
        yield from ((("key", k) if _is_plain(k) else None, value) for k, value in list(dict.items(obj)))
        if _is(obj, collections.defaultdict):
            yield ("factory", None), obj.default_factory
    elif (items := _iterator(obj)) is not None:
        if not _ATOMS.issuperset(map(type, items)):  # a long list of numbers is passed over in C
            named = _is(obj, _SEQUENCES)
            yield from (
                (("item", number) if named else None, value) for number, value in enumerate(_iterator(obj) or ())
            )
    elif _is(obj, np.ndarray):
        if obj.dtype.hasobject:
            yield from ((None, value) for value in obj.flat)
        return
    elif _is(obj, types.FunctionType):
        yield from _of_function(obj)
    elif _is(obj, types.CellType):
        with contextlib.suppress(ValueError):  # empty
            yield ("contents", None), obj.cell_contents
    elif _is(obj, (types.MethodType, types.BuiltinMethodType)):
        yield ("self", None), obj.__self__
        yield ("function", None), getattr(obj, "__func__", None)
        return
    elif _is(obj, (staticmethod, classmethod)):
        yield ("function", None), obj.__func__
        return
    elif _is(obj, functools.partial):
        yield ("partial", "func"), obj.func
        yield ("partial", "args"), obj.args
        yield ("partial", "keywords"), obj.keywords
    attributes = _attributes(obj)
    if kind not in slots:
        slots[kind] = [
            name
            for base in kind.__mro__
            for name, member in vars(base).items()
            if _is(member, types.MemberDescriptorType) and "__slots__" in vars(base)
        ]
    for name in slots[kind]:
        with contextlib.suppress(AttributeError):  # not set
            yield ("attribute", name), object.__getattribute__(obj, name)
    if attributes is not None:
        yield from ((("attribute", name), value) for name, value in list(attributes.items()))
    elif not slots[kind] and not _is(obj, (dict, list, tuple, set, frozenset)):
        yield from ((None, value) for value in gc.get_referents(obj) if not _is(value, type))


def _of_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    yield from ((("closure", n), cell) for n, cell in enumerate(function.__closure__ or ()))
    yield from ((("default", n), value) for n, value in enumerate(function.__defaults__ or ()))
    yield from ((("kwdefault", name), value) for name, value in (function.__kwdefaults__ or {}).items())
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if module is None or vars(module) is not function.__globals__:  # it was pickled by value
        globals_ = list(function.__globals__.items())
        yield from ((("global", name), value) for name, value in globals_ if name != "__builtins__")


_SEQUENCES = list, tuple, collections.deque


def _iterator(obj: Any) -> Iterator[Any] | None:
    """Over what a list, tuple, deque or set holds; None of anything else.

    A class of the user's may do anything when it is iterated over: packages fill lazy containers then, with imports.
    """
    for container in (*_SEQUENCES, set, frozenset):
        if _is(obj, container):
            return container.__iter__(obj)
    return None


def _attributes(obj: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return attributes if _is(attributes, dict) else None


def _is_own(module: types.ModuleType) -> bool:
    """Whether the program has written it; one that was not read from a file may be."""
    return (file := vars(module).get("__file__")) is None or is_own(file)


def _is_imported(kind: type) -> bool:
    """Whether a class belongs to a module that was there when the process started; its attributes are constants."""
    return kind.__module__ in _MODULES_AT_START or kind.__module__ == "builtins"


def _is_plain(key: Any) -> bool:
    return type(key) in (str, int, float, bool, bytes, type(None)) or (
        type(key) is tuple and all(map(_is_plain, key))
    )  # fmt: skip


_GET: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda obj, name: _get_attribute(obj, name),
    "key": lambda obj, key: dict.__getitem__(obj, key),
    "item": lambda obj, number: next(itertools.islice(_iterator(obj) or (), number, None)),
    "closure": lambda obj, number: obj.__closure__[number],
    "contents": lambda obj, _: obj.cell_contents,
    "default": lambda obj, number: obj.__defaults__[number],
    "kwdefault": lambda obj, name: obj.__kwdefaults__[name],
    "global": lambda obj, name: obj.__globals__[name],
    "self": lambda obj, _: obj.__self__,
    "function": lambda obj, _: obj.__func__,
    "partial": getattr,
    "factory": lambda obj, _: obj.default_factory,
    "class": lambda obj, _: type(obj),
}


def _get_attribute(obj: Any, name: str) -> Any:
    if isinstance(obj, (type, types.ModuleType)):
        return vars(obj)[name]
    attributes = _attributes(obj)
    return attributes[name] if attributes and name in attributes else object.__getattribute__(obj, name)


def _put(obj: Any, step: Step, value: Any) -> None:
    match step:
        case ("attribute", name):
            if isinstance(obj, (type, types.ModuleType)) or _attributes(obj) is None:
                setattr(obj, name, value)
            else:
                _attributes(obj)[name] = value  # type: ignore[index]
        case ("key", key) if isinstance(obj, dict):
            dict.__setitem__(obj, key, value)
        case ("item", number) if isinstance(obj, list):
            obj[number] = value
        case ("contents", None):
            obj.cell_contents = value
        case ("global", name):
            obj.__globals__[name] = value
        case _:
            raise TypeError("it can't be put there")


def in_words(path: Path) -> str:
    """A path as the user would write it."""
    words = ""
    for step in path:
        match step:
            case None:
                words += ".?"
            case ("root" | "module", name):
                words += name
            case ("attribute", name):
                words += f".{name}"
            case ("key" | "item", key):
                words += f"[{key!r}]"
            case (kind, None):
                words += f".<{kind}>"
            case (kind, key):
                words += f".<{kind} {key}>"
    return words
