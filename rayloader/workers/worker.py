"""One worker as the driver knows it: its journal, the process that hosts it, and what it may be asked.

Promise: a worker that has lost its process, or is to move to another, is *away* until it is begun again, on a process
that knows what its journal says. Nothing here waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayloader.protocol import Setup
from rayloader.resume.journal import Journal, Resumed
from rayloader.task import Task
from rayloader.workers.connection import Mailbox, Started
from rayloader.workers.process import Process


@dataclass(slots=True)
class Rebuilding:
    """What a restored worker builds again, before it is given anything else."""

    call: int  # the newest, of its process
    began: float | None = None  # time.monotonic() of its first answer
    first: int = 0  # batches that had been built by then
    news_at: float = math.inf  # time.monotonic(): when to report its progress


class Worker:
    """One worker, wherever it runs at the moment.

    Attributes:
        worker_id: from 0 on, torch's.
        setup: sent to it when it starts.
        journal: its last snapshot, and the tasks since then; the iterator's position has it too.
        host: the process that is, or will be, this worker.
        away: its host has not been told yet that it is this worker.
        started: the answer to `Channel.start`.
        begun_at: when its host was told that it is this worker, time.monotonic().
        rebuilding: the rebuilding in progress, if any.
        dropped: of the epoch that was closed, its first task that is not wanted any more, if any.
        unanswered: the tasks that it was given and has not answered, oldest first; the schedule's record of them.
    """

    __slots__ = (
        "_after_call",
        "_mailbox",
        "away",
        "begun_at",
        "dropped",
        "host",
        "journal",
        "rebuilding",
        "setup",
        "started",
        "unanswered",
        "worker_id",
    )

    def __init__(self, setup: Setup, journal: Journal, host: Process, mailbox: Mailbox) -> None:
        self.worker_id = setup.worker_id
        self.setup = setup
        self.journal = journal
        self.host = host
        self._mailbox = mailbox
        self.away = True
        self.started: Started | None = None
        self.begun_at = 0.0
        self.rebuilding: Rebuilding | None = None
        self.dropped: int | None = None
        self.unanswered: Sequence[Task] = ()
        self._after_call = 0  # of its host: later ones are of its current epoch

    def begin(self, source: Any) -> None:
        """Tells its host that it is this worker, and from where to open its replica; see `Processes.sources`.

        It then is where its journal's state is.
        """
        setup, journal = self.setup, self.journal
        if journal.shared_seed is not None:
            setup = replace(setup, shared_seed=journal.shared_seed)
        self.started = self._mailbox.to(self.host).start(source, setup, journal.state)
        self._after_call = self.host.calls
        self.begun_at = time.monotonic()
        self.away = False

    def give(self, task: Task) -> None:
        """Lets it build a task's batch."""
        task.lent = self._mailbox.to(self.host).run(self.worker_id, task)
        task.call = self.host.calls

    def rebuild(self, tasks: Sequence[Task]) -> int:
        """Lets it build batches again; without tasks it continues with those that it was given before.

        Returns:
            The number of the call.
        """
        self._mailbox.to(self.host).replay(self.worker_id, tasks)
        return self.host.calls

    def resume(self, resumed: Resumed) -> None:
        """Lets it begin another epoch; its journal is updated when it has."""
        self._mailbox.to(self.host).resume(self.worker_id, resumed)
        self.journal.resumed = self.host, self.host.calls
        self._after_call = self.host.calls

    def drop(self, from_task: int) -> None:
        """Cancels its tasks of this epoch from this one on, of those that it was given so far.

        Tasks of the previous epoch that it rebuilds have numbers of their own, and are not cancelled.
        """
        self._mailbox.to(self.host).drop(self._after_call, from_task)

    def hurry(self) -> None:
        """Tells its host that another process will soon be this worker."""
        if self.host in self._mailbox and not self.away:
            self._mailbox.to(self.host).hurry(self.worker_id)

    def leave(self) -> None:
        """Tells its host that it no longer is this worker, if it was ever told that it is."""
        if self.host in self._mailbox and not self.away:
            self._mailbox.to(self.host).leave(self.worker_id)
            self.host.lane.abandon(self.worker_id)

    def moves_to(self, host: Process) -> None:
        """It continues on this process, once that is told so."""
        self.host, self.away = host, True

    @property
    def has_begun(self) -> bool:
        """Whether it has finished its start, and begun the epoch."""
        return self.started is not None and self.started.succeeded and self.journal.begun
