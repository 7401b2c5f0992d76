"""The record of one task, from the draw of its indices until the user has its batch.

Promise: standard library only, and data only. Only the schedule changes `state`, `worker_id` and what has come of a
task; the journal of its worker keeps the record as long as the batch may have to be rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


class NothingSkipped:
    """The steps that a loader without `skip_steps` skips; with them see `SkipSteps` in `resume/skips.py`.

    Attributes:
        end: no step of this number, or a later one, is drawn.
        only_worker: that has work; None: all have.
        steps: those that it skipped by a state, or in its earlier epochs; without effect here.
    """

    end: float = math.inf
    only_worker: int | None = None

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.steps: set[Step] = {*steps}

    @property
    def in_order(self) -> tuple[Step, ...]:
        """The steps, ascending."""
        return tuple(sorted(self.steps))

    def has(self, step: Step) -> bool:
        """Whether a step, which is about to be drawn, is skipped."""
        return False

    def forget(self, epoch: int) -> None:
        """The steps of this epoch are numbered anew, because other ranks have begun it: none of them is skipped."""


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
