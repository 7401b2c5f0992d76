"""The record of one task, from the draw of its indices until the user has its batch; and the steps that get no task.

Promise: standard library only, and data only. Only the schedule changes `state`, `worker_id` and what has come of a
task; the journal of its worker keeps the record as long as the batch may have to be rebuilt.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

ANY_WORKER = -1
UNOPENED: Any = object()


class TaskState(Enum):
    """Where a task is on its way; `GONE` is the one state that the task table does not hold."""

    QUEUED = "queued"  # drawn, and not submitted: no worker has it yet, or its worker may not be given more
    OUTSTANDING = "outstanding"  # submitted to its worker, unanswered
    READY = "ready"  # built, waiting for its turn
    DELIVERED = "delivered"  # its turn has come: on its way to the user, still occupying its place in the window
    LOST = "lost"  # its worker's process ended before it answered; it is submitted again to the next one
    GONE = "gone"  # taken by the user, dropped with its exhausted worker, or closed

    __hash__ = object.__hash__  # Enum's own hashes the name, by a Python call for each look into `TRANSITIONS`


# An Enum's metaclass makes `TaskState.READY` take five times as long as a global name, twenty times a batch.
QUEUED, OUTSTANDING, READY, DELIVERED, LOST, GONE = TaskState


Step = tuple[int, int]  # epoch, and the number of a batch in the order of its sampler; both from 0
Given = Iterable[int | Step] | None  # a loader's `skip_steps`


class SkipSteps:
    """The steps of a run that nobody builds and nobody gets.

    The sampler's draws stay as they are, and so do the numbers of all other steps; what is skipped is part of a state.
    An entry that comes too late, after its step was drawn, is never in effect, which a warning says.

    Args:
        given: the loader's `skip_steps`.
        known: the steps that it skipped by a state, or in its earlier epochs.
        at: the first step that is not drawn yet.

    Attributes:
        has: whether a step, which is about to be drawn, is skipped.
        end: no step of this number, or a later one, is drawn.
        only_worker: that has work; None: all have.
        steps: those that are skipped.
    """

    has: Callable[[Step], bool]
    end: float = math.inf
    only_worker: int | None = None

    def __init__(self, given: Given = None, known: Iterable[Step] = (), at: Step = (0, 0)) -> None:
        self.steps: set[Step] = {*known}
        self.has = self.steps.__contains__  # a call in C, for it is asked about every step
        new = steps_in(given) - self.steps
        self.steps |= {step for step in new if step >= at}
        if late := new - self.steps:
            warnings.warn(
                f"skip_steps names {_in_words(late)}, but the run is at {_in_words([at])} already: it is not skipped. "
                "Load a state from before it",
                stacklevel=2,
            )

    @property
    def in_order(self) -> tuple[Step, ...]:
        """The steps, ascending."""
        return tuple(sorted(self.steps))

    def forget(self, epoch: int) -> None:
        """The steps of this epoch are numbered anew, because other ranks have begun it: none of them is skipped."""
        if dropped := {step for step in self.steps if step[0] == epoch}:
            self.steps -= dropped
            warnings.warn(
                f"skip_steps names {_in_words(dropped)}; but the rest of epoch {epoch} is dealt out to another number "
                "of ranks, its steps have other numbers, and none of them is skipped",
                stacklevel=2,
            )


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


def _in_words(steps: Iterable[Step]) -> str:
    """Steps, for a message."""
    first, *others = sorted(steps)
    more = f" and {len(others)} more" if others else ""
    return f"step {first[1]} of epoch {first[0]}{more}"


@dataclass(eq=False, slots=True)
class Task:
    """One request to build one batch.

    Attributes:
        task_id: counts from 0 in delivery order.
        indices: a `Drawn`: what the sampler yielded.
        worker_id: ANY_WORKER while it is not assigned.
        state: where it is.
        steps: what has happened to it, for the message of an error.
        call: number of the call by which its worker was given it, of those of the process.
        lent: room for its batch, until it is answered.
        digest: of the batch that was built; None: it was not answered.
        result: the `Answer`, until the batch is taken.
        nbytes: of the batch's buffers.
        samples: in the batch.
        left_out: whether it is one of `skip_steps`, and was built for its stream alone.
        asked: its dataset, a stream, had asked which worker reads it.
        read: digests of the first samples that a wrapper of a stream has read.
        data: the batch as the user gets it, from when it is opened until it is handed over; UNOPENED before.
        counted: whether the user's position includes it.
        recorded: whether the measurements include it.
    """

    task_id: int
    indices: Any = field(repr=False)
    worker_id: int = ANY_WORKER
    state: TaskState = QUEUED
    steps: list[type] = field(default_factory=list, repr=False)
    call: int = 0
    lent: Any = field(default=None, repr=False)
    digest: int | None = field(default=None, repr=False)
    result: Any = field(default=None, repr=False)
    nbytes: int = 0
    samples: int = 0
    left_out: bool = field(default=False, repr=False)
    asked: bool = field(default=False, repr=False)
    read: tuple[int, ...] = field(default=(), repr=False)
    data: Any = field(default=UNOPENED, repr=False)
    counted: bool = False
    recorded: bool = False

    @property
    def is_assigned(self) -> bool:
        """Whether it is some worker's to build."""
        return self.worker_id != ANY_WORKER
