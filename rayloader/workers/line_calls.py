"""Lines: the channel to an actor that a socket reaches, on this machine or on another one.

Promise: that of channel.py. Ray starts the worker, runs the one long call that serves the line, and says why it died.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.exceptions import RayError
from typing_extensions import override

from rayloader.protocol import Down, Served, Up
from rayloader.resume.journal import Resumed
from rayloader.task import Task
from rayloader.transport.lanes import Lent, Room, unpack
from rayloader.transport.line import Line, unpacked
from rayloader.transport.local_line import DriverLine
from rayloader.transport.tcp_line import TcpDriverLine
from rayloader.workers.actor import Actor
from rayloader.workers.channel import Channel, LineRefused, Message
from rayloader.workers.mailbox import Mailbox
from rayloader.workers.waiting import NONE_YET

# After the end of a line, Ray may take this many seconds to say why the process ended. If the process is on another
# machine that is gone, Ray may say nothing for a quarter of a minute; meanwhile others can do its work.
CAUSE_PATIENCE_S = 2.0
REMOTE_CAUSE_PATIENCE_S = 1.0


class _Served:
    """A line and the Ray call that serves it."""

    def __init__(self, line: DriverLine | TcpDriverLine) -> None:
        self.line = line
        self.ref: Any = None  # of the call, once that was made
        # Messages that the call itself carries, so that the driver need not accept the worker's connection first.
        self.early: list[Any] = []  # pickled, or by reference
        self.arena: Any = None  # address that the worker was told
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


class LineCalls(Channel):
    """A line, served by one long Ray call; batches travel in the actor's arena.

    Raises:
        LineError: no line can be made here.
    """

    def __init__(self, actor: Actor, mailbox: Mailbox) -> None:
        super().__init__(actor)
        self._mailbox = mailbox
        # Messages are sent over the last one; older ones may still deliver answers.
        self._served: deque[_Served] = deque([_Served(self._new_line())])

    @property
    def _cause_patience(self) -> float:
        return CAUSE_PATIENCE_S

    def _new_line(self) -> DriverLine | TcpDriverLine:
        return DriverLine(self._is_actor)

    def _lend(self, served: _Served) -> tuple[Lent, Room] | tuple[None, None]:
        lent = self.actor.lane.lend(served.arena)
        if lent is None:
            return None, None
        served.arena = lent[0].arena.address
        return lent

    @override
    def run(self, worker_id: int, task: Task) -> Lent | None:
        carries = bool(task.indices.encoded.carried)
        served = self._for_ray() if carries else self._newest()
        lent, room = self._lend(served)
        served.send((Down.RUN, *self._run(worker_id, task, room)), carries=carries)
        return lent

    @override
    def replay(self, worker_id: int, tasks: Sequence[Task]) -> None:
        carries = any(task.indices.encoded.carried for task in tasks)
        served = self._for_ray() if carries else self._newest()
        served.send((Down.REPLAY, *self._replay(worker_id, tasks)), carries=carries)

    def _for_ray(self) -> _Served:
        """A served line whose call carries references to Ray's objects: only Ray's calls keep the owners informed."""
        if self._served and self._served[-1].ref is not None:
            self.pause()
        return self._newest()

    @override
    def resume(self, worker_id: int, resumed: Resumed) -> None:
        self.actor.calls += 1
        self._newest().send((Down.RESUME, worker_id, self.actor.calls, *resumed))

    @override
    def drop(self, after_call: int, from_task: int) -> None:
        if self._served and not self._served[-1].paused:
            self._served[-1].send((Down.DROP, after_call, self.actor.calls, from_task))

    @override
    def pause(self) -> None:
        self.flush()
        if self._served and self._served[-1].ref is not None and not self._served[-1].paused:
            self._served[-1].paused = True
            self._served[-1].line.finish()

    def _newest(self) -> _Served:
        if not self._served or self._served[-1].paused:
            self._served.append(_Served(self._new_line()))
        return self._served[-1]

    @property
    @override
    def lane(self) -> str:
        return "line, arena" if self.actor.lane.is_open else "line"

    def _is_actor(self, pid: int) -> bool:
        try:
            return not self.actor.has_started() or self.actor.address.pid == pid  # type: ignore[union-attr]
        except RayError:  # it died meanwhile
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
        served.ref = self.actor.handle.serve.remote(served.line.address, early)
        self._mailbox.watch(served.ref, self)

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
            elif line.ended and not served.ended_at:
                served.ended_at = time.monotonic()
            elif line.ended and time.monotonic() > served.ended_at + self._cause_patience:
                messages.append(self._lost(None))
            if not self._served:
                break  # closed: it has no further answers, and no other line either
        return messages

    def _ended(self, served: _Served, answer: Any) -> list[Message]:
        """Interprets the end of the call that served a line."""
        if isinstance(answer, Exception):
            return [self._lost(answer)]
        end: Served = answer
        if end.answer is not None:
            worker_id, call, answer = unpack(end.answer)
            self._serve(served)
            return [(Up.ANSWER, worker_id, call, answer)]
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


class TcpCalls(LineCalls):
    """A line over TCP, for a worker that local sockets do not reach; batches travel in the line's messages.

    Args:
        actor: the one that it leads to.
        mailbox: where its arrivals are awaited.
        host: a numeric address of this machine that the worker's machine can reach.
        new_buffer: returns writable memory for received data.
    """

    def __init__(self, actor: Actor, mailbox: Mailbox, host: str, new_buffer: Callable[[int], memoryview]) -> None:
        self._host, self._new_buffer = host, new_buffer
        super().__init__(actor, mailbox)

    @property
    @override
    def _cause_patience(self) -> float:
        return REMOTE_CAUSE_PATIENCE_S

    @override
    def _new_line(self) -> TcpDriverLine:
        return TcpDriverLine(self._host, self._new_buffer)

    @override
    def _lend(self, served: _Served) -> tuple[None, None]:
        return None, None

    @property
    @override
    def lane(self) -> str:
        return "TCP line"
