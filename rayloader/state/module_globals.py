"""Plain globals of the program's own modules: a forked worker would have them as the program has set them.

Promise: whenever a worker imports such a module, numbers, strings, paths, and tuples, lists, sets, dicts and namespaces
of these are what they were in the driver at `iter()`. What differs and is not plain is said by name. Modules of the
standard library and of installed packages are as the worker imports them, and so is `__main__`, whose functions bring
along what they use.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import itertools
import logging
import os
import pathlib
import pickle
import sys
import sysconfig
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger("rayloader")

_ATOMS = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_ATOMS |= {type(pathlib.PurePath()), type(pathlib.Path())}
_SEQUENCES = {tuple, list, set, frozenset}
_NAMESPACES = {argparse.Namespace, types.SimpleNamespace}
# What a module defines rather than holds.
_DEFINITIONS = type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, functools.partial
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = tuple(
    os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _OURS)
)
# A global of more parts than this is data, and too much to compare at each `iter()`.
_MAX_PARTS = 10_000
# Pickling and comparing recurse.
_MAX_DEPTH = 100
# Not by getattr: that would import a module that is lazy.
_MODULE_DICT = vars(types.ModuleType)["__dict__"]


@dataclass(frozen=True, slots=True)
class ModuleGlobals:
    """Of the driver, at `iter()`.

    Attributes:
        plain: pickled: value by name by module.
        others: type, as text, by name by module, of what is not plain.
    """

    plain: bytes
    others: dict[str, dict[str, str]]

    @classmethod
    def capture(cls) -> ModuleGlobals:
        """Those of this process."""
        plain: dict[str, dict[str, Any]] = {}
        others: dict[str, dict[str, str]] = {}
        for module_name, module in list(sys.modules.items()):
            attributes = _MODULE_DICT.__get__(module) if issubclass(type(module), types.ModuleType) else {}
            if not _is_own(attributes.get("__file__")) or module_name in ("__main__", "__mp_main__"):
                continue
            for name, value in list(attributes.items()):
                if name.startswith("__") or issubclass(type(value), _DEFINITIONS):  # `__class__` may be the program's
                    continue
                if _is_plain(value):
                    plain.setdefault(module_name, {})[name] = value
                else:
                    others.setdefault(module_name, {})[name] = _type_name(value)
        return cls(pickle.dumps(plain, pickle.HIGHEST_PROTOCOL), others)

    def adopt(self) -> None:
        """In a worker: sets those of the modules that it has, and of the others when it imports them."""
        plain = pickle.loads(self.plain)
        _finder.pending = {name: (plain.get(name, {}), self.others.get(name, {})) for name in plain | self.others}
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        for name in list(_finder.pending):
            if (module := sys.modules.get(name)) is not None:
                _finder.set(name, module)


@functools.cache
def _is_own(file: Any) -> bool:
    """Whether a file of source belongs to the program."""
    if not isinstance(file, str):
        return False
    path = os.path.abspath(file)
    return not _INSTALLED.intersection(path.split(os.sep)) and not path.startswith(_LIBRARIES)


def _is_plain(value: Any) -> bool:
    """Whether it consists of what travels, and is small enough; nothing is called that the program has defined."""
    parts = [(value, 0)]
    for count in itertools.count():
        if not parts:
            return True
        part, depth = parts.pop()
        if count == _MAX_PARTS or depth > _MAX_DEPTH:
            return False
        kind = type(part)
        if kind in _NAMESPACES:
            part, kind = vars(part), dict
        if kind is dict:
            parts += [(inner, depth + 1) for inner in (*part.keys(), *part.values())]
        elif kind in _SEQUENCES:
            parts += [(inner, depth + 1) for inner in part]
        elif kind not in _ATOMS:
            return False
    raise AssertionError


def _same(one: Any, other: Any) -> bool:
    """Whether two plain values are equal, and of the same types all through."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _NAMESPACES:
        one, other, kind = vars(one), vars(other), dict
    if kind is dict:
        parts = [itertools.chain(*each.items()) for each in (one, other)]
        return len(one) == len(other) and all(map(_same, *parts))
    if kind in (tuple, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Finder(importlib.abc.MetaPathFinder):
    """Comes before the others, and sets the globals of a module that one of them finds when it has been imported."""

    def __init__(self) -> None:
        self.pending: dict[str, tuple[dict[str, Any], dict[str, str]]] = {}
        self._told: set[tuple[str, str]] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.pending:
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

    def set(self, module_name: str, module: types.ModuleType) -> None:
        plain, others = self.pending[module_name]
        for name, value in plain.items():
            if not (name in vars(module) and _same(vars(module)[name], value)):
                setattr(module, name, value)
        missing = [
            name
            for name, kind in others.items()
            if _type_name(vars(module).get(name)) != kind and (module_name, name) not in self._told
        ]
        self._told.update((module_name, name) for name in missing)
        if missing:
            logger.warning(
                "rayloader: %s of the module %s differ in the workers from what the program has set, and only plain "
                "values such as numbers, strings and dicts of them travel; pass what the dataset needs to its "
                "constructor",
                ", ".join(f"{name} ({others[name]})" for name in missing),
                module_name,
            )


class _Loader(importlib.abc.Loader):
    """Stands in for a module's loader while it is imported."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _finder.set(module.__spec__.name, module)


_finder = _Finder()
