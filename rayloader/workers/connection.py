"""The processes of one fleet, how they receive their tasks, and how their answers come: over lines, or by Ray calls.

Promise: the two kinds of processes, actors and forks, differ in where they come from (`Processes`), and in their
channels; their workers, tasks, batches, snapshots and losses are the same. All kinds of `Channel` take the same calls
and return the same messages, in the order in which the process sent them (see `Up` in protocol.py); a process that will
not answer yields `ProcessLost` as its last message. Those to forks are in forks.py, those to actors in
actors/actors.py. Only `Mailbox.wait` waits, for all channels of a fleet: it returns when something has come, over a
line or from Ray, and lets any exception through that a signal handler raises meanwhile. No thread waits inside Ray.
Channels are used under the lock of their epoch; any thread may wait.

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
import operator
import pickle
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from rayloader.errors import RayloaderError
from rayloader.interrupts import Waker
from rayloader.protocol import Down, Setup, WorkerAddress
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport.lanes import ArenaLane, Lent, in_message
from rayloader.transport.line import Line
from rayloader.transport.memory_file import FileAddress

Message = Any  # a tuple that begins with an `Up`, ProcessLost or LineRefused


class NeverStarts(Exception):
    """A process that was asked for will not run."""


@dataclass(eq=False, slots=True, kw_only=True)
class Process:
    """One process that is a worker, or will be.

    Attributes:
        kind: what it is, for users.
        tells_start: whether a wait can end because it has started; see `Processes.watch_start`.
    """

    kind: ClassVar[str]
    tells_start: ClassVar[bool] = False
    created_at: float = field(default_factory=time.monotonic)
    address: WorkerAddress | None = None
    started_at: float | None = None  # time.monotonic() when it was seen to run; of a fork, asked for
    lane: ArenaLane = field(default_factory=ArenaLane)
    worker_id: int = -1  # which worker of its fleet it is
    calls: int = 0  # made over a channel
    lost: bool = False  # given up by the fleet that had it

    def has_started(self) -> bool:
        """Whether it runs by now; if so, notes where.

        Raises:
            NeverStarts: it never will.
        """
        raise NotImplementedError

    def cause(self, error: Exception | None) -> str:
        """Why it has ended, in words; `error`: what its channel knows of that."""
        raise NotImplementedError


class ProcessLost(Exception):
    """A process's answers will not come: the process, its node or an object is gone.

    Args:
        process: the one that is lost.
        error: why, if the channel knows.
    """

    def __init__(self, process: Process, error: Exception | None) -> None:
        super().__init__(process.cause(error))
        self.process = process


class LineRefused(Exception):
    """The worker process cannot be reached over a line."""


class Started:
    """The answer to a call of `Channel.start`.

    Attributes:
        succeeded: whether the process has finished the start of the worker.
    """

    succeeded: bool = False


class Channel(ABC):
    """The channel to one process.

    Args:
        process: the one that it leads to.
        mailbox: of its fleet; it is told of answers to Ray calls.

    Attributes:
        process: the one that it leads to.
    """

    def __init__(self, process: Any, mailbox: Mailbox) -> None:
        self.process = process
        self._mailbox = mailbox

    @abstractmethod
    def start(self, source: Any, setup: Setup, state: WorkerState | None) -> Started:
        """Lets the process be a worker, newly started or as in `state`; `source`: see `Processes.sources`."""

    @abstractmethod
    def run(self, task: Task) -> Lent | None:
        """`Hosting.run` there; its number is `process.calls`. Pass the return value to `received`."""

    @abstractmethod
    def rebuild(self, tasks: Sequence[Task]) -> None:
        """`Hosting.rebuild` there; its number is `process.calls`."""

    @abstractmethod
    def resume(self, resumed: Resumed) -> None:
        """`Hosting.resume` there; its number is `process.calls`."""

    @abstractmethod
    def receive(self) -> list[Message]:
        """The messages of the process that were read."""

    @abstractmethod
    def close(self) -> None:
        """Stops listening. Callable more than once, and by any thread."""

    @property
    @abstractmethod
    def lane(self) -> str:
        """The kind of channel, in words, and how batches travel."""

    # What follows is what a channel without a line needs: Ray sends calls at once, keeps their order, cannot withdraw
    # them, and receives their answers in threads of its own.

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

    def _ended_by(self, error: Exception | None) -> ProcessLost:
        """No answers will come: `error` is the reason, if it is known."""
        self.close()
        return ProcessLost(self.process, error)

    def _to_rebuild(self, tasks: Sequence[Task]) -> tuple[Any, ...]:
        """The message to `Hosting.rebuild`."""
        self.process.calls += 1
        again = [(task.task_id, in_message(task.indices.encoded), task.digest) for task in tasks]
        return self.process.calls, again


class LineCalls(Channel):
    """Calls over a line; batches travel in the process's arena.

    Args:
        process: the one that it leads to.
        mailbox: of its fleet.
        line: its driver's end.
    """

    arena: FileAddress | None = None  # that the process was told over the line
    lends = True  # whether the process can open an arena

    def __init__(self, process: Any, mailbox: Mailbox, line: Line) -> None:
        super().__init__(process, mailbox)
        self._line = line

    def _send(self, message: Any) -> None:
        """Keeps a message until `flush`."""
        self._line.queue(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    @property
    @override
    def lane(self) -> str:
        return "line, arena" if self.process.lane.is_open else "line"

    @override
    def run(self, task: Task) -> Lent | None:
        process, indices = self.process, in_message(task.indices.encoded)
        if indices[2]:
            raise TypeError(
                "the sampler yields references to Ray's objects, which workers get by Ray calls only; create the "
                "loader with arenas=False"
            )
        process.calls += 1
        lent, news = process.lane.lend(self.arena) if self.lends else (None, None)
        if lent is not None:
            self.arena = lent.arena.address
        self._send((Down.RUN, process.calls, task.task_id, indices, news))
        return lent

    @override
    def rebuild(self, tasks: Sequence[Task]) -> None:
        self._send((Down.REBUILD, *self._to_rebuild(tasks)))

    @override
    def resume(self, resumed: Resumed) -> None:
        self.process.calls += 1
        self._send((Down.RESUME, self.process.calls, *resumed))

    @override
    def flush(self) -> None:
        self._line.flush()

    @override
    def descriptors(self) -> Iterator[tuple[int, int]]:
        yield from self._line.descriptors

    @property
    @override
    def quiet_line(self) -> Line | None:
        return self._line if self._line.is_quiet else None

    @override
    def read(self) -> None:
        self._line.read()

    @override
    def close(self) -> None:
        self._line.close()


class Processes(ABC):
    """Where the processes of a fleet come from, until `release`; methods return at once.

    Attributes:
        uses_store: whether some batches come, or came, through Ray's object store.
        copies: whether this process has to copy some batches: from the store, or large ones from the network.
        leased_bytes: bytes of memory outside arenas in which batches lie.
    """

    uses_store = copies = False
    leased_bytes = 0

    def check(self) -> None:  # noqa: B027
        """Raises RaySessionError unless the processes, which were not released, can be used."""

    @abstractmethod
    def lend(self, count: int, *, fresh: bool = True) -> list[Any]:
        """`count` processes; does not wait until new ones run. `fresh`: none that has worked before."""

    @abstractmethod
    def kill(self, process: Any) -> None:
        """Ends a process soon."""

    @abstractmethod
    def release(self, *, busy: bool, reuse: bool) -> None:
        """Takes all of them back. Callable more than once; not for finalizers.

        Args:
            busy: calls may be unanswered.
            reuse: whether others may have the processes.
        """

    def watch_start(self, process: Any, mailbox: Mailbox) -> None:  # noqa: B027
        """Lets the start of a process that `tells_start`, and was lent just now, end a wait of this mailbox."""

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


class Mailbox:
    """The channels of one fleet. Any thread may wait.

    Each descriptor belongs to a channel, and Ray's threads tell of which one a call was answered. The kernel is told of
    a descriptor once, and only channels that it calls ready are read: a batch costs no more with many workers than with
    one.

    Args:
        later: as for `Waker`.

    Raises:
        RayloaderError: this process can have no further descriptors; `wait` raises it too.
    """

    def __init__(self, later: Callable[[Callable[[], object]], object] | None = None) -> None:
        self._channels: dict[Process, Channel] = {}
        try:
            self._waker = Waker(later)
        except OSError as error:
            raise _cannot_wait(error) from error
        self._waiting = 0  # threads that wait
        self._descriptors: dict[Channel, tuple[tuple[int, int], ...]] = {}
        # Who waits for each descriptor, and for which events; forks share the one of their zygote.
        self._owners: dict[int, dict[Channel, int]] = {}
        self._epoll: select.epoll | None = None  # knows these descriptors; None: it must be made anew
        self._registered: dict[int, int] = {}  # the events that it waits for
        self._changes = 0  # counts the changes of these
        self._ready: set[Channel] = set()  # that have something to receive
        self._unflushed: set[Channel] = set()  # over which calls were made
        self._impatient: set[Channel] = set()  # that must be looked at without a sign from their descriptors
        # For each channel, its line if that was the only thing to wait for when last looked at.
        self._quiet: dict[Channel, Line | None] = {}

    # ---- channels

    def __contains__(self, process: Process) -> bool:
        """Whether there is a channel to that process."""
        return process in self._channels

    def add(self, channel: Channel) -> None:
        """Receives what comes over this channel, until its process is removed."""
        self._channels[channel.process] = channel

    def to(self, process: Process) -> Channel:
        """The channel to that process, for a call."""
        channel = self._channels[process]
        self._unflushed.add(channel)
        return channel

    def lane(self, process: Process) -> str:
        """How a process is reached and how its batches travel, in words."""
        channel = self._channels.get(process)
        return "" if channel is None else channel.lane

    def remove(self, process: Process) -> None:
        """Closes the channel to that process, if there is one."""
        channel = self._channels.pop(process, None)
        if channel is not None:
            self._unflushed.discard(channel)
            self._impatient.discard(channel)
            self._wait_for(channel, ())  # before its descriptors are closed, see `_register`
            self._ready.discard(channel)  # it refers to this object, and must not depend on the garbage collector
            self._quiet.pop(channel, None)
            channel.close()

    def close(self) -> None:
        """Closes all channels, and ends the wait in progress."""
        for process in list(self._channels):
            self.remove(process)
        self.ring()

    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""
        while self._unflushed:
            channel = self._unflushed.pop()
            channel.flush()
            self._look_at(channel)

    @property
    def has_news(self) -> bool:
        """Whether `receive` has something to look at."""
        return bool(self._ready or self._impatient)

    def read(self) -> None:
        """Reads what a wait has found, for `receive`: without the epoch's lock, in a thread without interrupts."""
        for channel in list(self._ready):
            channel.read()

    def receive(self, *, also: Process | None = None, was_read: bool = False) -> list[tuple[Process, Message]]:
        """The messages that have come, each with the process that sent it.

        Args:
            also: a process to receive from although no wait has found it ready.
            was_read: only messages that `read` has read.
        """
        arrived = []
        channels = {*self._ready, *self._impatient}
        if also is not None and also in self._channels:
            channels.add(self._channels[also])
        for channel in channels:
            self._ready.discard(channel)  # first: anything that arrives from here on makes it ready again
            if not was_read:
                channel.read()
            arrived += [(channel.process, message) for message in channel.receive()]
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
        """Sets what to wait for besides answers: descriptors, with the events of `select.epoll`."""
        before = self._descriptors.get(channel, ())
        if descriptors == before:
            return
        for descriptor, _ in before:
            self._owners.get(descriptor, {}).pop(channel, None)  # an interrupt may have come after some
        for descriptor, events in descriptors:
            self._owners.setdefault(descriptor, {})[channel] = events
        for descriptor in {descriptor for descriptor, _ in (*before, *descriptors)}:
            self._register(descriptor)
        self._descriptors[channel] = descriptors
        if not descriptors:
            del self._descriptors[channel]

    # ---- waiting

    def _register(self, descriptor: int) -> None:
        """Tells the kernel for which events of a descriptor to wait from here on."""
        self._changes += 1
        owners, epoll = self._owners.get(descriptor, {}), self._epoll
        events = functools.reduce(operator.or_, owners.values(), 0)
        known = self._registered.get(descriptor, 0)
        if not owners:
            self._owners.pop(descriptor, None)
        if epoll is None or not (events or known):
            return
        try:
            if not events:
                epoll.unregister(descriptor)
            elif known:  # as before, too: this fails if the descriptor has become another file's
                epoll.modify(descriptor, events)
            else:
                epoll.register(descriptor, events)
        except OSError:
            # It was closed, and perhaps opened again, before this was told. Its old connection may live on, in a
            # process forked meanwhile, and would be reported for ever.
            self._forget_registered()
        else:
            self._registered[descriptor] = events
            if not events:
                del self._registered[descriptor]

    def _forget_registered(self) -> None:
        self._epoll = None
        if self._waiting:  # other threads wait for what is registered so far
            self._waker.ring()

    def _new_epoll(self) -> select.epoll:
        while True:
            try:
                changes, epoll, registered = self._changes, select.epoll(), {}
            except OSError as error:
                raise _cannot_wait(error) from error
            epoll.register(self._waker.descriptor, select.EPOLLIN)
            for descriptor, owners in list(self._owners.items()):
                events = registered[descriptor] = functools.reduce(operator.or_, list(owners.values()), 0)
                with contextlib.suppress(OSError):  # closed meanwhile: its channel will be looked at
                    epoll.register(descriptor, events)
            self._registered, self._epoll = registered, epoll
            if changes == self._changes:  # otherwise another thread has registered something meanwhile
                return epoll

    def ring(self) -> None:
        """Ends all waits in progress, or the next one."""
        self._waker.ring()

    def note(self, channel: Channel) -> None:
        """A Ray call of a channel was answered. In one of Ray's threads."""
        if self._channels.get(channel.process) is channel:
            self._ready.add(channel)
            self._waker.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; returns whether it has."""
        if impatient := list(self._impatient):  # at once: another thread may change it
            timeout = min(timeout, *[channel.patience for channel in impatient])
        epoll = self._epoll or self._new_epoll()
        self._waiting += 1
        try:
            found = epoll.poll(max(0.0, timeout))
        finally:
            self._waiting -= 1
        for descriptor, _ in found:
            if owners := self._owners.get(descriptor):
                self._ready.update(list(owners))
            elif descriptor == self._waker.descriptor:
                self._waker.heard()
            else:
                self._forget_registered()  # its channel was removed meanwhile, see `_register`
        return bool(found)


def _cannot_wait(error: OSError) -> RayloaderError:
    return RayloaderError(
        f"can't wait for the workers: {error}. Use fewer workers, or raise the limit of open files (ulimit -n)"
    )
