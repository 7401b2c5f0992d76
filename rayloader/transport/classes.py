"""Batches that come back to the driver refer to the driver's own classes.

Cloudpickle sends the classes of `__main__` and of notebooks by value, under an id, and overwrites the class, attribute
by attribute, in a process that has the id already. From driver to worker that is wanted: warm workers see changed
methods. A batch must not do it to the driver's class; so there only the id counts, and the definition is included for a
process that no longer has the class. The processes that a program spawns, for instance with
`torch.multiprocessing.spawn`, have `__mp_main__` in place of `__main__`: the same module, which a worker lacks too.

Cloudpickle leaves `__slots__` out when it recreates a class. Instances created there would have a `__dict__`, and
could not be recreated from the driver's class, which has none. So the slots are added.

The only state is a cache of definitions, which live as long as their classes.
"""

from __future__ import annotations

import io
import multiprocessing  # noqa: F401  # cloudpickle wants the module to be there, and this import makes it
import pickle
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import cloudpickle

from rayloader._compat_cloudpickle import classes_by_id, fill_class, id_of_class, ids_by_class, make_class, make_enum
from rayloader.transport import by_value

cloudpickle.register_pickle_by_value(types.ModuleType("__mp_main__"))

_definitions: WeakKeyDictionary[type, tuple[str, bytes | None]] = WeakKeyDictionary()  # id, by-value pickle


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
            text = by_value.dumps(cls)
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
