"""A line: a connected local socket between the driver and one worker process, which carries messages both ways.

Promise: nobody blocks on it but who asks to wait. What the socket does not take is queued, and goes when it does; what
has arrived is read in one go. Whatever was sent before the other end died, or closed, still arrives; then the line has
`ended`. Only a process of the same user on the same machine, in the same namespaces, can be at the other end.

The driver listens on an abstract name with 128 random bits, which goes away with the socket, and the worker connects.
One thread at a time uses an end; `close` may be called by any. Ray is unknown here, and so is what a message means.

NOTE [Forks]
A forked child has the socket too. So `close` shuts the connection down, which every process sees, rather than only
closing a descriptor of it. A child never uses a line, and closes nothing but its copy. A child of the worker that
outlives it keeps the connection open, and Ray's too: so the driver watches the worker's process itself.

NOTE [Torn]
A signal handler that raises in the midst of `receive` or `flush` may have lost what had just been read, or
make what was sent go twice. Then nothing more goes over the line or comes: the epoch is told that it was interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from rayloader.errors import RayloaderError
from rayloader.transport.memory_file import MemoryFileError, this_machine

_HEADER = struct.Struct("<Q")  # length of the message that follows
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# What is read at once, at most, of messages that are not longer than this.
CHUNK_BYTES = 1 << 18
# Messages up to this size are joined with their header: a copy costs less than a second part.
JOINED_BYTES = 1 << 16
_SENT_AT_ONCE = 64  # parts
STANDARD_STREAMS = 1, 2  # descriptors of standard output and standard error
# A program may have given SIGPIPE back its default action: the death of the other end must not be its own.
_NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
# Why the system takes no further descriptor; `accept` says so whether somebody has come or not.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class LineError(RayloaderError):
    """A line can't be made or opened here; what it is for has to go another way."""


class LineAddress(NamedTuple):
    """All that the other end needs to connect, and to be sure whom it meets."""

    name: str
    pid: int  # of the driver
    uid: int
    machine: str  # boot, PID namespace and network namespace


class LocalSocket(socket.socket):
    """Ends without a warning when it is collected, before or after the line that it belongs to."""

    _pid = -1

    def __init__(self, fileno: int | None = None) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fileno)
        self._pid = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process has made it, and is not a fork of the one that has."""
        return os.getpid() == self._pid

    def end(self) -> None:
        """Closes it, for every process that has it if this is the one that made it."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)
        super(socket.socket, self).close()  # also where an interrupt came before the constructor's end

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.end()


class Line:
    """One end of a line, connected.

    Attributes:
        ended: the other end has closed, or died, and all that it sent was read.
    """

    _socket: LocalSocket | None = None  # for `close` too, where an interrupt came before the constructor's end

    def __init__(self, connection: LocalSocket | None = None) -> None:
        self._out: deque[memoryview] = deque()  # not sent yet
        self._in = bytearray(CHUNK_BYTES)
        self._filled = 0  # bytes of `_in`
        self._at_work = False
        self.ended = False
        if connection is not None:
            self._connected(connection)

    def _connected(self, connection: LocalSocket) -> None:
        connection.setblocking(False)
        self._socket = connection

    @property
    def descriptor(self) -> int:
        """To be waited for, -1 where nothing will come any more."""
        return -1 if self._socket is None or self.ended else self._socket.fileno()

    @property
    def events(self) -> int:
        """Of `select.poll`, to be waited for."""
        return select.POLLIN | select.POLLOUT if self._out else select.POLLIN

    @property
    def unsent(self) -> bool:
        """Whether something is queued."""
        return bool(self._out)

    def queue(self, message: bytes) -> None:
        """Keeps a message for the next `flush`."""
        header = _HEADER.pack(len(message))
        if len(message) <= JOINED_BYTES:
            self._out.append(memoryview(header + message))
        else:
            self._out.append(memoryview(header))
            self._out.append(memoryview(message))

    def send(self, message: bytes) -> None:
        """Queues a message, and sends what the socket takes."""
        self.queue(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        connection = self._socket
        if connection is None or self._at_work:
            return
        self._at_work = True
        out = self._out
        try:
            while out:
                if len(out) == 1:
                    sent = connection.send(out[0], _NO_SIGNAL)
                else:
                    sent = connection.sendmsg(islice(out, _SENT_AT_ONCE), (), _NO_SIGNAL)
                while out and sent >= len(out[0]):
                    sent -= len(out.popleft())
                if sent:
                    out[0] = out[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone: `receive` will say so
            out.clear()
        self._at_work = False

    def receive(self) -> list[bytes]:
        """The messages that have arrived, each whole; none if there is none yet."""
        messages: list[bytes] = []
        connection = self._socket
        if connection is None or self.ended or self._at_work:
            return messages
        self._at_work = True
        try:
            while True:
                room = len(self._in) - self._filled
                count = connection.recv_into(memoryview(self._in)[self._filled :], room)
                if not count:
                    self.ended = True
                    break
                self._filled += count
                self._cut(messages)
                if count < room:
                    break
        except BlockingIOError:
            pass
        except OSError:  # it was reset: whoever closed it wants no answer
            self.ended = True
        self._at_work = False
        return messages

    def _cut(self, messages: list[bytes]) -> None:
        """Takes the whole messages out of what was read; makes room for the rest of one."""
        begin, needed = 0, 0
        with memoryview(self._in) as view:
            while self._filled - begin >= _HEADER.size:
                (length,) = _HEADER.unpack_from(view, begin)
                end = begin + _HEADER.size + length
                if end > self._filled:
                    needed = end - begin
                    break
                messages.append(bytes(view[begin + _HEADER.size : end]))
                begin = end
        size = max(needed, CHUNK_BYTES)
        if begin or size != len(self._in):
            rest = self._in[begin : self._filled]
            if size != len(self._in):
                self._in = bytearray(size)
            self._in[: len(rest)] = rest
            self._filled = len(rest)

    def wait(self) -> None:
        """Waits until something can be received or sent, or the other end has gone. Not of one that has `ended`."""
        _poll(self.descriptor, self.events)

    def drain(self) -> None:
        """Waits until all that is queued was sent, or the other end has gone."""
        while self._out and self._socket is not None:
            _poll(self._socket.fileno(), select.POLLOUT)
            self.flush()

    @property
    def hung_up(self) -> bool:
        """Whether the other end has closed, or died, and not only finished."""
        return self._socket is None or _poll(self._socket.fileno(), 0, 0)

    def finish(self) -> None:
        """Nothing more will be sent; the other end hears of it when it has read all. Only with nothing `unsent`."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the line at once, whatever is under way. Callable more than once, and by any thread."""
        connection, self._socket = self._socket, None
        self.ended = True
        if connection is not None:
            connection.end()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()


class DriverLine(Line):
    """The driver's end. What is sent before the worker has connected is queued.

    Args:
        may_enter: whether the process of this id, which is one of the same user, may be at the other end.

    Attributes:
        address: what the worker connects to.
        refused: why the worker can't be let in; "" unless that is so.

    Raises:
        LineError: this system has no such sockets.
    """

    _listener: LocalSocket | None = None
    _process = -1  # becomes readable with the death of the worker, whoever has copies of its end

    def __init__(self, may_enter: Callable[[int], bool]) -> None:
        super().__init__()
        self._may_enter = may_enter
        self._finishing = False
        self.refused = ""
        self._listener = LocalSocket()  # an interrupt finds it here
        self.address = listen(self._listener, "line", 1)

    @property
    def descriptor(self) -> int:
        """To be waited for, -1 where nothing will come any more."""
        return self._listener.fileno() if self._listener is not None else super().descriptor

    @property
    def events(self) -> int:
        """Of `select.poll`, to be waited for."""
        return select.POLLIN if self._listener is not None else super().events

    def receive(self) -> list[bytes]:
        """The messages that have arrived, each whole; none if there is none yet."""
        if self._listener is not None:
            self._accept(self._listener)
        messages = super().receive()
        if not messages and self._has_died():
            messages = super().receive()  # what it sent in between
            self.ended |= not messages
        return messages

    def _has_died(self) -> bool:
        return self._process >= 0 and _poll(self._process, select.POLLIN, 0)

    @property
    def process(self) -> int:
        """To be waited for too: readable once the worker is dead; -1 where that can't be told, or is known."""
        return -1 if self.ended else self._process

    def _accept(self, listener: LocalSocket) -> None:
        try:
            connection = LocalSocket(listener.accept()[0].detach())
        except OSError as error:  # else: nobody yet, or who came has gone again, or the line was closed
            if error.errno in NO_ROOM and _poll(listener.fileno(), select.POLLIN, 0):
                self.refused = f"can't let a worker in: {error}"
            return
        pid, uid = peer(connection)
        if uid != os.getuid() or not self._may_enter(pid):
            connection.close()  # a stranger who has read the name in /proc/net/unix
            return
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or it is dead already: Ray says it too
            self._process = os.pidfd_open(pid)
        self._connected(connection)
        self._listener = None
        listener.close()
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        super().flush()
        if self._finishing and self._socket is not None and not self._out:
            self._finishing = False
            super().finish()

    def finish(self) -> None:
        """Nothing more will be sent; the other end hears of it when it has read all."""
        self._finishing = True
        self.flush()

    def close(self) -> None:
        """Ends the line at once, whatever is under way. Callable more than once, and by any thread."""
        listener, self._listener = self._listener, None
        if listener is not None:
            if listener.is_ours:  # a forked child may have a copy: nobody is to wait for an answer there
                turn_away(listener)
            listener.close()
        process, self._process = self._process, -1
        if process >= 0:
            os.close(process)
        super().close()


def listen(listener: LocalSocket, purpose: str, waiting: int) -> LineAddress:
    """Gives a socket a name that nobody can guess, under which `waiting` processes at once may ask to be let in.

    Raises:
        LineError: this system has no such sockets.
    """
    try:
        name = f"rayloader-{purpose}-{secrets.token_hex(16)}"
        listener.bind(f"\0{name}")
        listener.listen(waiting)
        listener.setblocking(False)
        return LineAddress(name, os.getpid(), os.getuid(), _namespaces())
    except (OSError, AttributeError, MemoryFileError) as error:  # AttributeError: not Linux
        listener.close()
        raise LineError(f"can't make a local socket: {error}") from error


def flush_streams() -> None:
    """What this process has printed so far comes before what is printed by whoever has its streams next."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be anything: closed, None, or the user's own
            stream.flush()


def hand_over(connection: LocalSocket, numbers: Iterable[int]) -> None:
    """Gives whoever has just connected copies of these descriptors of this process, those that are open."""
    sent = [number for number in numbers if _is_open(number)]
    with contextlib.suppress(OSError):  # it has gone again
        socket.send_fds(connection, [bytes(sent) or b"\0"], sent)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def turn_away(listener: LocalSocket) -> None:
    """Lets nobody connect from here on; those who have see the end."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def connect(address: LineAddress, handed_over: dict[int, int] | None = None) -> Line:
    """The worker's end.

    Args:
        address: of the driver's end.
        handed_over: copies of the descriptors that the driver hands over at once are put here, by their numbers there.

    Raises:
        LineError: the driver is on another machine or in other namespaces, has gone, or is not what answers there.
    """
    try:
        if (here := _namespaces()) != address.machine:
            raise LineError(f"{address.name} must be opened where it was made, {address.machine}; this is {here}")
        connection = LocalSocket()
        try:
            connection.connect(f"\0{address.name}")
            if peer(connection) != (address.pid, address.uid):
                raise LineError(f"{address.name} must be process {address.pid}, and is another one")
            if handed_over is not None:
                numbers, copies, *_ = socket.recv_fds(connection, len(STANDARD_STREAMS), len(STANDARD_STREAMS))
                if not numbers:
                    raise LineError(f"{address.name} was closed by the driver, which has no descriptor left")
                handed_over.update(zip(numbers, copies, strict=False))
        except BaseException:  # Ctrl-C too: nobody else has the socket yet
            connection.close()
            raise
    except (OSError, MemoryFileError) as error:
        raise LineError(f"can't open {address.name}: {error}") from error
    return Line(connection)


def _poll(descriptor: int, events: int, timeout: int | None = None) -> bool:
    """Waits for events of `select.poll`, milliseconds at most; whether there is one, or the other end has gone."""
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(timeout))


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _namespaces() -> str:
    return f"{this_machine()}, {os.readlink('/proc/self/ns/net')}"
