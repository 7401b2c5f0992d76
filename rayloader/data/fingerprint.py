"""What a dataset's samples depend on, as 32 bytes that are the same in each run of a program.

Promise: datasets whose attributes, data or code differ have different fingerprints, as far as they can be seen:
attributes and data by their values, classes and functions of the program by their code, those of installed packages by
their names and the packages' versions. Equal ones may have different fingerprints; then samples are built again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import os
import types
from collections.abc import Iterable
from typing import Any

import cloudpickle
import numpy as np
import torch

from rayloader.namespaces import is_own_name
from rayloader.transport.raw import memory

# Of a class: where its source is, and not what it does.
_OF_THE_SOURCE = {"__firstlineno__", "__doc__", "__dict__", "__weakref__"}


def fingerprint_of(dataset: Any, given: str | Iterable[str | os.PathLike[str]] | None) -> bytes:
    """The fingerprint of a dataset.

    Args:
        dataset: it.
        given: a text that stands for everything; or paths of files, which are added.

    Raises:
        TypeError: the dataset can't be described.
        OSError: a file is not there.
    """
    described = hashlib.sha256()
    if isinstance(given, str):
        described.update(given.encode())
        return described.digest()
    try:
        _Describing(described, {}).dump(dataset)
    except Exception as error:  # whatever an object's pickling raises
        raise TypeError(
            f"the dataset can't be described for a cache in a folder: {type(error).__name__}: {error}; pass "
            "fingerprint='a text that you change whenever the samples change'"
        ) from error
    for path in given or ():
        status = os.stat(path)
        described.update(repr((os.fspath(path), status.st_size, status.st_mtime_ns)).encode())
    return described.digest()


class _Into(io.RawIOBase):
    """A file whose content goes into a hash."""

    def __init__(self, described: Any) -> None:
        self._described = described

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._described.update(content)
        return len(content)


class _Describing(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a dataset for its hash only: what has no value that is the same in each run is replaced by one.

    Args:
        described: the hash.
        seen: classes and functions that are described already, by identity.
    """

    def __init__(self, described: Any, seen: dict[int, Any]) -> None:
        super().__init__(_Into(described), protocol=5)
        self._seen = seen

    def persistent_id(self, obj: Any) -> Any:
        """Stands for a set, whose order is another one in each run."""
        return sorted(map(self._value, obj), key=repr) if type(obj) in (set, frozenset) else None

    def reducer_override(self, obj: Any) -> Any:
        """How another object is described."""
        if obj is str:  # what descriptions are made of
            return NotImplemented
        if isinstance(obj, (type, types.FunctionType)):
            return str, (repr(self._code_of(obj)),)
        if type(obj) is torch.Tensor and obj.layout is torch.strided:
            whole = obj.detach().cpu().contiguous()
            content = memory(whole.data_ptr(), whole.nbytes, whole) if whole.nbytes else b""
            return str, (f"{obj.dtype} {tuple(obj.shape)} {_hash(content)}",)
        if isinstance(obj, np.ndarray) and not obj.dtype.hasobject:
            content = np.ascontiguousarray(obj).reshape(-1).view(np.uint8) if obj.nbytes else b""
            return str, (f"{type(obj).__qualname__} {obj.dtype} {obj.shape} {_hash(content)}",)
        return super().reducer_override(obj)

    def _code_of(self, obj: Any) -> Any:
        """A class or a function: of the program by its code, otherwise by its package's version."""
        name = f"{obj.__module__}.{obj.__qualname__}"
        if not is_own_name(obj.__module__):
            return name, _version(str(obj.__module__).partition(".")[0])
        if id(obj) in self._seen:
            return name
        self._seen[id(obj)] = obj
        if isinstance(obj, type):
            parts = {key: value for key, value in vars(obj).items() if key not in _OF_THE_SOURCE}
            return name, [self._value(base) for base in obj.__bases__], self._values(parts)
        cells = [cell.cell_contents for cell in obj.__closure__ or ()]
        code, used = _code(obj.__code__)
        globals_ = {key: obj.__globals__[key] for key in used if key in obj.__globals__}
        held = [self._value(value) for value in (*cells, obj.__defaults__, obj.__kwdefaults__)]
        return name, code, held, self._values(globals_)

    def _values(self, named: dict[str, Any]) -> list[Any]:
        return [(key, self._value(value)) for key, value in sorted(named.items())]

    def _value(self, value: Any) -> Any:
        value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(value, (type, types.FunctionType)):
            return self._code_of(value)
        described = hashlib.sha256()
        try:
            _Describing(described, self._seen).dump(value)
        except Exception:  # a descriptor, a lock, a logger: nothing that samples depend on can be seen
            return type(value).__qualname__
        return described.hexdigest()


def _hash(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def _code(code: types.CodeType) -> tuple[Any, set[str]]:
    """What it does, without the lines where it is; and the names that it uses."""
    constants: list[Any] = []
    used = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, names = _code(constant)
            constants.append(inner)
            used |= names
        else:
            constants.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant))
    return (code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, constants), used


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
