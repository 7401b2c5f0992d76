"""Pickles objects that no import finds, as cloudpickle does, and what cloudpickle leaves out or cannot pickle.

Since cloudpickle 3.1.3 code arrives without the name of its file: tracebacks and warnings from functions of `__main__`
would show `<dynamic-code>`, and no lines. Functions under `functools.lru_cache` that no import finds arrive with an
empty cache. The classes of ctypes are made again by its own means. No state.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import operator
import pickle
import sys
import types
from typing import Any

import cloudpickle

from rayloader._compat_cloudpickle import make_class

_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]
_Cached = type(functools.lru_cache(len))
_CTYPES = {type(base): base for base in (ctypes.Structure, ctypes.Union, ctypes.Array)}  # by their metaclasses
_AT_FIRST = {"_type_", "_length_", "_fields_", "_anonymous_", "_pack_", "_align_", "_layout_"}


def _reduce(code: types.CodeType) -> Any:
    make, arguments = _reduce_code(code)
    if code.co_filename in arguments:
        return make, arguments
    return _code_of_file, (make, arguments, code.co_filename)


def _code_of_file(make: Any, arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=filename)


def _reduce_cached(cached: Any) -> Any:
    module, name = getattr(cached, "__module__", None) or "", getattr(cached, "__qualname__", "")
    with contextlib.suppress(AttributeError):
        if module not in ("__main__", "__mp_main__") and operator.attrgetter(name)(sys.modules.get(module)) is cached:
            return name  # which pickle finds it by
    attributes = {key: value for key, value in vars(cached).items() if key not in ("__wrapped__", "cache_parameters")}
    return _cached, (cached.__wrapped__, cached.cache_parameters()), attributes


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_ctype(cls: Any, reduced: Any) -> Any:
    """The reduction of a class of ctypes, or of one of their metaclasses, none of which has a name in a module."""
    if cls in _CTYPES:
        return type, (_CTYPES[cls],)
    if issubclass(cls, ctypes.Array) and cls is not ctypes.Array and cls._type_ * cls._length_ is cls:
        return operator.mul, (cls._type_, cls._length_)
    if not isinstance(reduced, tuple) or reduced[0] is not make_class:
        return reduced
    make, (kind, name, bases, namespace, *more), (attributes, slots), *others = reduced
    # ctypes reads these when it makes the class, and makes the fields' descriptors itself.
    first = {key: value for key, value in attributes.items() if key in _AT_FIRST}
    own = {key: value for key, value in attributes.items() if key not in first and type(value) is not _Field}
    return make, (kind, name, bases, namespace | first, *more), (own, slots), *others


class _Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_int)]


_Field = type(_Point.x)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes by value if an import does not find them."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduce, _Cached: _reduce_cached})

    def reducer_override(self, obj: Any) -> Any:
        """How a function or a class is pickled; NotImplemented for anything else."""
        reduced, kind = super().reducer_override(obj), type(obj)
        return _reduce_ctype(obj, reduced) if kind in _CTYPES or (kind is type and obj in _CTYPES) else reduced


def dumps(obj: Any) -> bytes:
    """The pickle of an object."""
    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()
