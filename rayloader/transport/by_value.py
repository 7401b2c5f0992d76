"""Pickles functions and classes that no import finds, as cloudpickle does, and what cloudpickle leaves out.

Since cloudpickle 3.1.3 code arrives without the name of its file: tracebacks and warnings from functions of `__main__`
would show `<dynamic-code>`, and no lines. Functions under `functools.lru_cache` that no import finds arrive with an
empty cache. Cloudpickle leaves `__slots__` out when it recreates a class: instances created there would have a
`__dict__`, and could not be recreated from the driver's class, which has none. So the slots are added.

NOTE [The driver's classes]. Cloudpickle sends the classes of `__main__` and of notebooks by value, under an id, and
overwrites the class, attribute by attribute, in a process that has the id already. From driver to worker that is
wanted: warm workers see changed methods. A batch must not do it to the driver's class; so there only the id counts,
and the definition is included for a process that no longer has the class. The processes that a program spawns, for
instance with `torch.multiprocessing.spawn`, have `__mp_main__` in place of `__main__`: the same module, which a worker
lacks too.

The only state is a cache of definitions, which live as long as their classes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import multiprocessing  # noqa: F401  # cloudpickle wants the module to be there, and this import makes it
import operator
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import cloudpickle

from rayloader._compat import classes_by_id, fill_class, id_of_class, ids_by_class, make_class, make_enum

cloudpickle.register_pickle_by_value(types.ModuleType("__mp_main__"))

_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]
_Cached = type(functools.lru_cache(len))
_ArrayType: Any = type(ctypes.Array)

_definitions: WeakKeyDictionary[type, tuple[str, bytes | None]] = WeakKeyDictionary()  # id, by-value pickle


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


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes by value if an import does not find them."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduce, _Cached: _reduce_cached})

    def reducer_override(self, obj: Any) -> Any:
        """How a function or a class is pickled; NotImplemented for anything else."""
        if type(obj) is _ArrayType and obj is not ctypes.Array and obj._type_ * obj._length_ is obj:
            return operator.mul, (obj._type_, obj._length_)  # such a class has no name in a module
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """The pickle of an object."""
    file = io.BytesIO()
    ByValuePickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


# ---- classes


def with_slots(cls: type, reduced: Any) -> Any:
    """Cloudpickle's reduction of a class, with its `__slots__` if the class travels by value."""
    if not isinstance(reduced, tuple) or reduced[0] is not make_class or "__slots__" not in vars(cls):
        return reduced
    if NamedTuple in vars(cls).get("__orig_bases__", ()):  # it is called again, and sets them itself
        return reduced
    make, (kind, name, bases, namespace, *others), *state = reduced
    return make, (kind, name, bases, {**namespace, "__slots__": vars(cls)["__slots__"]}, *others), *state


def reduce_by_id(cls: type, reduce_by_value: Callable[[type], Any]) -> Any:
    """A class's reduction that finds it by its id; the result of `reduce_by_value` for a class that travels by name."""
    definition = _definitions.get(cls)
    if definition is None:
        reduced = reduce_by_value(cls)
        if reduced is NotImplemented or reduced[0] not in (make_class, make_enum):
            return reduced
        try:
            text = dumps(cls)
        except Exception:  # something unpicklable was added to it in this process; the id alone must suffice
            text = None
        definition = _definitions[cls] = (id_of_class(cls), text)
    return _known_class, definition


def _known_class(tracker_id: str, definition: bytes | None) -> Any:
    cls = classes_by_id.get(tracker_id)
    if cls is None and definition is None:
        raise pickle.UnpicklingError("a class of this batch is unknown here and could not be pickled there")
    return _Definition(definition or b"").load() if cls is None else cls


class _Definition(pickle.Unpickler):
    """Loads a class by value, without changing the classes it refers to that this process has."""

    def __init__(self, definition: bytes) -> None:
        super().__init__(io.BytesIO(definition))
        self.known = set(ids_by_class)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._fill if found is fill_class else found

    def _fill(self, cls: type, state: object) -> object:
        return cls if cls in self.known else fill_class(cls, state)
