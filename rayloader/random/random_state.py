"""The states of random generators: of the global ones of Python, torch and NumPy, and of others.

Promise: `restore` restores exactly what `capture` has read, in this process or another, also from its packed form.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rayloader import _compat
from rayloader.random.generators import same_state, set_state, state_of, suits

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
        return RandomState(
            None if self.python == before.python else self.python,
            None if self.torch == before.torch else self.torch,
            self._numpy_since(before),
            None if same_state(self.others, before.others) else self.others,
            None if same_state(self.held, before.held) else self.held,
        )

    def equals(self, other: RandomState) -> bool:
        """Whether all are the same."""
        return (
            self.torch == other.torch
            and self.python == other.python
            and same_state(self.others, other.others)
            and same_state(self.held, other.held)
            and (self.numpy is other.numpy or self._numpy_since(other) is None)
        )

    def _numpy_since(self, before: RandomState) -> _Numpy | None:
        if self.numpy is None or self.numpy is before.numpy:
            return None
        return None if before.numpy is not None and same_state(self.numpy[1], before.numpy[1]) else (b"", self.numpy[1])

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
