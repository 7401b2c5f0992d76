"""The random generators of Python, NumPy and torch: their kinds, and their states.

Promise: a state from `state_of`, set by `set_state` in a generator that it suits, leads to the same draws. Numbers that
NumPy or torch would use as places in memory without a look are in their ranges, or `set_state` raises.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rayloader.errors import unfit

_SEED = "seed_seq"  # added to NumPy's own state
KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
# By the names in their states.
BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
# Of NumPy's bit generators, where the next number lies, and the greatest one that there is.
_PLACES = ((np.random.MT19937, ("state", "pos"), 624), (np.random.Philox, ("buffer_pos",), 4))
_PLAIN = {int, float, str, bytes, bool, type(None)}
_MOST_WORDS = 1024  # of a seed sequence's pool, which takes the square of that many steps to fill; NumPy's own are 4
_TORCH = struct.Struct("<8xi4xQ")  # of a state: numbers left until it makes new ones, and where the next one lies


def engine(generator: Any) -> Any:
    """The object that holds a generator's state: NumPy's generators may share one."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator


def state_of(generator: Any) -> Any:
    """A generator's state as it reports it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits = engine(generator)
        # The number of generators spawned from it is in its seed sequence.
        has_seed = type(bits.seed_seq) is np.random.SeedSequence
        return {**bits.state, _SEED: _plain_seed(bits.seed_seq)} if has_seed else bits.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state().numpy().tobytes()


def set_state(generator: Any, state: Any) -> None:
    """The inverse of `state_of`.

    Raises:
        ValueError: a number in it is out of range. What else is wrong raises anything.
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        _check_place(engine(generator), state)
        engine(generator).state = state
        if _SEED in state:
            _set_seed(engine(generator).seed_seq, state[_SEED])
    elif isinstance(generator, np.random.RandomState):
        _check_place(engine(generator), state)
        generator.set_state(state)
    else:
        if generator.device.type == "cpu":
            left, following = _TORCH.unpack_from(state)
            _check("count in torch's generator", left, 1, 624)
            _check("place in torch's generator", following, 0, 625 - left)
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _check_place(bits: Any, state: Any) -> None:
    for kind, path, most in _PLACES:
        if isinstance(bits, kind):
            place = state
            for name in path:
                place = place[name]
            _check(f"{path[-1]} of {kind.__name__}", place, 0, most)
    if _SEED in state:
        _check("pool_size of a seed sequence", state[_SEED]["pool_size"], 4, _MOST_WORDS)


def _check(what: str, number: Any, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        raise unfit(what, f"a whole number from {least} to {most}", number)


def _plain_seed(seed: np.random.SeedSequence) -> dict[str, Any]:
    """Its state, equal for sequences that give the same numbers, whatever kinds of numbers they were made from."""
    return {**seed.state, "entropy": _plain(seed.entropy), "spawn_key": _plain(seed.spawn_key)}


def _plain(numbers: Any) -> Any:
    if numbers is None or isinstance(numbers, str):
        return numbers
    return int(numbers) if isinstance(numbers, (int, np.integer)) else tuple(map(_plain, numbers))


def _set_seed(seed: Any, state: dict[str, Any]) -> None:
    """Sets it in place, because the program may hold it too; NumPy itself does so when unpickling."""
    if type(seed) is np.random.SeedSequence:
        seed.__setstate__(np.random.SeedSequence(**state).__reduce__()[2])  # type: ignore[attr-defined]


def same_state(a: Any, b: Any) -> bool:
    """Whether two states have the same values. Pickles also tell which parts are one object, and what is writable."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, np.ndarray) and not a.dtype.hasobject:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)) and not _PLAIN.issuperset(map(type, (*a, *b))):
        return len(a) == len(b) and all(map(same_state, a, b))
    if isinstance(a, (tuple, list, np.generic, *_PLAIN)):
        return bool(a == b)
    return pickle.dumps(a, 4) == pickle.dumps(b, 4)  # of a class of the user's


def suit(generators: list[Any], states: Sequence[Any]) -> bool:
    """Whether these states can belong to these generators: the same number, each of its kind."""
    return len(generators) == len(states) and all(map(suits, generators, states))


def suits(generator: Any, state: Any) -> bool:
    """Whether this state, which `packed.checked` has found right for some generator, can belong to one of this kind."""
    own = state_of(generator)
    if type(own) is not type(state):
        return False
    if isinstance(own, dict):
        return bool(own.get("bit_generator") == state.get("bit_generator"))
    if isinstance(generator, torch.Generator):
        return len(own) == len(state)
    return type(generator) is not random.Random or (own[0], len(own)) == (state[0], len(state))


def distinct(found: Iterable[Any]) -> list[Any]:
    """The generators to follow: each state once, without the global ones and those that hide their state."""
    chosen: dict[int, Any] = {}
    shared = {id(engine(obj)) for obj, *_ in global_generators()}
    for generator in found:
        key = id(engine(generator))
        if key in shared or (key in chosen and not isinstance(generator, np.random.RandomState)):
            continue
        with contextlib.suppress(Exception):  # random.SystemRandom, or a class of the user's
            pickle.dumps(state_of(generator))
            chosen[key] = generator
    return list(chosen.values())


def global_generators() -> tuple[tuple[Any, Any, str], ...]:
    """The generators that the functions of their modules draw from, each with where it is bound, and by which name."""
    numpy = np.random.mtrand
    return (
        (random._inst, random, "_inst"),
        (numpy._rand, numpy, "_rand"),
        (numpy._rand._bit_generator, numpy._rand, "_bit_generator"),
        (torch.default_generator, torch, "default_generator"),
    )
