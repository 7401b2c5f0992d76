"""A line: a connected socket between the driver and one worker process, which carries messages both ways.

Promise: only calls that ask to wait block. Data that the socket does not accept is queued, and sent when it does; data
that has arrived is read in one call. A message may have large *buffers* behind it: they are sent from where they lie,
and received straight into memory of their own, so that Python copies none of their bytes.

Lines whose ends are on one machine connect here, those over TCP in tcp_line.py. Only a process of the same user on the
same machine, in the same namespaces, can be at the other end. A fork has its end of a `pair` from the start. For
actors, the driver listens on an abstract name with 128 random bits, which disappears with the socket, and the worker
connects; each asks the kernel for the identity of the other. Nothing of this blocks.

One thread at a time sends, and one reads; a second one leaves the work to the first. `close` may be
called by any. This module does not import Ray, and does not know what a message means.

NOTE [Forks]
A forked child has the socket too, and closes its copy at once: it never uses a line, and the other end must learn of
the parent's death, whatever the child does. A child that was not forked by Python keeps its copy. So `close` shuts the
connection down, which every process sees, rather than only closing a descriptor of it; and the driver watches the
process of a worker on its machine too.

NOTE [Torn]
A signal handler that raises in the middle of `read` may have lost data that was just read: then nothing more is
received. In the middle of `flush` it may cause data to be sent twice: then nothing more is sent. A lock that stays
taken ensures both. The epoch is told that it was interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import secrets
import select
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from rayloader.errors import RayloaderError
from rayloader.interrupts import new_lock
from rayloader.transport.memory_file import MemoryFileError, this_machine

HEADER = struct.Struct("<QI")  # length of the message that follows the sizes, and how many buffers are behind it
_SIZE = struct.Struct("<Q")  # of a buffer
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# Maximum bytes to read at once, for messages that are not longer than this.
CHUNK_BYTES = 1 << 18
# Messages up to this size are joined with their header: a copy costs less than a second part.
JOINED_BYTES = 1 << 16
_AT_ONCE = 64  # parts that one system call sends, or receives
# How long a thread reads at most without waiting, in seconds: one that takes longer was interrupted.
TORN_S = 10.0
# Errors when the system has no further descriptor; `accept` raises them whether a process has connected or not.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# For a call that must not wait, even if the socket would.
_NO_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)
# A program may have restored SIGPIPE's default action: the death of the other end must not end it.
SENDING: int = getattr(socket, "MSG_NOSIGNAL", 0) | _NO_WAIT


class LineError(RayloaderError):
    """A line can't be made or opened here; another channel is needed."""


class Parcel(NamedTuple):
    """A message with buffers behind it."""

    message: bytes
    buffers: Sequence[memoryview]


Message = bytes | Parcel


def packed(content: Any, apart: int | None) -> Message:
    """Pickles it; `PickleBuffer`s of more than `apart` bytes go behind it (None: none does), others are copied."""
    if apart is None:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    buffers: list[memoryview] = []

    def goes_into_it(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= apart:
            return True
        buffers.append(raw)
        return False

    message = pickle.dumps(content, pickle.HIGHEST_PROTOCOL, buffer_callback=goes_into_it)
    return Parcel(message, buffers) if buffers else message


def unpacked(message: Message) -> Any:
    """The inverse of `packed`."""
    return pickle.loads(message) if isinstance(message, bytes) else pickle.loads(message[0], buffers=message[1])


class LineSocket(socket.socket):
    """Ends without a warning when it is collected, before or after its owner."""

    _pid = -1

    def __init__(self, family: int = socket.AF_UNIX, fileno: int | None = None) -> None:
        super().__init__(family, socket.SOCK_STREAM, fileno=fileno)
        self._pid = os.getpid()
        _sockets.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process created it, rather than a parent from which this one was forked."""
        return os.getpid() == self._pid

    def end(self) -> None:
        """Closes it, for every process that has it if this is the one that created it."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)
        super(socket.socket, self).close()  # even if an interrupt came before the constructor's end

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.end()


_sockets: weakref.WeakSet[LineSocket] = weakref.WeakSet()


def _close_copies() -> None:
    """In a forked child, see NOTE [Forks]."""
    for copy in list(_sockets):
        copy.end()


os.register_at_fork(after_in_child=_close_copies)
# What closes a forked child's copies of descriptors, also if it is called again in a fork of that. A zygote runs no
# other callbacks of forks: without these it would keep connections, ports and locks.
closers: list[Callable[[], None]] = [_close_copies]


class Line:
    """One end of a line, connected.

    Attributes:
        ended: whether the other end has closed, or died, and everything that it sent was read; or nothing more can be.
        fault: why nothing more can be read, though it was sent; "" if that is not so.
        closed: whether this end has.
    """

    chunk_bytes = CHUNK_BYTES  # maximum bytes to read at once if no buffer is expected
    apart: int | None = None  # for `packed`: buffers beyond this size go behind their message
    _socket: LineSocket | None = None  # for `close` too, if an interrupt came before the constructor's end

    def __init__(self, connection: LineSocket | None = None) -> None:
        self._out: deque[memoryview] = deque()  # not sent yet
        self._others = 0  # how many parts at its end are memory that others may write to
        self._in = bytearray(self.chunk_bytes)
        self._filled = 0  # bytes of `_in`
        self._parcel: Parcel | None = None  # whose buffers are arriving
        self._rest: deque[memoryview] = deque()  # where their missing bytes go
        self._arrived: deque[Message] = deque()
        self._sending, self._reading = new_lock(reentrant=False), new_lock(reentrant=False)
        self.closed = False
        self.ended = False
        self.fault = ""
        if connection is not None:
            self._connected(connection)

    def _connected(self, connection: LineSocket) -> None:
        connection.setblocking(True)
        self._socket = connection

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """Everything to wait for, with the events of `select.poll`."""
        if self._socket is None or self.ended:
            return []
        return [(self._socket.fileno(), select.POLLIN | select.POLLOUT if self._out else select.POLLIN)]

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and only incoming data has to be waited for."""
        return self._socket is not None and not self.ended and not self._out

    @property
    def unsent(self) -> bool:
        """Whether something is queued."""
        return bool(self._out)

    def new_buffer(self, nbytes: int) -> memoryview:
        """Memory for a buffer that will arrive, or for one that has to be copied before it is sent."""
        return memoryview(bytearray(nbytes))

    def queue(self, message: Message) -> None:
        """Keeps a message for the next `flush`; do not write to its buffers before they are sent, or kept."""
        if isinstance(message, bytes):
            body, buffers = message, []
            header = HEADER.pack(len(body), 0)
        else:
            body, buffers = message.message, [view for view in message.buffers if view.nbytes]
            sizes = [view.nbytes for view in message.buffers]
            header = HEADER.pack(len(body), len(sizes)) + b"".join(map(_SIZE.pack, sizes))
        if len(body) <= JOINED_BYTES:
            self._out.append(memoryview(header + body))
        else:
            self._out.append(memoryview(header))
            self._out.append(memoryview(body))
        self._out.extend(buffers)
        self._others = len(buffers)

    def keep(self) -> None:
        """From here on, the unsent buffers of the last message may be written to."""
        if not self._others:
            return
        with self._sending:
            for index in range(-min(self._others, len(self._out)), 0):
                part = self._out[index]
                copy = self.new_buffer(part.nbytes)
                copy[:] = part
                self._out[index] = copy
            self._others = 0

    def send(self, message: Message) -> None:
        """Queues a message, and sends what the socket accepts."""
        self.queue(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket accepts."""
        connection, out = self._socket, self._out
        if connection is None or not self._sending.acquire(blocking=False):
            return
        try:
            while out:
                if len(out) == 1:
                    sent = connection.send(out[0], SENDING)
                else:
                    sent = connection.sendmsg(islice(out, _AT_ONCE), (), SENDING)
                while out and sent >= len(out[0]):
                    sent -= len(out.popleft())
                if sent:
                    out[0] = out[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone: `receive` will report it
            out.clear()
        self._sending.release()

    def receive(self) -> list[Message]:
        """The complete messages that have arrived; none if there is none yet."""
        self.read()
        return self.arrived()

    def receive_next(self) -> list[Message]:
        """Like `receive`, but waits until something has arrived, or the other end has gone.

        Even then there may be no complete message; meanwhile `unsent` data remains unsent.
        """
        self._read(flags=0)
        return self.arrived()

    def arrived(self) -> list[Message]:
        """The messages that were read and not returned before."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))] if self._arrived else []

    def read(self, *, wait: bool = False) -> bool:
        """Reads what has arrived, and keeps it for `arrived`; returns whether it did.

        Args:
            wait: if another thread reads, wait for it; otherwise leave it to that thread.
        """
        return self._read(wait=wait)

    def _read(self, *, wait: bool = False, flags: int = _NO_WAIT) -> bool:
        """Does the work of `read`; `flags` are those of the first system call."""
        connection = self._socket
        if connection is None or self.ended:
            return False
        if not self._reading.acquire(timeout=TORN_S if wait else 0):
            self.ended |= wait
            return False
        try:
            while self._read_once(connection, flags):
                flags = _NO_WAIT
        except BlockingIOError:
            pass
        except OSError:  # it was reset: the end that closed it wants no answer
            self.ended = True
        except (MemoryError, OverflowError):
            self.fault = (
                "a message begins as if it had more bytes than this machine has memory for: something else was written "
                "to the line. Let no code of the dataset write to descriptors that it has not opened"
            )
            self.ended = True
        self._reading.release()
        return True

    def _read_once(self, connection: LineSocket, flags: int) -> bool:
        """Reads once; returns whether there may be more."""
        if self._rest:
            views = list(islice(self._rest, _AT_ONCE))
            count = connection.recvmsg_into(views, 0, flags)[0]
            self._put(count)
        else:
            room = len(self._in) - self._filled
            count = connection.recv_into(memoryview(self._in)[self._filled :], room, flags)
            self._filled += count
            self._cut()
            if 0 < count < room:
                return False
        self.ended |= not count
        return count > 0

    def _put(self, count: int) -> None:
        """`count` bytes have been received into the buffers."""
        rest = self._rest
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = rest[0][count:]
        if not rest and self._parcel is not None:
            self._arrived.append(self._parcel)
            self._parcel = None

    def _cut(self) -> None:
        """Takes the complete messages out of the data; makes room for the rest of one."""
        begin, needed = 0, 0
        with memoryview(self._in) as view:
            while self._filled - begin >= HEADER.size:
                length, count = HEADER.unpack_from(view, begin)
                start = begin + HEADER.size + count * _SIZE.size
                end = start + length
                if end > self._filled:
                    needed = end - begin
                    break
                message = bytes(view[start:end])
                if not count:
                    self._arrived.append(message)
                    begin = end
                    continue
                sizes = [size for (size,) in _SIZE.iter_unpack(view[begin + HEADER.size : start])]
                begin = self._expect(message, sizes, end)
        size = max(needed, self.chunk_bytes)
        if begin or size != len(self._in):
            rest = self._in[begin : self._filled]
            if size != len(self._in):
                self._in = bytearray(size)
            self._in[: len(rest)] = rest
            self._filled = len(rest)

    def _expect(self, message: bytes, sizes: list[int], begin: int) -> int:
        """Makes room for a message's buffers, and fills in the bytes received; returns where in `_in` these end."""
        self._parcel = Parcel(message, [self.new_buffer(size) for size in sizes])
        self._rest.extend(view for view in self._parcel.buffers if view.nbytes)
        with memoryview(self._in) as view:
            for room in list(self._rest):
                count = min(room.nbytes, self._filled - begin)
                room[:count] = view[begin : begin + count]
                begin += count
                self._put(count)
        if not any(sizes):
            self._put(0)
        return begin

    def wait(self) -> None:
        """Waits until something can be received or sent, or the other end has gone. Not if it has `ended`."""
        for descriptor, events in self.descriptors:
            poll(descriptor, events)

    def drain(self) -> None:
        """Waits until the whole queue was sent, or the other end has gone."""
        while self._out and self._socket is not None and self._socket.fileno() >= 0:
            poll(self._socket.fileno(), select.POLLOUT)
            self.flush()

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        self.closed = self.ended = True
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.end()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()


class ListeningLine(Line):
    """The driver's end. Messages sent before the worker has connected are queued.

    Attributes:
        refused: why the worker can't be accepted; "" if it can.
    """

    _listener: LineSocket | None = None

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """Everything to wait for, with the events of `select.poll`."""
        return [(self._listener.fileno(), select.POLLIN)] if self._listener is not None else super().descriptors

    def read(self, *, wait: bool = False) -> bool:
        """Reads what has arrived, and keeps it for `arrived`; first accepts the worker."""
        if self._listener is not None:
            self._let_in(self._listener)
        return super().read(wait=wait)

    def _let_in(self, listener: LineSocket) -> None:
        """Accepts the worker, if it has connected."""
        raise NotImplementedError

    def _came(self, listener: LineSocket) -> int | None:
        """The descriptor of a new connection; None if there is none, if it has gone again, or if this was closed."""
        try:
            return listener.accept()[0].detach()
        except OSError as error:
            if error.errno in NO_ROOM and poll(listener.fileno(), select.POLLIN, 0):
                self.refused = f"can't let a worker in: {error}"
            return None

    def _entered(self, connection: LineSocket) -> None:
        """The worker has connected."""
        self._connected(connection)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self.closed:  # by another thread, meanwhile
            self.close()
        self.flush()

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        self.closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.end()
        super().close()


def poll(descriptor: int, events: int, timeout: int | None = None) -> bool:
    """Waits for events of `select.poll`, for `timeout` ms; returns whether there is one, or the other end has gone."""
    waiting = select.poll()
    waiting.register(descriptor, events)
    return bool(waiting.poll(timeout))


# ---- lines on one machine


class LineAddress(NamedTuple):
    """Everything that the other end needs to connect, and to verify the driver's identity."""

    name: str
    pid: int  # of the driver
    uid: int
    machine: str  # boot, PID namespace and network namespace


class WatchingLine(Line):
    """The driver's end, which ends with the worker's process even if other processes have copies of the other end."""

    _process = -1  # becomes readable with the death of the worker

    def watch(self, pid: int) -> None:
        """The worker's process is this one."""
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or it is dead already: that is heard too
            self._process = os.pidfd_open(pid)

    def read(self, *, wait: bool = False) -> bool:
        """Reads what has arrived, and keeps it for `arrived`."""
        done = super().read(wait=wait)
        if done and not self._arrived and self._process >= 0 and poll(self._process, select.POLLIN, 0):
            super().read()  # what it sent before its death
            self.ended |= not self._arrived
        return done

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """Everything to wait for; once the worker is dead its process is readable, if the kernel supports that."""
        dies = [] if self.ended or self._process < 0 else [(self._process, select.POLLIN)]
        return super().descriptors + dies

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        process, self._process = self._process, -1
        if process >= 0:
            os.close(process)
        super().close()


class DriverLine(WatchingLine, ListeningLine):
    """The driver's end of a line to an actor.

    Args:
        may_enter: whether the process with this id, which belongs to the same user, may be at the other end.

    Attributes:
        address: for the worker to connect to.

    Raises:
        LineError: this system has no such sockets.
    """

    def __init__(self, may_enter: Callable[[int], bool]) -> None:
        super().__init__()
        self._may_enter = may_enter
        listener = LineSocket()
        self._listener = listener  # so that an interrupt finds it here
        name = f"rayloader-line-{secrets.token_hex(16)}"
        try:
            listener.bind(f"\0{name}")
            listener.listen(1)
            listener.setblocking(False)
            self.address = LineAddress(name, os.getpid(), os.getuid(), _namespaces())
        except (OSError, AttributeError, MemoryFileError) as error:  # AttributeError: not Linux
            self.close()
            raise LineError(f"can't make a local socket: {error}") from error

    def _let_in(self, listener: LineSocket) -> None:
        came = self._came(listener)
        if came is None:
            return
        connection = LineSocket(fileno=came)
        pid, uid = peer(connection)
        if uid != os.getuid() or not self._may_enter(pid):
            connection.close()  # a stranger who has read the name in /proc/net/unix
            return
        self.watch(pid)
        self._entered(connection)


def pair() -> tuple[WatchingLine, socket.socket]:
    """Both ends of a line: the driver's, and the one that a fork is to get.

    Raises:
        LineError: this process can have no further descriptors.
    """
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        raise LineError(
            f"can't make a local socket: {error}. Use fewer workers, or raise the limit of open files (ulimit -n)"
        ) from error
    return WatchingLine(LineSocket(fileno=ours.detach())), theirs


def flush_streams() -> None:
    """Flushes this process's output, so that it precedes that of the next process with its streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be anything: closed, None, or the user's own
            stream.flush()


def connect(address: LineAddress) -> Line:
    """The worker's end; `address`: of the driver's.

    Raises:
        LineError: the driver is on another machine or in other namespaces, has gone, or another process answers there.
    """
    try:
        if (here := _namespaces()) != address.machine:
            raise LineError(f"{address.name} must be opened where it was made, {address.machine}; this is {here}")
        connection = LineSocket()
        try:
            connection.connect(f"\0{address.name}")
            if peer(connection) != (address.pid, address.uid):
                raise LineError(f"{address.name} must be process {address.pid}, and is another one")
        except BaseException:  # including Ctrl-C: no other code has the socket yet
            connection.close()
            raise
    except (OSError, MemoryFileError) as error:
        raise LineError(f"can't open {address.name}: {error}") from error
    return Line(connection)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


def _namespaces() -> str:
    return f"{this_machine()}, {os.readlink('/proc/self/ns/net')}"
