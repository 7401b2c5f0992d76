"""Where the processes of a fleet come from: what actors (actors.py) and forks (forks.py) have in common.

Promise: methods return at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rayloader.errors import RaySessionError
from rayloader.workers.connection import Channel, Mailbox


class Processes(ABC):
    """Where the processes of a fleet come from, until `release`.

    Attributes:
        uses_store: whether some batches come, or came, through Ray's object store.
        copies: whether this process has to copy some batches: from the store, or large ones from the network.
        leased_bytes: bytes of memory outside arenas in which batches lie.
    """

    uses_store = copies = False
    leased_bytes = 0

    def check(self) -> None:  # noqa: B027
        """Raises RaySessionError unless the processes, which were not released, can be used."""

    @property
    def usable(self) -> bool:
        """Whether `check` raises nothing."""
        try:
            self.check()
        except RaySessionError:
            return False
        return True

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

    def watch_start(self, process: Any, mailbox: Mailbox) -> None:  # noqa: B027
        """Lets the start of a process that `tells_start` end a wait of this mailbox."""

    @abstractmethod
    def channel(self, process: Any, mailbox: Mailbox) -> Channel:
        """A channel to a process."""

    @abstractmethod
    def sources(self, others: list[Any]) -> Callable[[Any], Any]:
        """Tells where each of some processes gets the replica from; `others`: those of the fleet. None: it has it."""

    def refused(self, process: Any, reason: str) -> None:  # noqa: B027
        """A process cannot be reached over a line."""

    def check_pending(self, pending: list[Any], of: int) -> None:  # noqa: B027
        """Looks at processes that have not started, and tells the log.

        Args:
            pending: these processes.
            of: how many the fleet has.

        Raises:
            WorkerStartError: they have found no place for long, or do not start there.
        """
