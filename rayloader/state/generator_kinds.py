"""The random generators of Python, NumPy and torch: which there are, their states, and how one is made from a state.

Promise: a state that `state_of` gives, set by `set_state` in a generator that it suits, makes the same draws.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

_SEED = "seed_seq"  # beside what NumPy has in a state
KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


def engine(generator: Any) -> Any:
    """What holds a generator's state: NumPy's generators may share one."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator


def engines(generators: Iterable[Any]) -> set[int]:
    """The identities of what holds their states."""
    return {id(engine(generator)) for generator in generators}


def state_of(generator: Any) -> Any:
    """A generator's state as it tells it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits = engine(generator)
        # How many generators were spawned of it is in what it was seeded with.
        has_seed = type(bits.seed_seq) is np.random.SeedSequence
        return {**bits.state, _SEED: _plain_seed(bits.seed_seq)} if has_seed else bits.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state().numpy().tobytes()


def set_state(generator: Any, state: Any) -> None:
    """The inverse of `state_of`."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        engine(generator).state = state
        if _SEED in state:
            _set_seed(engine(generator).seed_seq, state[_SEED])
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _plain_seed(seed: np.random.SeedSequence) -> dict[str, Any]:
    """Its state, equal to that of another one that gives the same, whatever kinds of numbers it was made of."""
    return {**seed.state, "entropy": _plain(seed.entropy), "spawn_key": _plain(seed.spawn_key)}


def _plain(numbers: Any) -> Any:
    if numbers is None or isinstance(numbers, str):
        return numbers
    return int(numbers) if isinstance(numbers, (int, np.integer)) else tuple(map(_plain, numbers))


def _set_seed(seed: Any, state: dict[str, Any]) -> None:
    """In place, for the program may hold it too; which NumPy itself does where it is unpickled."""
    if type(seed) is np.random.SeedSequence:
        seed.__setstate__(np.random.SeedSequence(**state).__reduce__()[2])  # type: ignore[attr-defined]


def suit(generators: list[Any], states: Sequence[Any]) -> bool:
    """Whether these states can be of these generators: of as many, each of its kind."""
    return len(generators) == len(states) and all(map(suits, generators, states))


def suits(generator: Any, state: Any) -> bool:
    """Whether this state can be of a generator of this kind."""
    own = state_of(generator)
    return type(own) is type(state) and (type(own) is not dict or own["bit_generator"] == state["bit_generator"])


def distinct(found: Iterable[Any]) -> list[Any]:
    """The generators to be followed: each state once, without the global ones and those that can't tell their state."""
    chosen: dict[int, Any] = {}
    shared = {id(engine(obj)) for obj, *_ in global_generators()}
    for generator in found:
        key = id(engine(generator))
        if key in shared or (key in chosen and not isinstance(generator, np.random.RandomState)):
            continue
        with contextlib.suppress(Exception):  # random.SystemRandom, or a class of the user's
            state_of(generator)
            chosen[key] = generator
    return list(chosen.values())


def global_generators() -> tuple[tuple[Any, Any, str], ...]:
    """Those that draw for the functions of their modules, each with where it is bound, and as what."""
    numpy = np.random.mtrand
    return (
        (random._inst, random, "_inst"),
        (numpy._rand, numpy, "_rand"),
        (numpy._rand._bit_generator, numpy._rand, "_bit_generator"),
        (torch.default_generator, torch, "default_generator"),
    )


def generator_types() -> set[type]:
    """`KINDS` and the classes below them that there are by now."""
    return set().union(*map(with_subclasses, KINDS))


def with_subclasses(kind: type) -> set[type]:
    """This class and all below it."""
    below: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(with_subclasses, below))


def kind_of(generator: Any) -> str:
    """What `make_generator` makes such a one of; empty: it can't."""
    kind = type(generator)
    if kind in (random.Random, np.random.Generator, np.random.RandomState):
        return kind.__name__
    if isinstance(generator, np.random.BitGenerator) and getattr(np.random, kind.__name__, None) is kind:
        return "BitGenerator"
    return "torch" if kind is torch.Generator and generator.device.type == "cpu" else ""


def make_generator(kind: str, state: Any) -> Any:
    """A generator that a state suits, not yet with that state.

    Raises:
        TypeError: only the program can make such a one.
    """
    match kind:
        case "Random":
            return random.Random()
        case "torch":
            return torch.Generator()
        case "Generator" | "RandomState" | "BitGenerator":
            bits = getattr(np.random, state["bit_generator"])()
            return bits if kind == "BitGenerator" else getattr(np.random, kind)(bits)
    raise TypeError("a class of the user's")


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """As `isinstance`, which asks objects of the user's what they claim to be."""
    return issubclass(type(obj), kinds)
