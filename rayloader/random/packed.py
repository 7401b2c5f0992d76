"""The states of random generators in plain types, and whether a generator can have a state that was loaded.

Imported only where a loader's state is packed or loaded.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rayloader import plain_state
from rayloader.errors import unfit
from rayloader.random.generator_kinds import BIT_GENERATORS, set_state
from rayloader.random.random_state import RandomState

_TORCH_BYTES = len(torch.Generator().get_state())  # on the CPU; others have less


def pack(those: RandomState) -> dict[str, Any]:
    """Packs the states in plain types; about 14 kB in a file of torch's."""
    return {
        "python": those.python,
        "torch": those.torch,
        "numpy": None if those.numpy is None else plain_state.pack(those.numpy[1]),
        "others": None if those.others is None else tuple(map(plain_state.pack, those.others)),
        "held": None if those.held is None else {name: plain_state.pack(state) for name, state in those.held.items()},
    }


def unpack(packed: dict[str, Any]) -> RandomState:
    """The inverse of `pack`."""
    python, torch_, numpy, others, held = map(packed.__getitem__, RandomState._fields)
    return RandomState(
        python,
        torch_,
        None if numpy is None else (b"", plain_state.unpack(numpy)),
        None if others is None else tuple(map(plain_state.unpack, others)),
        None if held is None else {name: plain_state.unpack(state) for name, state in held.items()},
    )


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
