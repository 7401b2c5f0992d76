"""Results of the user's `state_dict`, in types that JSON and `torch.load(weights_only=True)` know.

Promise: `unpack(pack(state))` equals `state`, types included, for dicts, lists, tuples, sets and the types below,
nested in any way up to `NESTING` levels, also if what `pack` gives has gone through a file of torch's or through JSON.
Values of other types, tensors among them, are left unchanged; torch or JSON decides whether they can be saved.
"""

from __future__ import annotations

import binascii
import builtins
import collections
import math
import pathlib
from typing import Any

import numpy as np

from rayloader.errors import NESTING, too_deep, unfit

_HUGE = 10**600  # whole numbers from there on have digits that Python may refuse to show, and JSON too
_TYPE = "rayloader: type"
_TUPLE = "rayloader: tuple"  # begins a list that stands for one: as a dict it would be nested a level deeper


def text_of(content: bytes) -> str:
    """Bytes as text: JSON has no others, and torch's files hold bytes in half as many again."""
    return binascii.b2a_base64(content, newline=False).decode("ascii")


def bytes_of(text: str) -> bytes:
    """The inverse of `text_of`."""
    return binascii.a2b_base64(text)


def checked_dtype(text: Any) -> np.dtype[Any]:
    """The dtype of this name; raises an exception if its values may be objects, which would be addresses in memory."""
    dtype = np.dtype(text) if type(text) is str else None
    if dtype is None or dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise unfit("dtype", "the name of a type of numbers", text)
    return dtype


def pack(state: Any, depth: int = 0) -> Any:
    """The state, with dicts that describe values of types that torch refuses; `depth`: levels above it.

    Raises:
        StateError: there are too many levels.
    """
    if depth > NESTING:
        raise too_deep()
    match state:
        case np.ndarray() | np.generic() if not state.dtype.hasobject and state.dtype.names is None:
            name = "array" if isinstance(state, np.ndarray) else "scalar"
            content = text_of(state.tobytes())
            return {_TYPE: name, "dtype": state.dtype.str, "shape": list(state.shape), "content": content}
        case bytes() if type(state) is bytes:
            return {_TYPE: "bytes", "content": text_of(state)}
        case np.dtype() if state.names is None and not state.hasobject:
            return {_TYPE: "dtype", "dtype": state.str}
        case collections.defaultdict() if type(state) is collections.defaultdict and _names_type(state.default_factory):
            factory = state.default_factory
            return {_TYPE: "defaultdict", "factory": factory and factory.__name__, "items": _items(state, depth)}
        case collections.deque() if type(state) is collections.deque:
            return {_TYPE: "deque", "items": [pack(part, depth + 2) for part in state], "maxlen": state.maxlen}
        case pathlib.PurePath() if type(state).__name__ in _PATHS:
            return {_TYPE: type(state).__name__, "path": str(state)}
        case set() | frozenset() if type(state) in (set, frozenset):
            # In the same order in each process.
            return {_TYPE: type(state).__name__, "items": sorted([pack(part, depth + 2) for part in state], key=repr)}
        case int() if type(state) is int and abs(state) >= _HUGE:
            return {_TYPE: "int", "hex": hex(state)}
        case range() | slice():
            parts = state.start, state.stop, state.step
            return {_TYPE: type(state).__name__, "items": [pack(part, depth + 2) for part in parts]}
    return _pack_container(state, depth)


def _pack_container(state: Any, depth: int) -> Any:
    kind = type(state)
    if kind is dict and _TYPE not in state and all(type(key) is str for key in state):
        return {key: pack(value, depth + 1) for key, value in state.items()}
    if kind in (dict, collections.OrderedDict):
        return {_TYPE: kind.__name__, "items": _items(state, depth)}
    if kind is tuple:
        return [_TUPLE, *(pack(part, depth + 1) for part in state)]
    if kind is list and not _stands_for_tuple(state):
        return [pack(part, depth + 1) for part in state]
    if kind is list:
        return {_TYPE: "list", "items": [pack(part, depth + 2) for part in state]}
    return state


def _stands_for_tuple(packed: list[Any]) -> bool:
    return bool(packed) and type(packed[0]) is str and packed[0] == _TUPLE


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    if type(packed) is dict:
        if _TYPE in packed:
            return _rebuilt(packed[_TYPE], packed)
        return {key: unpack(value) for key, value in packed.items()}
    if type(packed) is list:
        return tuple(map(unpack, packed[1:])) if _stands_for_tuple(packed) else [unpack(part) for part in packed]
    return packed


def _rebuilt(name: str, packed: dict[str, Any]) -> Any:
    match name:
        case "array" | "scalar":
            count = math.prod(packed["shape"])
            array = np.frombuffer(bytearray(bytes_of(packed["content"])), checked_dtype(packed["dtype"]), count)
            return array.reshape(packed["shape"])[() if name == "scalar" else ...]
        case "bytes":
            return bytes_of(packed["content"])
        case "dtype":
            return checked_dtype(packed["dtype"])
        case "defaultdict":
            factory = packed["factory"]
            return collections.defaultdict(factory and _FACTORIES[factory], _unpack_items(packed))
        case "dict" | "OrderedDict":
            return {"dict": dict, "OrderedDict": collections.OrderedDict}[name](_unpack_items(packed))
        case "int":
            return int(packed["hex"], 16)
        case "deque":
            return collections.deque(map(unpack, packed["items"]), packed["maxlen"])
        case "list" | "set" | "frozenset":
            return getattr(builtins, name)(map(unpack, packed["items"]))
        case "range" | "slice":
            return getattr(builtins, name)(*map(unpack, packed["items"]))
    return _PATHS[name](packed["path"])


_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "PosixPath": pathlib.Path,  # on the system that loads the state
    "WindowsPath": pathlib.Path,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}


def _names_type(factory: Any) -> bool:
    return factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory


def _items(state: Any, depth: int) -> list[Any]:
    return [[pack(key, depth + 3), pack(value, depth + 3)] for key, value in state.items()]


def _unpack_items(packed: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(unpack(key), unpack(value)) for key, value in packed["items"]]
