"""The forks of one fleet: made by a zygote, and reached over lines.

Promise: each fork sees the program as it was when the fleet began. If the zygote is killed, and its forks with it,
another one is forked from the program as it is by then, which the log says: batches that are built again are compared
with the delivered ones.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from rayloader.errors import exit_in_words
from rayloader.interrupts import TICK_S
from rayloader.protocol import Down, Setup, Up, WorkerAddress
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.line import Line, LineError, WatchingLine, pair, unpacked
from rayloader.transport.memory_file import this_machine
from rayloader.workers.connection import Channel, LineCalls, Mailbox, Message, Process, Processes, Started
from rayloader.workers.janitor import janitor
from rayloader.workers.zygote import REMEDY, Zygote

logger = logging.getLogger("rayloader")


@dataclass(eq=False, slots=True)
class Fork(Process):
    """One forked process."""

    kind = "fork"
    zygote: Zygote
    number: int = 0  # the zygote's, once it was asked for
    _is_asked: bool = False  # the zygote, how it has ended

    @override
    def has_started(self) -> bool:
        if self.address is None:
            self.zygote.read()
            if pid := self.zygote.answers.get(("forked", self.number)):
                self.address = WorkerAddress(pid, "", socket.gethostname(), True, this_machine())
        return self.address is not None

    def is_lost(self, *, has_ended: bool) -> bool:
        """Whether it will not work any more, and all is known that `cause` can say. `has_ended`: its line has."""
        if not self.zygote.lives:
            return has_ended or self.address is None
        if has_ended and not self._is_asked:
            self._is_asked = True
            self.zygote.ask_status(self.number)
        return has_ended and ("status", self.number) in self.zygote.answers

    @override
    def cause(self, error: Exception | None) -> str:
        if error is not None:
            return str(error)
        answers = self.zygote.answers
        if ("failed", self.number) in answers:
            return f"no process could be forked: {answers['failed', self.number]}. {REMEDY}"
        status = answers.get(("status", self.number))
        return exit_in_words(None if status is None else os.waitstatus_to_exitcode(status))


class ForkCalls(LineCalls):
    """The line to a fork, over which it is told everything."""

    process: Fork
    _line: WatchingLine

    def __init__(self, process: Fork, mailbox: Mailbox, line: WatchingLine) -> None:
        super().__init__(process, mailbox, line)
        self._is_known = False  # the process
        self._started = Started()

    @override
    def start(self, source: Any, setup: Setup, state: WorkerState | None) -> Started:
        self.process.calls += 1
        self._send((Down.START, self.process.calls, setup, state))
        self._started = Started()
        return self._started

    @property
    def _awaits_zygote(self) -> bool:
        """Whether the zygote is to say which process it is, or how it has ended."""
        return not self._line.closed and (self._line.ended or not self._is_known)

    @override
    def descriptors(self) -> Iterator[tuple[int, int]]:
        yield from super().descriptors()
        if self._awaits_zygote:
            yield from self.process.zygote.descriptors

    @property
    @override
    def quiet_line(self) -> Line | None:
        return self._line if self._is_known and self._line.is_quiet else None

    @property
    @override
    def patience(self) -> float:
        return TICK_S if self._awaits_zygote else super().patience  # another channel may have taken the answer

    @override
    def receive(self) -> list[Message]:
        line = self._line
        if line.unsent:
            line.flush()
        messages = []
        for message in map(unpacked, line.arrived()):
            if message[0] == Up.STARTED:
                self._started.succeeded = True
            else:
                messages.append(message)
        if not self._is_known and not line.closed and self.process.has_started():
            line.watch(self.process.address.pid)  # type: ignore[union-attr]
            self._is_known = True
        if line.fault and not line.closed:
            messages.append(self._ended_by(LineError(line.fault)))
        elif self._awaits_zygote and self.process.is_lost(has_ended=line.ended):
            messages.append(self._ended_by(None))
        return messages


class Forks(Processes):
    """The forks of one fleet.

    Args:
        work: what a fork does with the descriptor of its end of its line.
    """

    def __init__(self, work: Callable[[int], object]) -> None:
        janitor.start()
        self._work = work
        self.zygote = Zygote(work)
        self._forks: list[Fork] = []

    @override
    def lend(self, count: int, *, fresh: bool = True) -> list[Fork]:
        if not self.zygote.lives:
            logger.warning(
                "rayloader: the process that forks workers was killed, and they with it; workers are forked from the "
                "program as it is now"
            )
            self.zygote = Zygote(self._work)
        new = [Fork(self.zygote) for _ in range(count)]
        self._forks += new
        return new

    @override
    def kill(self, process: Fork) -> None:
        if process in self._forks:
            process.zygote.kill(process.number)
            self._forks.remove(process)
        process.lane.close()

    @override
    def release(self, *, busy: bool, reuse: bool) -> None:
        self.zygote.close()
        for fork in self._forks:
            fork.lane.close()
        self._forks.clear()
        janitor.later(_nothing)  # it waits for the zygote

    @override
    def channel(self, process: Fork, mailbox: Mailbox) -> Channel:
        line, theirs = pair()
        with theirs:
            process.number = process.zygote.fork(theirs)
        process.started_at = time.monotonic()
        return ForkCalls(process, mailbox, line)

    @override
    def sources(self, others: list[Fork]) -> Callable[[Fork], None]:
        return _nothing


def _nothing(*_: object) -> None:
    pass
