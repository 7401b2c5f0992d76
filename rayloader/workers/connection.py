"""How the actors of one fleet receive their tasks, and how their answers come: over lines, or by Ray calls.

Promise: both kinds of `Channel` take the same calls and return the same messages, in the order in which the actor sent
them (see `Up` in protocol.py); an actor that will not answer yields `ActorLost` as its last message. Only
`Mailbox.wait` waits, for all channels of a fleet: it returns when something has come, over a line or from Ray, and lets
any exception through that a signal handler raises meanwhile. No thread waits inside Ray. Channels are used under the
lock of their epoch; any thread may wait.

NOTE [waiting]
Python runs signal handlers in the main thread. If that thread waits in `ray.get` or `ray.wait`, Ray calls the handlers
and changes their exceptions: SystemExit loses its code, and any other exception ends as SystemError, or is printed
and dropped. So Ray is only asked to report when a call is answered, which it does in a thread of its own, and this
module waits for descriptors: those of the lines, and one that Ray's thread, or any other, makes readable. Nor is a
thread that waits here inside Ray while another thread shuts Ray down.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError
from typing_extensions import override

from rayloader._compat_ray import on_completed, said_of_end
from rayloader.interrupts import Waker
from rayloader.protocol import Down, Served, Up
from rayloader.resume.journal import Resumed
from rayloader.start import session
from rayloader.start.signals import exit_in_words
from rayloader.task import Task
from rayloader.transport.lanes import Lent, Room, pack, to_wire, unpack
from rayloader.transport.line import Line, unpacked
from rayloader.transport.local_line import DriverLine
from rayloader.transport.tcp_line import TcpDriverLine
from rayloader.workers.actor import NONE_YET, Actor

# After the end of a line, Ray may take this many seconds to say why the process ended. If the process is on another
# machine that is gone, Ray may say nothing for a quarter of a minute; meanwhile others can do its work.
CAUSE_PATIENCE_S = 2.0
REMOTE_CAUSE_PATIENCE_S = 1.0

Message = Any  # a tuple that begins with an `Up`, ActorLost or LineRefused


class ActorLost(Exception):
    """An actor's answers will not come: the actor, its node or an object is gone.

    Args:
        actor: the one that is lost.
        error: Ray's; None if Ray says nothing.
    """

    def __init__(self, actor: Actor, error: Exception | None) -> None:
        super().__init__(_cause(actor, error))
        self.actor = actor


def _cause(actor: Actor, error: Exception | None) -> str:
    """How the process has ended: as torch says it, if that is known; and what Ray knows beyond that."""
    with contextlib.suppress(RayError):
        actor.has_started()  # notes the address
    where = actor.address
    code = session.exit_code(where.pid) if where is not None and where.hostname == socket.gethostname() else None
    known = [] if code is None else [exit_in_words(code)]
    if error is not None and (said := said_of_end(str(error))):
        known.append(f"Ray says: {said}" if known else said)
    return "; ".join(known) or "its process has ended; neither a signal nor an exit code is known"


class LineRefused(Exception):
    """The worker process cannot be reached over a line."""


class Channel(ABC):
    """The channel to one actor.

    Args:
        actor: the one that it leads to.
        mailbox: of its fleet; it reports the answers to Ray calls.

    Attributes:
        actor: the one that it leads to.
    """

    def __init__(self, actor: Actor, mailbox: Mailbox) -> None:
        self.actor = actor
        self._mailbox = mailbox

    @abstractmethod
    def run(self, worker_id: int, task: Task) -> Lent | None:
        """`WorkerProcess.run`; the call's number is the actor's newest. Pass the return value to `received`."""

    @abstractmethod
    def replay(self, worker_id: int, tasks: Sequence[Task]) -> None:
        """`WorkerProcess.replay`; the call's number is the actor's newest."""

    @abstractmethod
    def resume(self, worker_id: int, resumed: Resumed) -> None:
        """`WorkerProcess.resume`; the call's number is the actor's newest."""

    @abstractmethod
    def receive(self) -> list[Message]:
        """The messages of the actor that were read."""

    @abstractmethod
    def close(self) -> None:
        """Stops listening. Callable more than once, and by any thread."""

    @property
    @abstractmethod
    def lane(self) -> str:
        """The kind of channel, in words, and how batches travel."""

    # What follows is what a channel without a line needs: Ray sends calls at once, keeps their order, cannot withdraw
    # them, and receives their answers in threads of its own.

    def drop(self, after_call: int, from_task: int) -> None:  # noqa: B027
        """Cancels tasks from this one on, of the calls made after `after_call` so far, if the channel can do so."""

    def pause(self) -> None:  # noqa: B027
        """To be called before other calls of the actor are made, so that they come after all calls made so far."""

    def flush(self) -> None:  # noqa: B027
        """To be called after the last of several calls: until then they may not be sent."""

    def read(self) -> None:  # noqa: B027
        """Reads what has come, for `receive`. Any thread may call it, without the epoch's lock: it may take a while."""

    def descriptors(self) -> Iterator[tuple[int, int]]:
        """What to wait for, with the events of `select.poll`."""
        return iter(())

    @property
    def quiet_line(self) -> Line | None:
        """The line that brings all answers, if it is open and has nothing to send; else None.

        While it is the same line, the descriptors and the patience are the same too.
        """
        return None

    @property
    def patience(self) -> float:
        """How long to wait at most for what the descriptors cannot show, in seconds."""
        return math.inf

    def _lost(self, answer: Exception | None) -> ActorLost:
        """No answers will come: `answer` is Ray's reason, None if Ray gives none."""
        self.close()
        self.actor.vanished = answer is None or isinstance(answer, ActorUnavailableError)
        return ActorLost(self.actor, answer)

    def _run(self, worker_id: int, task: Task, room: Room | None) -> tuple[Any, ...]:
        """The message to `WorkerProcess.run`."""
        self.actor.calls += 1
        news = None if room is None else room.fields
        return worker_id, self.actor.calls, task.task_id, to_wire(task.indices.encoded).fields, news

    def _replay(self, worker_id: int, tasks: Sequence[Task]) -> tuple[Any, ...]:
        """The message to `WorkerProcess.replay`."""
        self.actor.calls += 1
        again = [(task.task_id, to_wire(task.indices.encoded).fields, task.digest) for task in tasks]
        return worker_id, self.actor.calls, again


class RayCalls(Channel):
    """One Ray call per message, whose answers go to the mailbox; batches travel through Ray's object store."""

    @property
    @override
    def lane(self) -> str:
        return "Ray calls"

    def __init__(self, actor: Actor, mailbox: Mailbox) -> None:
        super().__init__(actor, mailbox)
        self._unanswered: deque[tuple[Any, Callable[[Any], Message]]] = deque()  # oldest first

    @override
    def run(self, worker_id: int, task: Task) -> Lent | None:
        message = self._run(worker_id, task, None)
        self._call(self.actor.handle.run, message, [message[3]])
        return None

    @override
    def replay(self, worker_id: int, tasks: Sequence[Task]) -> None:
        message = self._replay(worker_id, tasks)
        self._call(self.actor.handle.replay, message, [wire for _, wire, _ in message[2]])

    def _call(self, method: Any, message: Any, wires: list[tuple[Any, ...]]) -> None:
        worker_id, call, *_ = message
        self._await(method.remote(pack(message, wires)), lambda answer: (Up.ANSWER, worker_id, call, unpack(answer)))

    @override
    def resume(self, worker_id: int, resumed: Resumed) -> None:
        self.actor.calls += 1
        call = self.actor.calls
        ref = self.actor.handle.resume.remote(worker_id, *resumed)
        self._await(ref, lambda answer: (Up.BEGUN, worker_id, call, answer))

    def _await(self, ref: Any, message: Callable[[Any], Message]) -> None:
        self._unanswered.append((ref, message))
        self._mailbox.watch(ref, self)

    @override
    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while self._unanswered and (answer := self._mailbox[self._unanswered[0][0]]) is not NONE_YET:
            ref, message = self._unanswered.popleft()
            self._mailbox.forget(ref)
            if isinstance(answer, RayError):
                return [*messages, self._lost(answer)]
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

    _cause_patience = CAUSE_PATIENCE_S

    def __init__(self, actor: Actor, mailbox: Mailbox) -> None:
        super().__init__(actor, mailbox)
        # Messages are sent over the last one; older ones may still deliver answers.
        self._served: deque[_Served] = deque([_Served(self._new_line())])

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

    _cause_patience = REMOTE_CAUSE_PATIENCE_S

    def __init__(self, actor: Actor, mailbox: Mailbox, host: str, new_buffer: Callable[[int], memoryview]) -> None:
        self._host, self._new_buffer = host, new_buffer
        super().__init__(actor, mailbox)

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


class Mailbox:
    """The channels of one fleet, and the answers to its Ray calls. Any thread may wait.

    Each call and descriptor belongs to a channel. Channels with something to receive are found without asking the
    others: a wait costs no more with many workers than with one, except for the system call itself.
    """

    def __init__(self) -> None:
        self._channels: dict[Actor, Channel] = {}
        self._answers: dict[Any, Any] = {}  # to the watched calls
        self._waker = Waker()
        self._waiting = 0  # threads that wait
        self._descriptors: dict[Channel, tuple[tuple[int, int], ...]] = {}
        self._owners: dict[int, Channel] = {}  # by descriptor
        self._poll: Any = None  # of these descriptors; None while a thread has it, or when they have changed
        self._changes = 0  # counts the changes of these descriptors
        self._ready: set[Channel | None] = set()  # that have something to receive
        self._unflushed: set[Channel] = set()  # over which calls were made
        self._impatient: set[Channel] = set()  # that must be looked at without a sign from their descriptors
        # For each channel, its line if that was the only thing to wait for when last looked at.
        self._quiet: dict[Channel, Line | None] = {}

    # ---- answers to Ray calls

    def watch(self, ref: Any, channel: Channel | None = None) -> None:
        """The answer to this call will end a wait, and make its channel ready."""
        if ref not in self._answers:
            self._answers[ref] = NONE_YET
            on_completed(ref, functools.partial(self._answered, ref, channel))

    def __getitem__(self, ref: Any) -> Any:
        """The answer to a watched call, Ray's error if there will be none, or NONE_YET."""
        return self._answers[ref]

    def forget(self, ref: Any) -> None:
        """The answer is not needed any more."""
        self._answers.pop(ref, None)

    def _answered(self, ref: Any, channel: Channel | None, answer: Any) -> None:  # in one of Ray's threads
        if ref in self._answers:
            self._answers[ref] = answer
            self._ready.add(channel)
            self._waker.ring()

    # ---- channels

    def __contains__(self, actor: Actor) -> bool:
        """Whether there is a channel to that actor."""
        return actor in self._channels

    def add(self, channel: Channel) -> None:
        """Receives what comes over this channel, until its actor is removed."""
        self._channels[channel.actor] = channel

    def to(self, actor: Actor) -> Channel:
        """The channel to that actor, for a call."""
        channel = self._channels[actor]
        self._unflushed.add(channel)
        return channel

    def lane(self, actor: Actor) -> str:
        """How an actor is reached and how its batches travel, in words."""
        channel = self._channels.get(actor)
        return "" if channel is None else channel.lane

    def remove(self, actor: Actor) -> None:
        """Closes the channel to that actor, if there is one."""
        channel = self._channels.pop(actor, None)
        if channel is not None:
            self._unflushed.discard(channel)
            channel.close()
            self._look_at(channel)
            del self._quiet[channel]

    def close(self) -> None:
        """Closes all channels, and ends the wait in progress."""
        for actor in list(self._channels):
            self.remove(actor)
        self.ring()

    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""
        while self._unflushed:
            channel = self._unflushed.pop()
            channel.flush()
            self._look_at(channel)

    def read(self) -> None:
        """Reads what a wait has found, for `receive`: without the epoch's lock, in a thread without interrupts."""
        for channel in list(self._ready):
            if channel is not None:
                channel.read()

    def receive(self, *, all_channels: bool, was_read: bool) -> list[tuple[Actor, Message]]:
        """The messages that have come, each with the actor that sent it.

        Args:
            all_channels: receive from all of them; otherwise from those that a wait has found ready.
            was_read: only messages that `read` has read.
        """
        arrived = []
        for channel in list(self._channels.values()) if all_channels else {*self._ready, *self._impatient}:
            self._ready.discard(channel)  # first: anything that arrives from here on makes it ready again
            if channel is not None:
                if not was_read:
                    channel.read()
                arrived += [(channel.actor, message) for message in channel.receive()]
                self._look_at(channel)
        if arrived and self._waiting:  # other threads: this one may have received what they wait for
            self._waker.ring()
        return arrived

    def _look_at(self, channel: Channel) -> None:
        """Updates what to wait for on a channel."""
        line = channel.quiet_line
        if line is not None and self._quiet.get(channel) is line:
            return  # as before: looked at after every message
        self._wait_for(channel, tuple(channel.descriptors()))
        if channel.patience < math.inf:
            self._impatient.add(channel)
        else:
            self._impatient.discard(channel)
        self._quiet[channel] = line  # last: an interrupt must not hide an update that was not made

    def _wait_for(self, channel: Channel, descriptors: tuple[tuple[int, int], ...]) -> None:
        """Sets what to wait for besides answers: descriptors, with the events of `select.poll`."""
        before = self._descriptors.get(channel, ())
        if descriptors == before:
            return
        for descriptor, _ in before:
            if self._owners.get(descriptor) is channel:  # else it was closed, and its number now belongs to another
                del self._owners[descriptor]
        self._owners.update((descriptor, channel) for descriptor, _ in descriptors)
        self._descriptors[channel] = descriptors
        if not descriptors:
            del self._descriptors[channel]
            self._ready.discard(channel)  # it refers to this object, and must not depend on the garbage collector
        self._changes += 1
        self._poll = None
        if self._waiting:  # other threads do not wait for these yet
            self._waker.ring()

    # ---- waiting

    def ring(self) -> None:
        """Ends all waits in progress, or the next one."""
        self._waker.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; returns whether it has."""
        if self._impatient:
            timeout = min(timeout, *(channel.patience for channel in self._impatient))
        changes, (poll, self._poll) = self._changes, (self._poll, None)  # two threads cannot use one at a time
        if poll is None:
            poll = select.poll()
            for descriptor, events in list(chain(*self._descriptors.values())):
                poll.register(descriptor, events)
            poll.register(self._waker.descriptor, select.POLLIN)
        self._waiting += 1
        try:
            found = poll.poll(math.ceil(max(0.0, timeout) * 1000))
        finally:
            self._waiting -= 1
        if changes == self._changes:
            self._poll = poll
        for descriptor, _ in found:
            if descriptor == self._waker.descriptor:
                self._waker.heard()
            elif descriptor in self._owners:
                self._ready.add(self._owners[descriptor])
        return bool(found)
