"""Plain globals of the program's own modules: a forked worker would have them as the program has set them.

Promise: whenever a worker imports such a module, numbers (NumPy's too), strings, paths, and tuples, lists, sets, dicts
and namespaces of these are what they were in the driver at `iter()`, and so are objects of any class, dataclasses for
instance, whose attributes are such values. The same holds for the attributes of the classes that the module defines.
Other values are named in a log line if their kind, their size or, for functions and classes, their name differs.
Modules of the standard library and of installed packages are as the worker imports them, and so is `__main__`, whose
functions and classes bring along what they use.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import logging
import os
import pathlib
import pickle
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayloader._compat import default_collate_fn_map
from rayloader.state.generator_kinds import KINDS, is_a
from rayloader.state.module_generators import Carried, Found, Placed
from rayloader.state.namespaces import attributes_of, namespace_of
from rayloader.state.object_paths import functions_of, slots_of

logger = logging.getLogger("rayloader")

_ATOMS = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_ATOMS |= {type(pathlib.PurePath()), type(pathlib.Path())}
_SEQUENCES = {tuple, list, set, frozenset}
_DICTS = {dict, collections.OrderedDict, collections.Counter}
_NAMESPACES = {argparse.Namespace, types.SimpleNamespace}
_SIZED: tuple[Any, ...] = (tuple, list, set, frozenset, dict, collections.deque)
# Recognized by their names.
_DEFINITIONS = type, types.FunctionType, types.BuiltinFunctionType
_INSTALLED = {"site-packages", "dist-packages"}
# Wherever they are installed: these are large, and `pip install --target` puts packages into any folder.
_PACKAGES = filter(None, map(importlib.util.find_spec, ("rayloader", "torch", "numpy", "ray", "pyarrow")))
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *(os.path.dirname(os.path.abspath(package.origin or "")) for package in _PACKAGES),
    )
)
# A global with more parts than this is data, and too much to compare at each `iter()`.
_MAX_PARTS = 100_000
# Pickling and comparing are recursive.
_MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class ModuleGlobals:
    """The globals of the driver's modules, at `iter()`.

    Attributes:
        plain: pickled values, by path, by module; for objects their attributes, and the items of dicts.
        others: descriptions of values that are not plain, by path, by module.
        generators: random generators in values that are not plain.
    """

    plain: bytes
    others: dict[str, dict[_Path, str]]
    generators: tuple[Carried, ...]

    @classmethod
    def capture(cls) -> ModuleGlobals:
        """The globals in this process."""
        plain: dict[str, dict[_Path, Any]] = {}
        objects: dict[str, dict[_Path, _Content]] = {}
        others: dict[str, dict[_Path, str]] = {}
        modules = dict(own_modules())
        found = Found(modules)
        for module_name, attributes in modules.items():
            for path, value in _set_in(module_name, attributes):
                if value is default_collate_fn_map:  # sent with the replica
                    continue
                if _is_plain(value):
                    plain.setdefault(module_name, {})[path] = value
                    continue
                others.setdefault(module_name, {})[path] = _described(value)
                if (content := _content(value)) is not None and _is_plain(content):
                    objects.setdefault(module_name, {})[path] = content
                of_module = len(path) == 1  # the search continues from there into classes
                if of_module and (not is_a(value, (type, types.FunctionType)) or value.__module__ in modules):
                    found.look_in(module_name, path[0], value)
        return cls(pickle.dumps((plain, objects), pickle.HIGHEST_PROTOCOL), others, found.carried())

    def adopt(self) -> None:
        """In a worker: sets the globals of imported modules, and those of other modules when they are imported."""
        plain, objects = pickle.loads(self.plain)
        _finder.pending = {
            name: (plain.get(name, {}), objects.get(name, {}), self.others.get(name, {}))
            for name in plain | self.others
        }
        _finder.placed = Placed(self.generators)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        for name in list(_finder.pending):
            if (module := sys.modules.get(name)) is not None:
                _finder.set(name, module)
                _finder.place_generators(name, module)


def placed_generators() -> Placed:
    """In a worker: the generators of the modules."""
    return _finder.placed


_Path = tuple[str, ...]  # the name of a global, or of a class and of its attribute
_Content = tuple[str, dict[str, Any], "dict[Any, Any] | None"]  # class, attributes, and items of a dict


_installed: dict[str, weakref.ref[Any]] = {}  # modules of installed packages, by name


def own_modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and globals of the program's modules. There are thousands of others, which are examined once."""
    modules = list(sys.modules.items())
    for name, module in [one for one in modules if (ref := _installed.get(one[0])) is None or ref() is not one[1]]:
        if name in ("__main__", "__mp_main__"):
            continue
        attributes = namespace_of(module)
        file = attributes.get("__file__")
        if is_own(file):
            yield name, attributes
        elif isinstance(file, str):
            _installed[name] = weakref.ref(module)


def _set_in(module_name: str, namespace: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Globals of a module, and attributes of the classes that it defines, except for unchanged methods."""
    scopes: list[tuple[_Path, str | None, Mapping[str, Any]]] = [((), None, namespace)]
    seen: set[int] = set()
    for owners, class_name, attributes in scopes:
        for name, value in list(attributes.items()):
            if name.startswith("__") or is_a(value, types.ModuleType):
                continue
            functions = functions_of(value) if class_name is not None else ()
            if functions and all(one.__qualname__ == f"{class_name}.{name}" for one in functions):
                continue
            yield (*owners, name), value
            if is_a(value, type) and not issubclass(value, enum.Enum) and id(value) not in seen:
                inner = attributes_of(value)
                if inner.get("__module__") == module_name:
                    seen.add(id(value))
                    scopes.append(((*owners, name), value.__qualname__, inner))


def _owner(module: types.ModuleType, path: _Path) -> Any:
    """The module itself, or the class in it whose attribute a path names; None if there is no such class."""
    owner: Any = module
    for name in path[:-1]:
        owner = _namespace(owner).get(name)
        if not is_a(owner, type):
            return None
    return owner


def _namespace(owner: Any) -> Mapping[str, Any]:
    return attributes_of(owner) if is_a(owner, type) else namespace_of(owner)


@functools.cache
def is_own(file: Any) -> bool:
    """Whether a file of source belongs to the program."""
    if not isinstance(file, str):
        return False
    path = os.path.abspath(file)
    return not _INSTALLED.intersection(path.split(os.sep)) and not path.startswith(_LIBRARIES)


def is_own_module(module: types.ModuleType) -> bool:
    """Whether the program has written it; a module without a file may be its own, unless Python contains it."""
    return is_own_namespace(namespace_of(module))


def is_own_namespace(namespace: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module that the program has written."""
    if (file := namespace.get("__file__")) is not None:
        return is_own(file)
    return getattr(namespace.get("__spec__"), "origin", None) not in ("built-in", "frozen")


def is_own_name(name: Any) -> bool:
    """Whether the program has written the module of this name; in a worker `__main__` is another one's."""
    if name == "__main__":
        return True
    module = sys.modules.get(name) if isinstance(name, str) else None
    return is_a(module, types.ModuleType) and is_own_module(module)  # type: ignore[arg-type]


def _is_plain(value: Any) -> bool:
    """Whether it consists of types that are sent, and is small enough; calls nothing that the program has defined."""
    parts, count = [(value, 0)], 0
    while parts:
        part, depth = parts.pop()
        count += 1
        if count > _MAX_PARTS or depth > _MAX_DEPTH:
            return False
        kind = type(part)
        if kind in _NAMESPACES:
            part, kind = vars(part), dict
        if kind in _DICTS or kind in _SEQUENCES:
            if count + len(part) > _MAX_PARTS:
                return False
            inners = itertools.chain(part.keys(), part.values()) if kind in _DICTS else part
            parts += [(inner, depth + 1) for inner in inners]
        elif kind not in _ATOMS and not issubclass(kind, (np.number, np.bool_)):
            return False
    return True


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, with equal types at every level."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _NAMESPACES:
        one, other, kind = vars(one), vars(other), dict
    if kind in _DICTS:
        parts = [itertools.chain(*each.items()) for each in (one, other)]
        return len(one) == len(other) and all(map(_same, *parts))
    if kind in (tuple, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if kind in (float, complex):
        return repr(one) == repr(other)  # 0.0 is not -0.0
    return bool(one == other)


def _content(value: Any) -> _Content | None:
    """The contents of an object of the program's, read by the interpreter's own methods; None if that is impossible.

    Also None for a random generator, whose attributes do not contain its state.
    """
    kind = type(value)
    if issubclass(kind, (*_DEFINITIONS, enum.Enum, *KINDS)):
        return None
    slots = slots_of(kind) if is_own_name(kind.__module__) else []
    attributes: dict[str, Any] = {}
    try:
        attributes.update(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        if not slots and not issubclass(kind, dict):
            return None
    for name in slots:
        with contextlib.suppress(AttributeError):  # not set
            attributes[name] = object.__getattribute__(value, name)
    base = _dict_of(kind)
    return _name_of(kind), attributes, None if base is None else dict(base.items(value))


def _set_content(value: Any, content: _Content) -> None:
    """Sets the contents of an object of the same class, by the interpreter's own methods."""
    _, attributes, items = content
    slots = slots_of(type(value))
    with contextlib.suppress(AttributeError):  # it may have slots only
        held = object.__getattribute__(value, "__dict__")
        held.clear()
        held.update({name: one for name, one in attributes.items() if name not in slots})
    for name in slots:
        with contextlib.suppress(AttributeError):  # not set
            object.__delattr__(value, name)
        if name in attributes:
            object.__setattr__(value, name, attributes[name])
    base = _dict_of(type(value))
    if base is not None and items is not None:
        base.clear(value)
        for key, item in items.items():
            base.__setitem__(value, key, item)


def _dict_of(kind: type) -> Any:
    """The class whose methods access the items of a dict; None if it is no dict. Ordered ones keep their own order."""
    return next((base for base in (collections.OrderedDict, dict) if issubclass(kind, base)), None)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _described(value: Any) -> str:
    """A description of any value that calls nothing that the program has defined."""
    definition = next(iter(functions_of(value)), value)
    if is_a(definition, _DEFINITIONS):
        return f"{definition.__module__}.{definition.__qualname__}"
    kind = type(value)
    text = _name_of(kind)
    if (base := next((base for base in _SIZED if issubclass(kind, base)), None)) is not None:
        return f"{text} of {base.__len__(value)}"
    return f"{text} {value._name_}" if issubclass(kind, enum.Enum) else text


class _Finder(importlib.abc.MetaPathFinder):
    """Comes before the other finders, and sets the globals of a module that one of them finds once it is imported."""

    def __init__(self) -> None:
        self.pending: dict[str, tuple[dict[_Path, Any], dict[_Path, _Content], dict[_Path, str]]] = {}
        self.placed = Placed()
        self._told: set[tuple[str, str]] = set()
        self._under_way = threading.local()  # with `imported`: modules that are complete, within others that are not

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.pending and not self.placed.waits_for(fullname):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None

    @contextlib.contextmanager
    def importing(self, module_name: str, module: types.ModuleType) -> Iterator[None]:
        """Around a module's own code; its generators are placed when the modules that import it are complete."""
        outermost = not hasattr(self._under_way, "imported")
        if outermost:
            self._under_way.imported = []
        try:
            with self.placed.as_imported() if outermost else contextlib.nullcontext():
                yield
                self.set(module_name, module)
                self._under_way.imported.append((module_name, module))
        finally:
            if outermost:
                imported = self._under_way.imported
                del self._under_way.imported
                for each in imported:
                    self.place_generators(*each)

    def set(self, module_name: str, module: types.ModuleType) -> None:
        """Sets plain globals, attributes of classes, and attributes of objects."""
        plain, objects, _ = self.pending.get(module_name, ({}, {}, {}))
        for path, value in plain.items():
            owner, name = _owner(module, path), path[-1]
            here = _namespace(owner)
            if not (name in here and _same(here[name], value)):
                if owner is module:
                    setattr(module, name, value)
                elif owner is not None:
                    type.__setattr__(owner, name, value)
        for path, content in objects.items():
            value = _namespace(_owner(module, path)).get(path[-1])
            found = _content(value)
            if found is not None and found[0] == content[0] and not _same(found, content):
                _set_content(value, content)

    def place_generators(self, module_name: str, module: types.ModuleType) -> None:
        """Places the generators, and logs what differs from the driver."""
        others = self.pending.get(module_name, ({}, {}, {}))[2]
        missing = [f"{path} (a random generator)" for path in self.placed.put_in(module_name)]
        missing += [
            f"{'.'.join(path)} ({kind})"
            for path, kind in others.items()
            if _described(_namespace(_owner(module, path)).get(path[-1])) != kind
        ]
        missing = [what for what in missing if (module_name, what) not in self._told]
        self._told.update((module_name, what) for what in missing)
        if missing:
            logger.warning(
                "rayloader: %s of the module %s differ in the workers from what the program has set, and only plain "
                "values such as numbers, strings and dicts of them travel; pass what the dataset needs to its "
                "constructor",
                ", ".join(missing),
                module_name,
            )


class _Loader(importlib.abc.Loader):
    """Replaces a module's loader while it is imported."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        with _finder.importing(module.__spec__.name, module):
            self._loader.exec_module(module)


_finder = _Finder()
