"""A worker process as the driver knows it, whatever it is, and where a fleet's processes come from.

Promise: methods return at once. The two kinds of processes, actors and forks, differ in `Processes`, and in their
channels (connection.py); their workers, tasks, batches, snapshots and losses are the same.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from rayloader.errors import RayloaderError
from rayloader.protocol import Source, WorkerAddress
from rayloader.transport.lanes import ArenaLane

if TYPE_CHECKING:
    from rayloader.workers.connection import Channel, Mailbox


class NeverStarts(Exception):
    """A process that was asked for will not run."""


class Verdict(Enum):
    """What a fleet does about processes that have not started."""

    WAIT = "wait"
    MAKE_ROOM = "wait; idle actors are killed"
    SHARE_CPUS = "ask for actors that need no CPU"
    GIVE_UP = "continue without them"


@dataclass(eq=False, slots=True, kw_only=True)
class Process:
    """One process that hosts workers."""

    created_at: float = field(default_factory=time.monotonic)
    address: WorkerAddress | None = None
    started_at: float | None = None  # time.monotonic() when it was first seen to run
    lane: ArenaLane = field(default_factory=ArenaLane)
    calls: int = 0  # made over a channel
    lost: bool = False  # given up by the fleet that had it
    vanished: bool = False  # nobody knows what happened to it: its whole node may be gone

    @property
    def awaited(self) -> Any:
        """The Ray call whose answer says that it has started; None if there is none."""
        return None

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


class Processes(ABC):
    """Where the processes of a fleet come from, until `release`.

    Attributes:
        uses_store: whether some batches come, or came, through Ray's object store.
        copies: whether this process has to copy some batches: from the store, or large ones from the network.
        most_unanswered: how many tasks of one worker may be unanswered, beyond those that torch's would have.
        leased_bytes: bytes of memory outside arenas in which batches lie.
        all_are_near: all processes are known to run on this machine, before they have reported where.
    """

    uses_store = copies = False
    most_unanswered: float = float("inf")
    leased_bytes = 0
    all_are_near = True

    @abstractmethod
    def check(self) -> None:
        """Raises RaySessionError unless the processes can be used."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether they can be used."""

    @abstractmethod
    def lend(self, count: int, *, fresh: bool = True) -> list[Any]:
        """`count` processes; does not wait until new ones run. `fresh`: none that has worked before."""

    @abstractmethod
    def kill(self, process: Any) -> None:
        """Ends a process soon."""

    @abstractmethod
    def give_back(self, process: Any) -> None:
        """Takes back a process that may be busy, soon."""

    @abstractmethod
    def release(self, *, busy: bool, reuse: bool) -> None:
        """Takes all of them back. Callable more than once; not for finalizers.

        Args:
            busy: calls may be unanswered.
            reuse: whether others may have the processes.
        """

    @abstractmethod
    def channel(self, process: Any, mailbox: Mailbox) -> Channel:
        """A channel to a process."""

    @abstractmethod
    def sources(self, others: list[Any]) -> Callable[[Any], Source | None]:
        """Tells where each of some processes gets the replica from; `others`: those of the fleet. None: it has it."""

    def is_draining(self, process: Any) -> bool:
        """Whether the process is on a node that will leave."""
        return False

    @property
    def drains(self) -> bool:
        """Whether some node will leave."""
        return False

    def is_late(self, process: Any, coming: list[Any]) -> bool:
        """Whether the workers of a draining process must leave it at once, although others are coming."""
        return False

    def refused(self, process: Any, reason: str) -> None:
        """A process cannot be reached over a line."""
        raise RayloaderError(f"a forked worker could not connect to this process: {reason}")

    def verdict(self, pending: list[Any], *, others: bool) -> Verdict:
        """What to do about processes that have not started; `others`: some of the fleet have."""
        return Verdict.WAIT

    def tell(self, pending: list[Any], of: int) -> None:  # noqa: B027
        """Logs what the program waits for."""

    def gave_up(self, processes: list[Any], of: int) -> None:  # noqa: B027
        """The fleet continues without these."""

    def start_error(self, processes: list[Any], of: int) -> RayloaderError:
        """The error for processes that have found no place, or do not start there."""
        raise NotImplementedError

    def settle_output(self) -> None:  # noqa: B027
        """Waits until all log records that the workers have sent so far are handled."""
