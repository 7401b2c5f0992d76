"""A worker process as the driver knows it, whatever it is.

Promise: methods return at once. The two kinds of processes, actors and forks, differ in where they come from
(processes.py), and in their channels (connection.py); their workers, tasks, batches, snapshots and losses are the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar

from rayloader.protocol import WorkerAddress
from rayloader.transport.lanes import ArenaLane


class NeverStarts(Exception):
    """A process that was asked for will not run."""


@dataclass(eq=False, slots=True, kw_only=True)
class Process:
    """One process that hosts workers.

    Attributes:
        kind: what it is, for users.
    """

    kind: ClassVar[str]
    created_at: float = field(default_factory=time.monotonic)
    address: WorkerAddress | None = None
    started_at: float | None = None  # time.monotonic() when it was seen to run; of a fork, asked for
    lane: ArenaLane = field(default_factory=ArenaLane)
    calls: int = 0  # made over a channel
    lost: bool = False  # given up by the fleet that had it
    vanished: bool = False  # nobody knows what happened to it: its whole node may be gone

    @property
    def tells_start(self) -> bool:
        """Whether a wait can end because it has started; see `Processes.watch_start`."""
        return False

    def has_started(self) -> bool:
        """Whether it runs by now; if so, notes where.

        Raises:
            NeverStarts: it never will.
        """
        raise NotImplementedError

    def is_placed(self) -> bool:
        """Whether it waits only for its imports, not for resources."""
        return True

    def cause(self, error: Exception | None) -> str:
        """Why it has ended, in words; `error`: what its channel knows of that."""
        raise NotImplementedError

    def let_go(self) -> None:
        """The process is gone, or soon will be: gives up what it shares with this one."""
        self.lane.close()
