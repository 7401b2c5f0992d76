"""The global random generators of a process: Python's, torch's and NumPy's.

Promise: what `capture` saw, `restore` puts back bit for bit.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class RandomState:
    """The states of all three at one moment."""

    python: tuple[Any, ...]
    torch: bytes
    numpy: tuple[Any, ...]

    @classmethod
    def capture(cls) -> RandomState:
        """As they are now; 0.04 ms."""
        name, key, *rest = np.random.get_state(legacy=True)
        return cls(random.getstate(), torch.get_rng_state().numpy().tobytes(), (name, np.asarray(key).tobytes(), *rest))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return (self.torch, self.numpy, self.python) == (other.torch, other.numpy, other.python)

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self.python)
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        name, key, *rest = self.numpy
        np.random.set_state((name, np.frombuffer(key, np.uint32), *rest))


def seed_all(*key: int) -> None:
    """Seeds all three by a key of non-negative numbers, such as (base seed, epoch, batch)."""
    sequence = np.random.SeedSequence(key)
    first, second, *words = (int(word) for word in sequence.generate_state(6))
    random.seed(first << 32 | second)
    torch.manual_seed(second << 32 | first)
    np.random.seed(words)


class Rewind:
    """Remembers the random states before a worker's latest tasks, so that tasks can be undone.

    Once a call is seen to have moved a generator, the state before each task is kept; until then that before each call
    is enough. (A generator that is first used in a call of several tasks is rewound to the end of that call.)

    Args:
        max_tasks: how many tasks may have to be undone.
    """

    def __init__(self, max_tasks: int) -> None:
        self._before: deque[tuple[int, RandomState]] = deque(maxlen=max_tasks)  # by task, ascending
        self._every_task = False
        self._call_begins = True

    def task_begins(self, task_id: int) -> None:
        """The next task; they ascend."""
        if self._every_task or self._call_begins:
            self._before.append((task_id, RandomState.capture()))
            self._call_begins = False

    def call_ends(self) -> None:
        """No more tasks for now."""
        if not self._every_task and self._before:
            self._every_task = self._before[-1][1] != RandomState.capture()
        self._call_begins = True

    def undo_from(self, task_id: int | None) -> None:
        """Puts the generators back to before the first task from this one on, if there was any; begins anew."""
        after = [state for before, state in self._before if task_id is not None and before >= task_id]
        if after:
            after[0].restore()
        self._before.clear()
