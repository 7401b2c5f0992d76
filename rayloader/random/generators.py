"""The random generators of Python, NumPy and torch: their kinds, their states, and how a replica's pickler sends them.

Promise: a state from `state_of`, set by `set_state` in a generator that it suits, leads to the same draws, and
`RandomState.restore` restores exactly what `capture` has read, in this process or another, also from its packed form.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rayloader import _compat

_SEED = "seed_seq"  # added to NumPy's own state
KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_PLAIN = {int, float, str, bytes, bool, type(None)}


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
    """The inverse of `state_of`; a state of another kind of generator raises anything."""
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


def suits(generator: Any, state: Any) -> bool:
    """Whether this state of some generator can belong to one of this kind."""
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


# ---- states of several at one moment

# The largest seed that torch's loader draws. Programs make tensors of `torch.initial_seed()`, which hold no larger one.
MOST_SEED = 2**63 - 1

_Numpy = tuple[bytes, Any]  # memory of the MT19937 generator (empty if it is another one), its whole state


class RandomState(NamedTuple):
    """The states of the three global generators at one moment, and of others; in a difference None is "the same"."""

    python: tuple[Any, ...] | None = None
    torch: bytes | None = None
    numpy: _Numpy | None = None
    others: tuple[Any, ...] | None = None
    held: dict[str, Any] | None = None  # by the names that a search has given

    @classmethod
    def capture(
        cls,
        others: Sequence[Any] = (),
        before: RandomState | None = None,
        *,
        held: Mapping[str, Any] | None = None,
        only_torch: bool = False,
    ) -> RandomState:
        """The current states; takes 0.01 ms without `others`.

        Args:
            others: further generators, from `generators.distinct`.
            before: an earlier capture, to share unchanged states.
            held: further ones, by the names that `search` has given.
            only_torch: leave out Python's and NumPy's.
        """
        return cls(
            None if only_torch else random.getstate(),
            _torch_state(),
            None if only_torch else _numpy_state(None if before is None else before.numpy),
            tuple(map(state_of, others)),
            None if held is None else {name: state_of(generator) for name, generator in held.items()},
        )

    def restore(self, others: Sequence[Any] = (), held: Mapping[str, Any] | None = None) -> None:
        """Restores the states, except for those that are None; of those by names, the ones that fit `held`."""
        if self.python is not None:
            random.setstate(self.python)
        if self.torch is not None:
            set_state(torch.default_generator, self.torch)
        if self.numpy is not None:
            np.random.set_state(self.numpy[1])
        if self.others is not None:
            for generator, state in zip(others, self.others, strict=True):
                set_state(generator, state)
        for name, state in (self.held or {}).items():
            if held is not None and name in held and suits(held[name], state):
                set_state(held[name], state)

    def unlike(self, held: Mapping[str, Any]) -> list[str]:
        """The names of those here that are not held, or of another kind."""
        return [name for name, state in (self.held or {}).items() if name not in held or not suits(held[name], state)]

    def since(self, before: RandomState) -> RandomState:
        """The changed states."""
        same_numpy = self.numpy is before.numpy or (
            self.numpy is not None and before.numpy is not None and same_state(self.numpy[1], before.numpy[1])
        )
        return RandomState(
            None if self.python == before.python else self.python,
            None if self.torch == before.torch else self.torch,
            None if self.numpy is None or same_numpy else (b"", self.numpy[1]),
            None if same_state(self.others, before.others) else self.others,
            None if same_state(self.held, before.held) else self.held,
        )

    def equals(self, other: RandomState) -> bool:
        """Whether all are the same."""
        return self.since(other) == RandomState()

    def over(self, before: RandomState) -> RandomState:
        """The inverse of `since`."""
        return RandomState._make(b if a is None else a for a, b in zip(self, before, strict=True))


def _torch_state() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())  # takes half the time of an array in between


def _numpy_state(before: _Numpy | None) -> _Numpy:
    # NumPy takes 0.02 ms to return its state. Unless it has a second normal number in store, this memory is all of it.
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    raw = ctypes.string_at(generator.ctypes.state_address, 625 * 4) if type(generator) is np.random.MT19937 else b""
    if raw and before is not None and raw == before[0] and not before[1]["has_gauss"]:
        return before
    return raw, np.random.get_state(legacy=False)


def seed_all(*key: int) -> None:
    """Seeds all three from a key of non-negative numbers, such as (base seed, epoch, batch)."""
    sequence = np.random.SeedSequence(key)
    first, second, *words = (int(word) for word in sequence.generate_state(6))
    random.seed((first << 32 | second) & MOST_SEED)
    seed_torch((second << 32 | first) & MOST_SEED)
    np.random.seed(words)


def seed_torch(seed: int) -> None:
    """Like `torch.manual_seed`, but only for the CPU and the kind of accelerator that this torch was built for.

    That function seeds each kind that torch knows, and formats a stack for each: a millisecond in all, which
    is longer than many batches take.
    """
    torch.default_generator.manual_seed(seed)
    accelerator = _compat.current_accelerator()
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(seed)


# ---- in a replica


def reduce_generator(obj: Any, reduced: Callable[[Any], Any]) -> Any:
    """How a replica's pickler reduces a generator: as usual (`reduced`), but for the global ones.

    These are pickled by name: a reference to one of them in the driver becomes one to the worker's, as after a fork.
    """
    for one, owner, name in global_generators():
        if obj is one:
            return getattr, (owner, name)
    return reduced(obj)
