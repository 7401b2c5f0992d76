"""The actors of one fleet: lent by the pool, given the replica, and driven over lines, local or TCP, or by Ray calls.

Promise: nothing here calls Ray once the session that the actors came from is gone. The channels keep the promise of
connection.py.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayError
from typing_extensions import override

from rayloader._compat import new_identity
from rayloader.actors import session
from rayloader.actors.actor import Actor, Lease, RayAnswer, Ref, on_completed
from rayloader.actors.image import Image, Source, module_folders
from rayloader.actors.pool import Pool
from rayloader.actors.tcp_line import TcpDriverLine
from rayloader.gpu.device import Accelerator
from rayloader.options import Options
from rayloader.protocol import NONE_YET, Served, Setup, Up
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport.lanes import SMALL_BYTES, Lent, Recycled, in_message, pack, unpack
from rayloader.transport.line import DriverLine, LineError, unpacked
from rayloader.workers.connection import (
    Channel,
    LineCalls,
    LineRefused,
    Mailbox,
    Message,
    NeverStarts,
    Processes,
)

logger = logging.getLogger("rayloader")

# Whether local sockets are used on this machine; tests switch them off, to reach workers as on other machines.
LOCAL_LINES = True
# After how many seconds of waiting for processes, once Ray runs, a line in the log says what the program waits for.
NOTICE_S = 5.0
# After the end of a line, Ray may take this many seconds to say why the process ended. If the process is on another
# machine that is gone, Ray may say nothing for a quarter of a minute.
CAUSE_PATIENCE_S = 2.0
REMOTE_CAUSE_PATIENCE_S = 1.0


class Actors(Processes):
    """The actors of one fleet.

    Args:
        pool: where they come from.
        options: of the loader.
        name: of the loader, for the names of actors.
        accelerator: for which the memory of batches is page-locked.

    Attributes:
        replica: its image, and the parts of it that Ray carries unchanged; set before a worker begins, until `release`.
    """

    replica: tuple[Image, list[Any]] | None = None

    def __init__(self, pool: Pool, options: Options, name: str = "", accelerator: Accelerator | None = None) -> None:
        self._pool = pool
        self._remote_args = options.ray_remote_args
        self._lease: Lease | None = pool.begin_lease(name)  # None after `release`
        self._lines = options.uses_lines  # otherwise every call and every batch goes through Ray
        self._contents: list[Ref] = []  # the image in Ray's store, while processes on other nodes may need it
        self._memory = Recycled(accelerator)  # for data from the network
        self._notice_at = time.monotonic() + NOTICE_S  # when to say what the program waits for

    @override
    def check(self) -> None:
        self._pool.check()

    @override
    def lend(self, count: int, *, fresh: bool = True) -> list[Actor]:
        assert self._lease is not None
        return self._pool.lend(self._lease, self._remote_args, count, fresh=fresh)

    @override
    def kill(self, process: Actor) -> None:
        self._pool.kill(process)

    @override
    def release(self, *, busy: bool, reuse: bool) -> None:
        lease, self._lease = self._lease, None
        self.replica = None  # the iterator may live on
        if lease is not None:
            self._memory.close()  # parts in use stay until their last view has died
            self._pool.end(lease, busy=busy, reuse=reuse)

    @property
    @override
    def leased_bytes(self) -> int:  # type: ignore[override]
        return self._memory.leased_bytes

    # ---- channels

    @override
    def watch_start(self, process: Actor, mailbox: Mailbox) -> None:
        if process.address is None:
            on_completed(process.hello.ref, lambda _: mailbox.ring())

    @override
    def channel(self, process: Actor, mailbox: Mailbox) -> Channel:
        line = self._line_to(process, mailbox)
        if line is None:
            self.uses_store = self.copies = True
        return line or RayCalls(process, mailbox)

    def _line_to(self, actor: Actor, mailbox: Mailbox) -> Channel | None:
        if not self._lines or actor.no_line or _far_location(actor) in self._pool.without_lines:
            return None
        try:
            if LOCAL_LINES and actor.is_near:
                return ActorLine(actor, mailbox)
            if not session.uses_tls():
                return TcpCalls(actor, mailbox, ray.util.get_node_ip_address(), self._room)
        except LineError as error:
            self.refused(actor, str(error))
        return None

    def _room(self, nbytes: int) -> memoryview:
        """Memory for a buffer that arrives from the network."""
        self.copies |= nbytes > SMALL_BYTES
        return self._memory.room(nbytes)

    @override
    def refused(self, process: Actor, reason: str) -> None:
        """Uses no line to the actor from now on; logs that, once for the workers of another machine."""
        process.no_line = reason
        location = _far_location(process)
        if location is not None:
            if location in self._pool.without_lines:
                return
            self._pool.without_lines.add(location)
        logger.warning("rayloader: a worker is reached by Ray calls, which take longer than a socket: %s", reason)

    # ---- the replica

    @override
    def sources(self, others: list[Actor]) -> Callable[[Actor], Source]:
        contents = self._contents
        if not [actor for actor in others if actor.address is None and not actor.lost]:  # the last ones begin
            self._contents = []
        return functools.partial(self._source, others, contents, module_folders())

    def _source(self, others: list[Actor], content: list[Ref], folders: list[str], actor: Actor) -> Source:
        """Where a worker gets its replica from.

        Workers that can open the driver's files do so. On any other node, one actor makes an image for all workers
        there, from one Ray object that is made when it is first needed and is then kept in `content`.
        """
        assert self.replica is not None
        (image, carried), where = self.replica, actor.address
        source = Source(session.node_id(), folders, image.address, carried)
        if where is None or actor.is_near:
            return source
        near = [a for a in others if not a.lost and a.address is not None and a.address.location == where.location]
        hosts = [a for a in near if a.hosted is not None and a.hosted[0] == image.address.name]
        if not hosts:
            if not content:
                content.append(ray.put(PickleBuffer(image.content())))
            actor.host(image, content[0])
            hosts = [actor]
        assert hosts[0].hosted is not None
        # In lists: Ray resolves a bare reference before the call, and fails the call if the object is lost.
        return replace(source, content=content[:1] or [None], hosted=[hosts[0].hosted[1].ref])

    # ---- places

    @override
    def check_pending(self, pending: list[Actor], of: int) -> None:
        self._pool.check_pending(pending, of)
        if time.monotonic() >= self._notice_at:
            self._notice_at = math.inf
            self._pool.placement.tell(pending, of)


def _far_location(actor: Actor) -> tuple[str, str] | None:
    """The location of an actor that local sockets do not reach."""
    return None if actor.is_near or actor.address is None else actor.address.location


# ---- channels


class ActorCalls(Channel):
    """What all channels to actors have in common: some calls go through Ray."""

    process: Actor

    @override
    def start(self, source: Source | None, setup: Setup, state: WorkerState | None) -> RayAnswer:
        assert source is not None
        actor = self.process
        if actor.hosted is not None and actor.hosted[0] != source.image.name:
            actor.hosted = None  # it drops that image
        return RayAnswer(actor.handle.start.remote(setup, source, state, new_identity()))

    def _answer_to(self, ref: Ref) -> RayAnswer:
        """The answer to a call; when it comes, the mailbox receives from this channel."""
        return RayAnswer(ref, functools.partial(self._mailbox.note, self))


class RayCalls(ActorCalls):
    """One Ray call per message, whose answers go to the mailbox; batches travel through Ray's object store."""

    @property
    @override
    def lane(self) -> str:
        return "Ray calls"

    def __init__(self, process: Actor, mailbox: Mailbox) -> None:
        super().__init__(process, mailbox)
        self._unanswered: deque[tuple[RayAnswer, Callable[[Any], Message]]] = deque()  # oldest first

    @override
    def run(self, task: Task) -> Lent | None:
        self.process.calls += 1
        indices = in_message(task.indices.encoded)
        self._call(self.process.handle.run, (self.process.calls, task.task_id, indices, None), [indices])
        return None

    @override
    def rebuild(self, tasks: Sequence[Task]) -> None:
        message = self._to_rebuild(tasks)
        self._call(self.process.handle.rebuild, message, [wire for _, wire, _ in message[1]])

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
        self._unanswered.append((self._answer_to(ref), message))

    @override
    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while self._unanswered and (answer := self._unanswered[0][0].value) is not NONE_YET:
            _, message = self._unanswered.popleft()
            if isinstance(answer, RayError):
                return [*messages, self._ended_by(answer)]
            messages.append(message(answer))
        return messages

    @override
    def close(self) -> None:
        self._unanswered.clear()


def _is_actor(process: Actor, pid: int) -> bool:
    try:
        return not process.has_started() or process.address.pid == pid  # type: ignore[union-attr]
    except NeverStarts:  # it died meanwhile
        return False


class ActorLine(ActorCalls, LineCalls):
    """A line, served by one long Ray call.

    Raises:
        LineError: no line can be made here.
    """

    _line: DriverLine | TcpDriverLine
    _cause_patience = CAUSE_PATIENCE_S

    def __init__(self, process: Actor, mailbox: Mailbox, line: TcpDriverLine | None = None) -> None:
        super().__init__(process, mailbox, line or DriverLine(functools.partial(_is_actor, process)))
        self._served: RayAnswer | None = None  # to the call that serves the line, once that was made
        # Messages that the call itself carries, so that the driver need not accept the worker's connection first.
        self._early: list[bytes] = []
        self._ended_at = 0.0  # time.monotonic()

    @override
    def _send(self, message: Any) -> None:
        if self._served is not None:
            super()._send(message)
        else:
            self._early.append(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    @override
    def flush(self) -> None:
        if self._early:
            self._serve()
        super().flush()

    def _serve(self) -> None:
        early, self._early = self._early, []
        self._served = self._answer_to(self.process.handle.serve.remote(self._line.address, early))

    @property
    @override
    def patience(self) -> float:
        if not self._ended_at or self._line.closed:
            return super().patience
        return max(0.0, self._ended_at + self._cause_patience - time.monotonic())

    @override
    def receive(self) -> list[Message]:
        line = self._line
        if line.unsent:
            line.flush()
        if self._served is None:
            return []
        answer = self._served.value  # first: nothing comes over the line after that
        if answer is not NONE_YET:
            line.read(wait=True)
        messages: list[Message] = list(map(unpacked, line.arrived()))
        if answer is not NONE_YET:
            messages.append(self._ended(answer))
        elif line.refused:
            self.close()
            messages.append(LineRefused(line.refused))
        elif line.fault:
            messages.append(self._ended_by(LineError(line.fault)))
        elif line.ended and not self._ended_at:
            self._ended_at = time.monotonic()
        elif line.ended and time.monotonic() > self._ended_at + self._cause_patience:
            messages.append(self._ended_by(None))
        return messages

    def _ended(self, answer: Any) -> Message:
        """Interprets the end of the call that served the line."""
        if isinstance(answer, Exception):
            return self._ended_by(answer)
        end: Served = answer
        if end.answer is not None:
            self._serve()
            return (Up.ANSWER, *end.answer)
        self.close()
        return LineRefused(end.refused or "the driver did not let it in: it runs as another user")

    @override
    def close(self) -> None:
        self._served = None
        super().close()


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
        super().__init__(process, mailbox, TcpDriverLine(host, new_buffer))

    @property
    @override
    def lane(self) -> str:
        return "TCP line"
