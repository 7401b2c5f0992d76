"""`skip_steps`: the batches of a run that nobody builds and nobody gets.

Promise: the sampler's draws stay as they are, and so do the numbers of all other steps; what is skipped is part of a
state. An entry that comes too late, after its step was drawn, is never in effect, which a warning says.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Container, Iterable
from typing import Any

from typing_extensions import override

from rayloader.task import Given, NothingSkipped, Step


class SkipSteps(NothingSkipped):
    """The steps that a loader skips.

    Args:
        given: the loader's `skip_steps`.
        known: the steps that it skipped by a state, or in its earlier epochs.
        at: the first step that is not drawn yet.
    """

    def __init__(self, given: Given = None, known: Iterable[Step] = (), at: Step = (0, 0)) -> None:
        super().__init__(known)
        new = steps_in(given) - self.steps
        self.steps |= {step for step in new if step >= at}
        if late := new - self.steps:
            warnings.warn(
                f"skip_steps names {in_words(late)}, but the run is at {in_words([at])} already: it is not skipped. "
                "Load a state from before it",
                stacklevel=2,
            )

    @override
    def has(self, step: Step) -> bool:
        return step in self.steps

    @override
    def forget(self, epoch: int) -> None:
        if dropped := {step for step in self.steps if step[0] == epoch}:
            self.steps -= dropped
            warnings.warn(
                f"skip_steps names {in_words(dropped)}; but the rest of epoch {epoch} is dealt out to another number "
                "of ranks, its steps have other numbers, and none of them is skipped",
                stacklevel=2,
            )


class AllBut(SkipSteps):
    """Skips what is not needed to build one batch again.

    Args:
        needed: the steps of the epoch that are built, but for those that were skipped in the run.
        skipped: these, as a state has them.
        end: the step after the last one.
        worker_id: the worker that builds them.
    """

    def __init__(self, needed: Container[int], end: int, worker_id: int, skipped: Iterable[Step] = ()) -> None:
        super().__init__()
        self._needed, self._skipped = needed, {*skipped}
        self.end, self.only_worker = end, worker_id

    @override
    def has(self, step: Step) -> bool:
        return step[1] not in self._needed or step in self._skipped


def steps_in(given: Given) -> set[Step]:
    """The steps that a value of `skip_steps` names.

    Raises:
        ValueError: one is negative.
        TypeError: it holds something that is no step.
    """
    if given is None:
        return set()
    try:
        return {_step(entry) for entry in given}
    except TypeError:
        raise TypeError(
            f"skip_steps must hold numbers of steps, or pairs of an epoch and a step, got {given!r}"
        ) from None


def _step(entry: Any) -> Step:
    pair = entry if isinstance(entry, (tuple, list)) else (0, entry)
    if len(pair) != 2 or any(isinstance(number, bool) for number in pair):
        raise TypeError
    epoch, step = map(operator.index, pair)
    if epoch < 0 or step < 0:
        raise ValueError(f"skip_steps must hold numbers of steps and epochs >= 0, got {entry!r}; both count from 0")
    return epoch, step


def in_words(steps: Iterable[Step]) -> str:
    """Steps, for a message."""
    first, *others = sorted(steps)
    more = f" and {len(others)} more" if others else ""
    return f"step {first[1]} of epoch {first[0]}{more}"
