"""What a dataset's samples depend on, as 32 bytes that are the same in each run of a program.

Promise: datasets whose attributes, data or code differ have different fingerprints, as far as they can be seen:
attributes and data by their values, methods by their code and the object that they are bound to, classes and functions
of the program by their code, with the globals and the modules of the program that it names, also in texts; those of
installed packages by their names and the packages' versions. Equal ones may have different fingerprints; then samples
are built again. What samples contain is described in the same way, to compare those that are built again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
import types
import typing
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch

from rayloader._compat import no_torch_function
from rayloader.namespaces import attributes_in, is_a, is_own_name, names_in, namespace_of
from rayloader.random.generator_kinds import global_generators
from rayloader.transport.raw import memory

# Of a class: where its source is, and not what it does; and attributes in an order that differs from run to run.
_OF_THE_SOURCE = {"__firstlineno__", "__doc__", "__dict__", "__weakref__", "__static_attributes__"}
# cloudpickle gives them another number in each run.
_VARIABLES = typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple
_SETS = set, frozenset, weakref.WeakSet
# Of each run, and no part of what samples are: those of the global generators' functions must not draw.
_OF_THE_RUN = {id(os.environ), *(id(generator) for generator, *_ in global_generators())}


def fingerprint_of(dataset: Any, given: Any) -> bytes:
    """The fingerprint of a dataset.

    Args:
        dataset: it.
        given: a text that stands for everything; or paths of files or one `Path`, which are added; None.

    Raises:
        TypeError: the dataset can't be described, or what was given is something else.
        OSError: a file is not there.
    """
    described = hashlib.sha256()
    if isinstance(given, str):
        described.update(given.encode())
        return described.digest()
    paths = _paths_in(given)
    try:
        _Describing(described, {}).dump(dataset)
    except Exception as error:  # whatever an object's pickling raises
        raise TypeError(
            f"the dataset can't be described for a cache in a folder: {type(error).__name__}: {error}; pass "
            "fingerprint='a text that you change whenever the samples change'"
        ) from error
    for path in paths:
        status = os.stat(path)
        described.update(repr((os.fspath(path), status.st_size, status.st_mtime_ns)).encode())
    return described.digest()


def _paths_in(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, os.PathLike):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray)):
        paths = list(given)
        if all(isinstance(path, (str, bytes, os.PathLike)) for path in paths):
            return paths
    raise TypeError(f"fingerprint= must be a text, or paths of files, got {given!r}")


def content_of(sample: Any) -> bytes:
    """What a sample contains, in 32 bytes: the same for equal ones, in any process."""
    described = hashlib.sha256()
    try:
        _DescribingContent(described, {}).dump(sample)
    except ValueError:  # it contains itself
        _Describing(described := hashlib.sha256(), {}, lenient=True).dump(sample)
    return described.digest()


class WithoutContent:
    """A base of classes whose objects say nothing of what samples are: they have no description."""


class _Describing(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a dataset for its hash only: what has no value that is the same in each run is replaced by one.

    Args:
        described: the hash.
        seen: classes, functions and names in modules that are described already, with their numbers.
        lenient: what can't be pickled counts by its class and attributes: code may use a lock or a logger.
    """

    def __init__(self, described: Any, seen: dict[Any, Any], *, lenient: bool = False) -> None:
        super().__init__(types.SimpleNamespace(write=described.update), protocol=5)
        self._seen, self._lenient = seen, lenient

    def persistent_id(self, obj: Any) -> Any:
        """Stands for a set, whose order is another one in each run; so no item may depend on those before it."""
        if type(obj) not in _SETS:
            return None
        return sorted((type(self)(hashlib.sha256(), dict(self._seen))._value(item) for item in obj), key=repr)

    def reducer_override(self, obj: Any) -> Any:
        """How another object is described."""
        if obj is str:  # what descriptions are made of
            return NotImplemented
        if (described := self._in_words(obj)) is not None:
            return str, (described,)
        if is_a(obj, weakref.ref):
            return tuple, ((obj(),),)
        if (reduced := super().reducer_override(obj)) is not NotImplemented or not self._lenient:
            return reduced
        try:
            reduce = self.dispatch_table.get(type(obj))
            return obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        except Exception:  # what else it holds can't be seen
            return str, (repr(self._code_of(type(obj))),), attributes_in(obj)

    def _in_words(self, obj: Any) -> str | None:
        """The description of an object that is not pickled for it."""
        kind = type(obj).__qualname__
        if isinstance(obj, (type, types.FunctionType)):
            return repr(self._code_of(obj))
        if is_a(obj, WithoutContent):
            return ""
        if id(obj) in _OF_THE_RUN:
            return kind
        if is_a(obj, _VARIABLES):
            return repr(obj)
        if is_a(obj, property):
            return repr((kind, *map(self._value, (obj.fget, obj.fset, obj.fdel))))
        if is_a(obj, (staticmethod, classmethod)):
            return repr((kind, self._value(obj.__func__)))
        if is_a(obj, types.ModuleType):
            return repr(self._used_of(obj, namespace_of(obj)))
        if "__wrapped__" in (attributes_in(obj) or ()):  # such as functools.lru_cache's, which pickle by their names
            return repr((kind, self._values(vars(obj))))
        if is_a(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            data = np.ascontiguousarray(obj.view(np.ndarray))
            content = data.reshape(-1).view(np.uint8) if data.nbytes else b""
            held = {} if is_a(obj, np.memmap) else attributes_in(obj) or {}  # such as a mask
            return f"{kind} {obj.dtype} {obj.shape} {_hash(content)} {self._values(held)}"
        return None

    def _tensor(self, tensor: torch.Tensor) -> str | None:
        """A tensor, also of a class of the user's; None if it has no plain memory."""
        with no_torch_function():
            plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
            if not plain or tensor.device.type == "meta":
                return None
            whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            content = memory(whole.data_ptr(), whole.nbytes, whole) if whole.nbytes else b""
            kind = type(tensor).__qualname__
            return f"{kind} {tensor.dtype} {tuple(tensor.shape)} {_hash(content)} {self._values(vars(tensor))}"

    def _code_of(self, obj: Any) -> Any:
        """A class or a function: of the program by its code, otherwise by its package's version."""
        name = f"{obj.__module__}.{obj.__qualname__}"
        # A function that another one has made may hold values, also if that one is of a package.
        if not _is_own(obj.__module__) and "<locals>" not in name:
            return name, _version(str(obj.__module__).partition(".")[0])
        if id(obj) in self._seen:
            return name, self._seen[id(obj)][0]
        self._seen[id(obj)] = len(self._seen), obj
        if isinstance(obj, type):
            parts = {key: value for key, value in vars(obj).items() if key not in _OF_THE_SOURCE}
            return name, [self._value(base) for base in (type(obj), *obj.__bases__)], self._values(parts)
        cells = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
        held = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        held |= {"__defaults__": obj.__defaults__, "__kwdefaults__": obj.__kwdefaults__, "__dict__": vars(obj)}
        used = {*names_in(obj.__code__), *_texts_in(obj.__code__)}
        return name, _code(obj.__code__), self._values(held, used), self._values(_named(obj.__globals__, used), used)

    def _used_of(self, module: types.ModuleType, used: Iterable[str]) -> Any:
        """A module: of the program by what code uses of it, otherwise by its package's version."""
        name, contents = module.__name__, namespace_of(module)
        if not _is_own(name):
            return name, _version(name.partition(".")[0])
        new = {key for key in used if not key.startswith("__") and (id(module), key) not in self._seen}
        self._seen |= {(id(module), key): (0, module) for key in new}
        return name, self._values({key: contents[key] for key in new if key in contents}, used)

    def _values(self, named: Mapping[str, Any], used: Iterable[str] = ()) -> list[Any]:
        return [
            (key, self._used_of(value, used) if is_a(value, types.ModuleType) else self._value(value))
            for key, value in sorted(named.items())
        ]

    def _value(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)):
            return self._code_of(value)
        described = hashlib.sha256()
        try:
            type(self)(described, self._seen, lenient=True).dump(value)
        except Exception:  # as above, but pickling has noticed it later
            return type(value).__qualname__
        return described.hexdigest()


class _DescribingContent(_Describing):
    """Describes a sample: classes and functions by their names, a part that it holds twice like two equal ones."""

    def __init__(self, described: Any, seen: dict[Any, Any], *, lenient: bool = True) -> None:
        super().__init__(described, seen, lenient=lenient)
        self.fast = True  # without a record of which parts are one object: that may depend on what a dataset has kept

    def _code_of(self, obj: Any) -> Any:
        return f"{obj.__module__}.{obj.__qualname__}"


def _texts_in(code: types.CodeType) -> Iterator[str]:
    """The texts in a function, and in those within it: by them code may look up what it uses."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts_in(constant)


def _named(globals_: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """What the names in a function's code mean: its globals, and modules of the program that it may import."""
    package = f"{globals_.get('__package__') or ''}."
    names = [(name, full) for name in used for full in (name, package + name) if full in sys.modules]
    imported = {name: sys.modules[full] for name, full in names if _is_own(full)}
    return imported | {name: globals_[name] for name in used if name in globals_}


def _is_own(module: Any) -> bool:
    """Whether the program has written the module of this name; one that was loaded without being entered is its own."""
    return module not in sys.modules or is_own_name(module)


def _hash(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def _code(code: types.CodeType) -> Any:
    """What it does, without the lines where it is."""
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(_code(constant))
        else:
            constants.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant))
    handlers = code.co_exceptiontable.hex()
    return code.co_name, code.co_code.hex(), handlers, code.co_names, code.co_varnames, constants


@functools.cache
def _version(package: str) -> str:
    """Of an installed package, which may belong to a distribution of another name, as PIL does to pillow."""
    for distribution in (package, *_distributions().get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
