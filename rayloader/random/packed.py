"""The states of random generators in plain types, and whether a generator can have a state that was loaded.

Imported only where a loader's state is packed or loaded.
"""

from __future__ import annotations

import array
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rayloader.errors import unfit
from rayloader.plain_state import bytes_of, checked_dtype, text_of
from rayloader.random.generator_kinds import BIT_GENERATORS, make_generator, set_state
from rayloader.random.generators import Located
from rayloader.random.random_state import RandomState
from rayloader.random.search import is_path

_TORCH_BYTES = len(torch.Generator().get_state())  # on the CPU; others have less


def pack(those: RandomState) -> tuple[Any, ...]:
    """Packs the states in plain, immutable types; 3.4 KB for each generator that is not None."""
    numpy = those.numpy[1] if those.numpy is not None else None
    located = None if those.located is None else tuple(map(tuple, those.located))
    return tuple(map(_pack, (those.python, those.torch, numpy, those.others, located)))


def unpack(packed: Sequence[Any]) -> RandomState:
    """The inverse of `pack`; JSON has made lists of its tuples."""
    python, torch_, numpy, others, located = map(_unpack, packed)
    numpy = None if numpy is None else (b"", numpy)
    return RandomState(
        python, torch_, numpy, others, None if located is None else tuple(Located(*one) for one in located)
    )


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


def _pack(state: Any) -> Any:
    """A generator's state, in plain types; a tuple begins with what it represents."""
    match state:
        case np.ndarray():
            return "array", state.dtype.str, text_of(state.tobytes())
        case bytes():
            return "bytes", *map(text_of, _halves(state))
        case tuple() if len(state) > 100 and (words := _words(state)) is not None:
            return "words", text_of(words)
        case tuple():
            return "tuple", *map(_pack, state)
        case dict():
            return "dict", *((key, _pack(part)) for key, part in state.items())
        case np.generic():
            return state.item()
    return state


def _unpack(packed: Any) -> Any:
    match packed:
        case ("array", dtype, text):
            return np.frombuffer(bytes_of(text), checked_dtype(dtype))
        case ("bytes", *halves):
            return _joined(*map(bytes_of, halves))
        case ("words", text):
            return tuple(np.frombuffer(bytes_of(text), np.uint32).tolist())
        case ("tuple", *parts):
            return tuple(map(_unpack, parts))
        case ("dict", *items):
            return {key: _unpack(part) for key, part in items}
    return packed


def _words(state: tuple[Any, ...]) -> bytes | None:
    """A state of 32-bit words, as Python's generator returns it; None if it is something else."""
    try:
        return array.array("I", state).tobytes()
    except (TypeError, OverflowError):
        return None


def _halves(state: bytes) -> tuple[bytes, ...]:
    """Lower halves, places of upper halves that are not zero, these, and the rest: torch keeps 32 bits in 64."""
    count = len(state) // 8
    lower, upper = np.frombuffer(state, np.uint32, 2 * count).reshape(-1, 2).T
    where = np.flatnonzero(upper).astype(np.uint32)
    return lower.tobytes(), where.tobytes(), upper[where].tobytes(), state[8 * count :]


def _joined(lower: bytes, where: bytes, upper: bytes, rest: bytes) -> bytes:
    words = np.zeros((len(lower) // 4, 2), np.uint32)
    words[:, 0] = np.frombuffer(lower, np.uint32)
    words[np.frombuffer(where, np.uint32), 1] = np.frombuffer(upper, np.uint32)
    return words.tobytes() + rest
