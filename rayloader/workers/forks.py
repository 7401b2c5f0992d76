"""The forks of one fleet: made by a zygote, and reached over lines.

Promise: each fork sees the program as it was when the fleet began. If the zygote is killed, and its forks with it,
another one is forked from the program as it is by then, which the log says: batches that are built again are compared
with the delivered ones.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from rayloader.errors import RayloaderError, exit_in_words
from rayloader.namespaces import own_modules
from rayloader.protocol import WorkerAddress
from rayloader.transport.local_line import DriverLine, LineAddress
from rayloader.transport.memory_file import this_machine
from rayloader.workers.connection import Channel, ForkCalls, Mailbox
from rayloader.workers.janitor import janitor
from rayloader.workers.process import NeverStarts, Process
from rayloader.workers.processes import Processes
from rayloader.workers.zygote import Zygote

logger = logging.getLogger("rayloader")


@dataclass(eq=False, slots=True)
class Fork(Process):
    """One forked process."""

    kind = "fork"
    zygote: Zygote
    line: LineAddress | None = None  # that it serves, once it was asked for

    @override
    def has_started(self) -> bool:
        if self.address is None and self.line is not None and (reason := self._why_not()):
            raise NeverStarts(reason)
        return self.address is not None

    def _why_not(self) -> str:
        """Why it will not connect; an empty text if it may."""
        if not self.zygote.lives:
            return "the process that forks workers was killed"
        if self.line.name in self.zygote.failed:  # type: ignore[union-attr]
            return f"no process could be forked: {self.zygote.failed[self.line.name]}"  # type: ignore[union-attr]
        # Its zygote is asked, for which no descriptor is needed: perhaps none is left.
        return "" if self.pid is None or self.zygote.status(self.pid, wait=False) is None else self.cause(None)

    @property
    def pid(self) -> int | None:
        """Its process id, as far as it is known."""
        if self.address is not None:
            return self.address.pid
        return None if self.line is None else self.zygote.forked.get(self.line.name)

    @override
    def cause(self, error: Exception | None) -> str:
        if error is not None:
            return str(error)
        status = None if self.pid is None else self.zygote.status(self.pid)
        if status is None:
            return "its process has ended; neither a signal nor an exit code is known"
        return exit_in_words(os.waitstatus_to_exitcode(status))

    def enters(self, pid: int) -> bool:
        """Whether a process that has connected to its line is this one; it then has started."""
        try:
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has died already
            return False
        if int(parent) != self.zygote.pid:
            return False
        self.address = WorkerAddress(pid, "", socket.gethostname(), True, this_machine())
        self.started_at = time.monotonic()
        return True


class Forks(Processes):
    """The forks of one fleet.

    Args:
        work: what a fork does with its line, and with messages that come before those of the line.
    """

    def __init__(self, work: Callable[[LineAddress, list[bytes]], object]) -> None:
        janitor.start()
        own_modules()  # examines those that have been imported since: or each fork would do that
        self._new_zygote = functools.partial(Zygote, work)
        self.zygote = self._new_zygote()
        self._forks: list[Fork] = []

    @override
    def lend(self, count: int, *, fresh: bool = True) -> list[Fork]:
        if not self.zygote.lives:
            logger.warning(
                "rayloader: the process that forks workers was killed, and they with it; workers are forked from the "
                "program as it is now"
            )
            self.zygote = self._new_zygote()
        new = [Fork(self.zygote) for _ in range(count)]
        self._forks += new
        return new

    @override
    def kill(self, process: Fork) -> None:
        if process in self._forks and process.pid is not None:
            process.zygote.kill(process.pid)
        self.give_back(process)

    @override
    def give_back(self, process: Fork) -> None:
        process.let_go()  # it ends with its line
        if process in self._forks:
            self._forks.remove(process)

    @override
    def release(self, *, busy: bool, reuse: bool) -> None:
        self.zygote.close()
        for fork in self._forks:
            fork.let_go()
        self._forks.clear()
        janitor.later(_nothing)  # it waits for the zygote

    @override
    def channel(self, process: Fork, mailbox: Mailbox) -> Channel:
        line = DriverLine(process.enters)
        process.line = line.address
        return ForkCalls(process, mailbox, line, functools.partial(process.zygote.fork, line.address))

    @override
    def sources(self, others: list[Fork]) -> Callable[[Fork], None]:
        return _nothing

    @override
    def refused(self, process: Fork, reason: str) -> None:
        raise RayloaderError(f"a forked worker could not connect to this process: {reason}")


def _nothing(*_: object) -> None:
    pass
