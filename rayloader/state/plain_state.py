"""Results of the user's `state_dict`, in types that `torch.load(weights_only=True)` knows.

Promise: `unpack(pack(state))` equals `state`, types included, for dicts, lists, tuples, sets and the types below,
nested in any way up to `NESTING` levels. Values of other types are left unchanged; torch decides whether a file with
them can be loaded.
"""

from __future__ import annotations

import builtins
import collections
import math
import pathlib
from typing import Any

import numpy as np
import torch

from rayloader.errors import StateError

NESTING = 100  # levels as packed; each takes several nested calls, and Python allows 1,000 by default
_TYPE = "rayloader: type"
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))


def too_deep() -> StateError:
    """The error for a state that is nested too deep."""
    return StateError(
        f"what state_dict() gives must not hold itself, nor be nested more than {NESTING} levels deep; give its parts "
        "in one list, with their places in it instead of the parts themselves"
    )


def pack(state: Any, depth: int = 0) -> Any:
    """The state, with dicts that describe values of types that torch refuses; `depth`: levels above it.

    Raises:
        StateError: there are too many levels.
    """
    if depth > NESTING:
        raise too_deep()
    match state:
        case np.ndarray() | np.generic() if not state.dtype.hasobject and state.dtype.names is None:
            content = torch.frombuffer(bytearray(state.tobytes()) or bytearray(1), dtype=torch.uint8)
            name = "array" if isinstance(state, np.ndarray) else "scalar"
            return {_TYPE: name, "dtype": state.dtype.str, "shape": list(state.shape), "content": content}
        case np.dtype() if state.names is None and not state.hasobject:
            return {_TYPE: "dtype", "dtype": state.str}
        case collections.defaultdict() if type(state) is collections.defaultdict and _names_type(state.default_factory):
            factory = state.default_factory
            return {_TYPE: "defaultdict", "factory": factory and factory.__name__, "items": _items(state, depth)}
        case collections.deque() if type(state) is collections.deque:
            return {_TYPE: "deque", "items": [pack(part, depth + 2) for part in state], "maxlen": state.maxlen}
        case pathlib.PurePath() if type(state).__name__ in _PATHS:
            return {_TYPE: type(state).__name__, "path": str(state)}
        case frozenset() if type(state) is frozenset:
            return {_TYPE: "frozenset", "items": [pack(part, depth + 2) for part in state]}
        case range() | slice():
            parts = state.start, state.stop, state.step
            return {_TYPE: type(state).__name__, "items": [pack(part, depth + 2) for part in parts]}
    return _pack_container(state, depth)


def _pack_container(state: Any, depth: int) -> Any:
    if type(state) in (dict, collections.OrderedDict):
        if all(_is_plain_key(key) for key in state) and _TYPE not in state:
            return type(state)((key, pack(value, depth + 1)) for key, value in state.items())
        return {_TYPE: type(state).__name__, "items": _items(state, depth)}
    return type(state)([pack(part, depth + 1) for part in state]) if type(state) in (list, tuple) else state


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    if type(packed) is dict and _TYPE in packed:
        return _rebuilt(packed[_TYPE], packed)
    if type(packed) in (dict, collections.OrderedDict):
        return type(packed)((key, unpack(value)) for key, value in packed.items())
    return type(packed)(map(unpack, packed)) if type(packed) in (list, tuple) else packed


def _rebuilt(name: str, packed: dict[str, Any]) -> Any:
    parts = [unpack(part) for part in packed.get("items", ())]
    match name:
        case "array" | "scalar":
            count = math.prod(packed["shape"])
            array = np.frombuffer(bytearray(packed["content"].cpu().numpy().tobytes()), packed["dtype"], count)
            return array.reshape(packed["shape"])[() if name == "scalar" else ...]
        case "dtype":
            return np.dtype(packed["dtype"])
        case "defaultdict":
            factory = packed["factory"]
            return collections.defaultdict(factory and _FACTORIES[factory], parts)
        case "deque":
            return collections.deque(parts, packed["maxlen"])
        case "dict" | "OrderedDict":
            return {"dict": dict, "OrderedDict": collections.OrderedDict}[name](parts)
        case "frozenset":
            return frozenset(parts)
        case "range" | "slice":
            return getattr(builtins, name)(*parts)
    return _PATHS[name](packed["path"])


_FACTORIES = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)}
_PATHS = {
    kind.__name__: getattr(pathlib, "Path" if "Pure" not in kind.__name__ else kind.__name__)
    for kind in (
        pathlib.PosixPath,
        pathlib.WindowsPath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
    )
}


def _names_type(factory: Any) -> bool:
    return factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory


def _items(state: Any, depth: int) -> list[Any]:
    return [(pack(key, depth + 3), pack(value, depth + 3)) for key, value in state.items()]


def _is_plain_key(key: Any) -> bool:
    return all(map(_is_plain_key, key)) if type(key) is tuple else type(key) in _PLAIN_KEYS
