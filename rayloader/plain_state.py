"""What `state_dict` of the user's objects gives, so that `torch.load(weights_only=True)` reads it.

Promise: `unpack(pack(state))` equals `state`, types included, also if it has gone through a file of torch's. NumPy's
arrays and scalars are held as tensors, in dicts, lists and tuples nested up to `NESTING` levels. Everything else is
left as it is: torch decides whether it can be saved, and read again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rayloader.errors import NESTING, too_deep

_ARRAY, _SCALAR = "rayloader: array", "rayloader: scalar"  # key of a tensor, in a dict with the name of its dtype
_ATOMS = {int, float, str, bytes, bool, type(None)}


def pack(state: Any, depth: int = 0) -> Any:
    """The state with tensors in the place of NumPy's numbers; `depth`: levels above it.

    Raises:
        StateError: there are too many levels.
    """
    if depth > NESTING:
        raise too_deep()
    kind = type(state)
    if kind is dict:
        return {key: pack(value, depth + 1) for key, value in state.items()}
    if kind in (list, tuple):
        return state if _ATOMS.issuperset(map(type, state)) else kind([pack(part, depth + 1) for part in state])
    if kind is np.ndarray or isinstance(state, np.generic):
        try:
            array, dtype = np.array(state), state.dtype
            # Torch does not unpickle its own tensors of wide unsigned numbers.
            signed = array.view(dtype.str.replace("u", "i")) if dtype.kind == "u" else array
            return {_ARRAY if kind is np.ndarray else _SCALAR: torch.from_numpy(signed), "dtype": dtype.name}
        except (TypeError, ValueError):  # of a dtype that torch has not, or in another byte order
            return state
    return state


def unpack(packed: Any) -> Any:
    """The inverse of `pack`."""
    kind = type(packed)
    if kind in (list, tuple):
        return packed if _ATOMS.issuperset(map(type, packed)) else kind(map(unpack, packed))
    if kind is not dict:
        return packed
    if packed.keys() == {_ARRAY, "dtype"}:
        return packed[_ARRAY].numpy().copy().view(packed["dtype"])
    if packed.keys() == {_SCALAR, "dtype"}:
        return packed[_SCALAR].numpy().view(packed["dtype"])[()]
    return {key: unpack(value) for key, value in packed.items()}
