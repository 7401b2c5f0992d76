"""Lines whose ends are on one machine: how they connect.

Promise: only a process of the same user on the same machine, in the same namespaces, can be at the other end. A fork
has its end of a `pair` from the start. For actors, the driver listens on an abstract name with 128 random bits, which
disappears with the socket, and the worker connects; each asks the kernel for the identity of the other. Nothing here
blocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

from rayloader.transport.line import Line, LineError, LineSocket, ListeningLine, poll
from rayloader.transport.memory_file import MemoryFileError, this_machine

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


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
        if done and not self._arrived and self._has_died():
            super().read()  # what it sent before its death
            self.ended |= not self._arrived
        return done

    def _has_died(self) -> bool:
        return self._process >= 0 and poll(self._process, select.POLLIN, 0)

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
        self.address = listen(listener, "line", 1)

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


def listen(listener: LineSocket, purpose: str, waiting: int) -> LineAddress:
    """Gives a socket an unguessable name, under which `waiting` processes may connect at the same time.

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
