"""The states of random generators, and of the user's objects, in types that `torch.load(weights_only=True)` reads.

Promise: `from_plain(to_plain(state))` equals `state`, types included, also if it has gone through a file of torch's.
NumPy's arrays and scalars are held as tensors, in dicts, lists and tuples nested up to `NESTING` levels. Everything
else is left as it is: torch decides whether it can be saved, and read again. Whether a generator can have a state that
was loaded is checked. Imported only where a loader's state is packed or loaded.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rayloader.errors import NESTING, too_deep, unfit
from rayloader.random.generator_kinds import BIT_GENERATORS, set_state
from rayloader.random.random_state import RandomState

_ARRAY, _SCALAR = "rayloader: array", "rayloader: scalar"  # key of a tensor, in a dict with the name of its dtype
_ATOMS = {int, float, str, bytes, bool, type(None)}
_TORCH_BYTES = len(torch.Generator().get_state())  # on the CPU; others have less


def to_plain(state: Any, depth: int = 0) -> Any:
    """The state with tensors in the place of NumPy's numbers; `depth`: levels above it.

    Raises:
        StateError: there are too many levels.
    """
    if depth > NESTING:
        raise too_deep()
    kind = type(state)
    if kind is dict:
        return {key: to_plain(value, depth + 1) for key, value in state.items()}
    if kind in (list, tuple):
        return state if _ATOMS.issuperset(map(type, state)) else kind([to_plain(part, depth + 1) for part in state])
    if kind is np.ndarray or isinstance(state, np.generic):
        try:
            array, dtype = np.array(state), state.dtype
            # Torch does not unpickle its own tensors of wide unsigned numbers.
            signed = array.view(dtype.str.replace("u", "i")) if dtype.kind == "u" else array
            return {_ARRAY if kind is np.ndarray else _SCALAR: torch.from_numpy(signed), "dtype": dtype.name}
        except (TypeError, ValueError):  # of a dtype that torch has not, or in another byte order
            return state
    return state


def from_plain(packed: Any) -> Any:
    """The inverse of `to_plain`."""
    kind = type(packed)
    if kind in (list, tuple):
        return packed if _ATOMS.issuperset(map(type, packed)) else kind(map(from_plain, packed))
    if kind is not dict:
        return packed
    if packed.keys() == {_ARRAY, "dtype"}:
        return packed[_ARRAY].numpy().copy().view(packed["dtype"])
    if packed.keys() == {_SCALAR, "dtype"}:
        return packed[_SCALAR].numpy().view(packed["dtype"])[()]
    return {key: from_plain(value) for key, value in packed.items()}


def pack(those: RandomState) -> dict[str, Any]:
    """Packs the states in plain types; about 14 kB in a file of torch's."""
    return {
        "python": those.python,
        "torch": those.torch,
        "numpy": None if those.numpy is None else to_plain(those.numpy[1]),
        "others": to_plain(those.others),
        "held": to_plain(those.held),
    }


def unpack(packed: dict[str, Any]) -> RandomState:
    """The inverse of `pack`."""
    python, torch_, numpy, others, held = map(packed.__getitem__, RandomState._fields)
    numpy = None if numpy is None else (b"", from_plain(numpy))
    return RandomState(python, torch_, numpy, from_plain(others), from_plain(held))


def checked(those: RandomState) -> RandomState:
    """These states, after other generators were set to them; raises what that raises."""
    own = (("Random", those.python), ("torch", those.torch), ("RandomState", those.numpy and those.numpy[1]))
    for kind, state in own:
        if state is not None:
            check_state(state, kind)
    if not isinstance(those.others, (tuple, type(None))):
        raise unfit("other generators", "a tuple", those.others)
    if not {*map(type, those.held or ())} <= {str}:
        raise unfit("held generators", "states by names", those.held)
    for state in (*(those.others or ()), *(those.held or {}).values()):
        check_state(state)
    return those


def check_state(state: Any, kind: str | None = None) -> None:
    """Raises an exception unless a generator can have this state.

    Args:
        state: of `state_of`.
        kind: Random, torch or RandomState; None if it is not known: the state of a class of the user's may be anything.
    """
    match state:
        case (3, tuple(), gauss) if kind in ("Random", None):
            if type(gauss) not in (float, type(None)):
                raise unfit("second normal number", "a float or None", gauss)
            set_state(random.Random(), state)
        case bytes() if kind == "torch" or (kind is None and len(state) >= _TORCH_BYTES):
            set_state(torch.Generator(), state)
        case {"bit_generator": str(name)} if kind == "RandomState" or (kind is None and name in BIT_GENERATORS):
            bits = BIT_GENERATORS[name]()
            set_state(np.random.RandomState(bits) if kind or "has_gauss" in state else bits, state)
        case _ if kind:
            raise unfit("generator", f"one of the kind {kind}", state)
