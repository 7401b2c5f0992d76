"""The states of random generators in plain types, and whether a generator can have a state that was loaded.

Imported only where a loader's state is packed or loaded.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from rayloader import plain_state
from rayloader.errors import unfit
from rayloader.random.generator_kinds import BIT_GENERATORS, make_generator, set_state
from rayloader.random.generators import Located
from rayloader.random.random_state import RandomState
from rayloader.random.search import is_path

_TORCH_BYTES = len(torch.Generator().get_state())  # on the CPU; others have less


def pack(those: RandomState) -> dict[str, Any]:
    """Packs the states in plain types; about 14 kB in a file of torch's."""
    return {
        "python": those.python,
        "torch": those.torch,
        "numpy": None if those.numpy is None else plain_state.pack(those.numpy[1]),
        "others": None if those.others is None else tuple(map(plain_state.pack, those.others)),
        "located": None
        if those.located is None
        else tuple({**one._asdict(), "state": plain_state.pack(one.state)} for one in those.located),
    }


def unpack(packed: dict[str, Any]) -> RandomState:
    """The inverse of `pack`."""
    python, torch_, numpy, others, located = map(packed.__getitem__, RandomState._fields)
    return RandomState(
        python,
        torch_,
        None if numpy is None else (b"", plain_state.unpack(numpy)),
        None if others is None else tuple(map(plain_state.unpack, others)),
        None if located is None else tuple(map(_located, located)),
    )


def _located(packed: dict[str, Any]) -> Located:
    return Located(**{**packed, "state": plain_state.unpack(packed["state"])})


def checked(those: RandomState) -> RandomState:
    """These states, after other generators were set to them; raises what that raises."""
    own = (("Random", those.python), ("torch", those.torch), ("RandomState", those.numpy and those.numpy[1]))
    for kind, state in own:
        if state is not None:
            check_state(state, kind)
    for what, several in (("other generators", those.others), ("found generators", those.located)):
        if not isinstance(several, (tuple, type(None))):
            raise unfit(what, "a tuple", several)
    for state in those.others or ():
        check_state(state)
    for one in those.located or ():
        _check(one)
    return those


def _check(one: Located) -> None:
    """Raises an exception unless it is what `located` can have given."""
    if not one.paths or not all(map(is_path, one.paths)):
        raise unfit("paths to a generator", "those of attributes and items", one.paths)
    if one.kind not in ("", "Random", "torch", "Generator", "RandomState", "BitGenerator"):
        raise unfit("kind of a generator", "a known one", one.kind)
    check_state(one.state, one.kind)


def check_state(state: Any, kind: str | None = None) -> None:
    """Raises an exception unless a generator can have this state.

    Args:
        state: of `state_of`.
        kind: of `kind_of`; empty, or None if it is not known: then the state of a class of the user's may be anything.
    """
    match state:
        case (3, tuple(), gauss) if kind in ("Random", None):
            if type(gauss) not in (float, type(None)):
                raise unfit("second normal number", "a float or None", gauss)
            set_state(random.Random(), state)
        case bytes() if kind == "torch" or (kind is None and len(state) >= _TORCH_BYTES):
            set_state(torch.Generator(), state)
        case {"bit_generator": str(name)} if kind or (kind is None and name in BIT_GENERATORS):
            set_state(make_generator(kind or ("RandomState" if "has_gauss" in state else "BitGenerator"), state), state)
        case _ if kind:
            raise unfit("generator", f"one of the kind {kind}", state)
