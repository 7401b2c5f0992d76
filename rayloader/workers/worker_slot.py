"""Everything that the driver knows about one worker.

Promise: data only. A crew creates the slots and says where their workers are; a worker's answers belong to the epoch
that asked for them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rayloader.protocol import Setup
from rayloader.resume.journal import Journal, Told
from rayloader.transport.lanes import Lent
from rayloader.workers.actor import Actor
from rayloader.workers.allowance import Allowance
from rayloader.workers.pace import Pace
from rayloader.workers.waiting import Answer


@dataclass(slots=True)
class Call:
    """An unanswered call of a worker."""

    actor: Actor
    number: int  # counts the actor's calls
    task_id: int | None  # to build; None: batches that were built before are rebuilt
    lent: Lent | None  # room for its batch


@dataclass(slots=True)
class Replay:
    """What a restored worker rebuilds, before it is given anything else."""

    began: float | None = None  # time.monotonic() of its first answer
    first: int = 0  # batches that had been built by then
    news_at: float = math.inf  # time.monotonic(): when to report its progress


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """One worker, wherever it runs at the moment.

    Attributes:
        worker_id: from 0 on, torch's.
        setup: sent to it when it starts.
        journal: its last snapshot, and the calls since then; the iterator's position has it too.
        host: the actor that is, or will be, this worker.
        away: its host has not been told yet that it is this worker.
        started: the answer to `WorkerProcess.start`.
        told_at: when its host was told that it is this worker, time.monotonic().
        began_at: after which call of its host its epoch began.
        calls: unanswered, oldest first.
        waiting: tasks that it will be given once `allowance` permits, in order.
        pace: sets the depth; None: the user sets it.
        allowance: how many tasks may be under way; None: all that the schedule submits.
        replay: the rebuilding in progress, if any.
        dropped: of the epoch that was closed, its first task that is not wanted any more, if any.
    """

    worker_id: int
    setup: Setup
    journal: Journal
    host: Actor
    away: bool = True
    started: Answer | None = None
    told_at: float = 0.0
    began_at: int = 0
    calls: deque[Call] = field(default_factory=deque)
    waiting: deque[Told] = field(default_factory=deque)
    pace: Pace | None = None
    allowance: Allowance | None = None
    replay: Replay | None = None
    dropped: int | None = None

    @property
    def unanswered(self) -> int:
        """How many tasks it has not answered; batches that it rebuilds come first, and do not count."""
        again = bool(self.calls) and self.calls[0].task_id is None
        return len(self.calls) - again

    def drop_calls(self) -> None:
        """Discards the answers to all calls made so far, and the tasks that are still waiting."""
        self.calls.clear()
        self.waiting.clear()
        self.replay = None
