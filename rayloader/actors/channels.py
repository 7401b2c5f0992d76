"""The channels to actors: lines that a long Ray call serves, local or TCP, or Ray calls alone.

Promise: that of connection.py.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.exceptions import RayError
from typing_extensions import override

from rayloader._compat import new_identity
from rayloader.actors.actor import Actor, RayAnswer, watch
from rayloader.actors.image import Source
from rayloader.actors.tcp_line import TcpDriverLine
from rayloader.protocol import NONE_YET, Served, Setup, Up
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport.lanes import Lent, in_message, pack, unpack
from rayloader.transport.line import DriverLine, Line, LineError, unpacked
from rayloader.workers.connection import (
    Channel,
    LineCalls,
    LineRefused,
    Mailbox,
    Message,
    NeverStarts,
)

# After the end of a line, Ray may take this many seconds to say why the process ended. If the process is on another
# machine that is gone, Ray may say nothing for a quarter of a minute.
CAUSE_PATIENCE_S = 2.0
REMOTE_CAUSE_PATIENCE_S = 1.0


class ActorCalls(Channel):
    """What all channels to actors have in common: some calls go through Ray."""

    process: Actor

    @override
    def start(self, source: Source | None, setup: Setup, state: WorkerState | None) -> RayAnswer:
        assert source is not None
        self._pause()
        actor = self.process
        if actor.hosted is not None and actor.hosted[0] != source.image.name:
            actor.hosted = None  # it drops that image
        return RayAnswer(actor.handle.start.remote(setup, source, state, new_identity()))

    def _pause(self) -> None:
        """Lets calls through Ray come after all calls made so far."""


class RayCalls(ActorCalls):
    """One Ray call per message, whose answers go to the mailbox; batches travel through Ray's object store."""

    @property
    @override
    def lane(self) -> str:
        return "Ray calls"

    def __init__(self, process: Actor, mailbox: Mailbox) -> None:
        super().__init__(process, mailbox)
        self._unanswered: deque[tuple[Any, Callable[[Any], Message]]] = deque()  # oldest first

    @override
    def run(self, task: Task) -> Lent | None:
        self.process.calls += 1
        indices = in_message(task.indices.encoded)
        self._call(self.process.handle.run, (self.process.calls, task.task_id, indices, None), [indices])
        return None

    @override
    def replay(self, tasks: Sequence[Task]) -> None:
        message = self._replay(tasks)
        self._call(self.process.handle.replay, message, [wire for _, wire, _ in message[1]])

    def _call(self, method: Any, message: Any, wires: list[tuple[Any, ...]]) -> None:
        call = message[0]
        self._await(method.remote(pack(message, wires)), lambda answer: (Up.ANSWER, call, unpack(answer)))

    @override
    def resume(self, resumed: Resumed) -> None:
        self.process.calls += 1
        call = self.process.calls
        ref = self.process.handle.resume.remote(*resumed)
        self._await(ref, lambda answer: (Up.BEGUN, call, answer))

    def _await(self, ref: Any, message: Callable[[Any], Message]) -> None:
        self._unanswered.append((ref, message))
        watch(self._mailbox, ref, self)

    @override
    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while self._unanswered and (answer := self._mailbox[self._unanswered[0][0]]) is not NONE_YET:
            ref, message = self._unanswered.popleft()
            self._mailbox.forget(ref)
            if isinstance(answer, RayError):
                return [*messages, self._ended_by(answer)]
            messages.append(message(answer))
        return messages

    @override
    def close(self) -> None:
        for ref, _ in self._unanswered:
            self._mailbox.forget(ref)
        self._unanswered.clear()


class _Served:
    """A line and the Ray call that serves it."""

    def __init__(self, line: DriverLine | TcpDriverLine) -> None:
        self.line = line
        self.ref: Any = None  # of the call, once that was made
        # Messages that the call itself carries, so that the driver need not accept the worker's connection first.
        self.early: list[Any] = []  # pickled, or by reference
        self.paused = False
        self.ended_at = 0.0  # time.monotonic()

    def send(self, message: Any, *, carries: bool = False) -> None:
        """Keeps a message until `flush`: for the line, or for the call, if it `carries` Ray's references."""
        if carries:
            self.early.append(message)
        elif self.ref is None:
            self.early.append(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        else:
            self.line.queue(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class ActorLine(ActorCalls, LineCalls):
    """A line, served by one long Ray call; calls that are not for the line go through Ray, after those made so far.

    Raises:
        LineError: no line can be made here.
    """

    _cause_patience = CAUSE_PATIENCE_S

    def __init__(self, process: Actor, mailbox: Mailbox) -> None:
        super().__init__(process, mailbox)
        # Messages are sent over the last one; older ones may still deliver answers.
        self._served: deque[_Served] = deque([_Served(self._new_line())])

    def _new_line(self) -> DriverLine | TcpDriverLine:
        return DriverLine(self._is_actor)

    @override
    def _send(self, message: Any, *, carries: bool = False) -> None:
        # A call of its own carries references to Ray's objects: only Ray's calls keep the owners of these informed.
        if carries and self._served and self._served[-1].ref is not None:
            self._pause()
        self._newest().send(message, carries=carries)

    @override
    def _pause(self) -> None:
        self.flush()
        if self._served and self._served[-1].ref is not None and not self._served[-1].paused:
            self._served[-1].paused = True
            self._served[-1].line.finish()

    def _newest(self) -> _Served:
        if not self._served or self._served[-1].paused:
            self._served.append(_Served(self._new_line()))
        return self._served[-1]

    def _is_actor(self, pid: int) -> bool:
        try:
            return not self.process.has_started() or self.process.address.pid == pid  # type: ignore[union-attr]
        except NeverStarts:  # it died meanwhile
            return False

    @override
    def flush(self) -> None:
        if not self._served:
            return
        if self._served[-1].early:
            self._serve(self._served[-1])
        self._served[-1].line.flush()

    def _serve(self, served: _Served) -> None:
        early, served.early = served.early, []
        served.ref = self.process.handle.serve.remote(served.line.address, early)
        watch(self._mailbox, served.ref, self)

    @override
    def descriptors(self) -> Iterator[tuple[int, int]]:
        for served in list(self._served):
            yield from served.line.descriptors

    @property
    @override
    def quiet_line(self) -> Line | None:
        if len(self._served) != 1:
            return None
        served = self._served[0]
        return served.line if served.line.is_quiet and not served.ended_at else None

    @property
    @override
    def patience(self) -> float:
        ended = [served.ended_at for served in self._served if served.ended_at]
        return max(0.0, min(ended) + self._cause_patience - time.monotonic()) if ended else super().patience

    @override
    def read(self) -> None:
        for served in list(self._served):
            served.line.read()

    @override
    def receive(self) -> list[Message]:
        messages: list[Message] = []
        for served in list(self._served):
            line = served.line
            if line.unsent:
                line.flush()
            if served.ref is None:
                continue
            answer = self._mailbox[served.ref]  # first: nothing comes over the line after that
            if answer is not NONE_YET:
                line.read(wait=True)
            messages += map(unpacked, line.arrived())
            if answer is not NONE_YET:
                self._mailbox.forget(served.ref)
                messages += self._ended(served, answer)
            elif line.refused:
                self.close()
                messages.append(LineRefused(line.refused))
            elif line.fault:
                messages.append(self._ended_by(LineError(line.fault)))
            elif line.ended and not served.ended_at:
                served.ended_at = time.monotonic()
            elif line.ended and time.monotonic() > served.ended_at + self._cause_patience:
                messages.append(self._ended_by(None))
            if not self._served:
                break  # closed: it has no further answers, and no other line either
        return messages

    def _ended(self, served: _Served, answer: Any) -> list[Message]:
        """Interprets the end of the call that served a line."""
        if isinstance(answer, Exception):
            return [self._ended_by(answer)]
        end: Served = answer
        if end.answer is not None:
            self._serve(served)
            return [(Up.ANSWER, *end.answer)]
        if served.paused and not end.refused:
            served.line.close()
            self._served.remove(served)
            return []
        self.close()
        return [LineRefused(end.refused or "the driver did not let it in: it runs as another user")]

    @override
    def close(self) -> None:
        for served in list(self._served):
            self._mailbox.forget(served.ref)
            served.line.close()
        self._served.clear()


class TcpCalls(ActorLine):
    """A line over TCP, for a worker that local sockets do not reach; batches travel in the line's messages.

    Args:
        process: the one that it leads to.
        mailbox: where its arrivals are awaited.
        host: a numeric address of this machine that the worker's machine can reach.
        new_buffer: returns writable memory for received data.
    """

    lends = False
    _cause_patience = REMOTE_CAUSE_PATIENCE_S

    def __init__(self, process: Actor, mailbox: Mailbox, host: str, new_buffer: Callable[[int], memoryview]) -> None:
        self._host, self._new_buffer = host, new_buffer
        super().__init__(process, mailbox)

    @override
    def _new_line(self) -> TcpDriverLine:
        return TcpDriverLine(self._host, self._new_buffer)

    @property
    @override
    def lane(self) -> str:
        return "TCP line"
