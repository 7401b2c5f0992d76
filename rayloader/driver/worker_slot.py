"""All that the driver knows of one worker.

Promise: data only. A crew makes the slots and says where their workers are; what a worker has to answer belongs to the
epoch that asked for it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rayloader.driver.actor import Actor
from rayloader.driver.allowance import Allowance
from rayloader.driver.pace import Pace
from rayloader.protocol import Setup
from rayloader.state.journal import Journal, Told
from rayloader.transport.lanes import Lent
from rayloader.waiting import Answer


@dataclass(slots=True)
class Call:
    """An unanswered call of a worker."""

    actor: Actor
    number: int  # counts the actor's calls
    task_id: int | None  # that it is to build; None: what was built before, again
    lent: Lent | None  # room for its batch


@dataclass(slots=True)
class Replay:
    """What a worker that was restored builds again, before it is told anything else."""

    began: float | None = None  # time.monotonic() of its first answer
    first: int = 0  # batches that had been built by then
    news_at: float = math.inf  # when to say how far it is


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """One worker, wherever it is at the moment.

    Attributes:
        worker_id: from 0 on, torch's.
        setup: what it is told when it starts.
        journal: what it was told since its last snapshot, and that snapshot; the iterator's position has it too.
        host: the actor that is, or is to be, this worker.
        away: its host was not told yet that it is this worker.
        started: the answer to `WorkerProcess.start`.
        told_at: when its host was told that it is this worker, time.monotonic().
        began_at: after which call of its host its epoch began.
        calls: unanswered, oldest first.
        waiting: tasks that it is to be given once `allowance` allows it, in order.
        pace: how deep to go; None: that is the user's to say.
        allowance: how much of it may be under way; None: all that the schedule submits.
        replay: under way, if there is one.
        dropped: its first task that nobody wants any more of the epoch that was closed, if there is one.
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
        """How many tasks it has not answered; what it builds again comes first, and is none of them."""
        again = bool(self.calls) and self.calls[0].task_id is None
        return len(self.calls) - again

    def drop_calls(self) -> None:
        """Whatever it answers to what it was asked so far is nobody's, and what waits is not told."""
        self.calls.clear()
        self.waiting.clear()
        self.replay = None
