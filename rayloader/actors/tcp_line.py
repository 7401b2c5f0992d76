"""Lines to workers that no local socket reaches: how the two ends of a TCP connection meet.

Promise: the driver listens at an address of its node, on a port that the system picks, until the worker is connected.
Both ends prove that they know a secret of 256 random bits, which has gone to the worker with a Ray call; before that,
nothing else from the other end is read. The line's data is not encrypted, nor is that between Ray's own processes,
unless Ray is configured to use TLS: then there are no such lines.

NOTE [Handshake]
The driver sends MAGIC and 32 random bytes. The worker answers with 32 of its own and with the HMAC, by the secret, of
its role and both; then the driver sends the HMAC of its own role and both. A process that does not answer correctly is
turned away, and has learned 32 random bytes. Only a few may be about to answer, and the newest replaces the oldest: a
stranger delays nobody, because a worker that was turned away for that reason tries again until its time limit.

NOTE [Silence]
A machine that loses power sends nothing. TCP probes it when there is nothing to send (keepalive). If something was
sent, TCP only sends it again, for a quarter of an hour: then it is Ray that says so, after up to half a minute. With
TCP_USER_TIMEOUT a worker that is alive, and does not read while it builds a batch, would be lost too.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from rayloader.interrupts import Bell, DaemonThread
from rayloader.transport.line import Line, LineError, LineSocket, ListeningLine

MAGIC = b"rayloader line 1"
_NONCE = 32  # bytes
_PROOF = 32  # bytes, of a SHA-256
# Bytes to read at once of a message that has large buffers behind it: more would be copied once more.
_HEAD_BYTES = 1 << 12
_MOST_AWAITED = 1 << 30  # bytes; the system accepts less if it has less room
# Connections that have not proven themselves yet.
MOST_STRANGERS = 8
_BACKLOG = 64  # kept by the system until the driver accepts them
# How long a connection attempt may take, in seconds: then there is a firewall. More than TCP needs for a few lost
# packets.
CONNECT_S = 8.0
# How long the driver may then take to send something, in seconds: the program may block its threads.
GREETING_S = 60.0
_RETRY_S = 0.05
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, tries

NewBuffer = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Everything that the worker needs to connect, and to prove that it may."""

    host: str  # a numeric address
    port: int
    secret: bytes = field(repr=False)


class TcpSocket(LineSocket):
    """A socket whose end the other machine notices at once, and that notices when the other is gone."""

    def watch(self) -> None:
        """After connecting: sends small messages at once, and notices if the other machine is gone."""
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                self.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def reset_at_end(self) -> None:
        """Lets the other end see at once that this one is closed, and not only that it has finished sending."""
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class TcpDriverLine(ListeningLine):
    """The driver's end.

    Args:
        host: a numeric address of this machine that workers can reach.
        new_buffer: returns writable memory for a received buffer.

    Attributes:
        address: for the worker to connect to.

    Raises:
        LineError: no socket can listen there.
    """

    chunk_bytes = _HEAD_BYTES

    def __init__(self, host: str, new_buffer: NewBuffer) -> None:
        super().__init__()
        self._new_buffer = new_buffer
        self._wakes_for = 1  # bytes
        self._strangers: dict[TcpSocket, tuple[bytes, bytearray]] = {}  # oldest first: nonce, and the bytes received
        try:
            family, *_, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            listener = TcpSocket(family)
            self._listener = listener  # so that an interrupt finds it here
            listener.bind(name)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            self.close()
            raise LineError(f"can't listen at {host}: {error}") from error
        self.address = TcpAddress(host, listener.getsockname()[1], secrets.token_bytes(32))

    def new_buffer(self, nbytes: int) -> memoryview:
        """Memory for a buffer that will arrive."""
        return self._new_buffer(nbytes)

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """Everything to wait for, with the events of `select.poll`."""
        strangers = [(stranger.fileno(), select.POLLIN) for stranger in list(self._strangers)]
        return super().descriptors + strangers

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and only incoming data has to be waited for."""
        return super().is_quiet and not self._strangers

    def read(self, *, wait: bool = False) -> bool:
        """Reads what has arrived, and keeps it for `arrived`; first accepts the worker."""
        done = super().read(wait=wait)
        connection = self._socket
        if done and isinstance(connection, TcpSocket):
            self._wake_for(connection, max(1, sum(view.nbytes for view in self._rest)))
        return done

    def _wake_for(self, connection: TcpSocket, nbytes: int) -> None:
        """Wakes no thread for less than `nbytes` bytes, or half of what the system has room for."""
        if nbytes != self._wakes_for:
            self._wakes_for = nbytes
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(nbytes, _MOST_AWAITED))

    def _let_in(self, listener: LineSocket) -> None:
        if not self._reading.acquire(blocking=False):
            return
        try:
            for _ in range(MOST_STRANGERS):
                if (came := self._came(listener)) is None:
                    break
                self._greet(TcpSocket(listener.family, came))
            for stranger in list(self._strangers):
                if self._proves_itself(stranger):
                    del self._strangers[stranger]
                    self._send_away()
                    self._entered(stranger)
                    break
        finally:
            self._reading.release()

    def _greet(self, stranger: TcpSocket) -> None:
        while len(self._strangers) >= MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.end()
        nonce = secrets.token_bytes(_NONCE)
        self._strangers[stranger] = nonce, bytearray()
        if self.closed:
            self._send_away()
        with contextlib.suppress(OSError):  # it has gone again
            stranger.setblocking(False)
            stranger.watch()
            stranger.send(MAGIC + nonce)

    def _proves_itself(self, stranger: TcpSocket) -> bool:
        """Whether its complete answer has come, and is correct."""
        nonce, said = self._strangers[stranger]
        try:
            count = len(said)
            said += stranger.recv(_NONCE + _PROOF - count)
            has_gone = len(said) == count
        except BlockingIOError:
            return False
        except OSError:
            has_gone = True
        if len(said) == _NONCE + _PROOF:
            theirs, proof = bytes(said[:_NONCE]), bytes(said[_NONCE:])
            if hmac.compare_digest(proof, _proof(self.address.secret, b"worker", nonce, theirs)):
                with contextlib.suppress(OSError):
                    stranger.reset_at_end()
                    stranger.send(_proof(self.address.secret, b"driver", nonce, theirs))
                return True
            has_gone = True
        if has_gone:
            self._strangers.pop(stranger, None)
            stranger.end()
        return False

    def _send_away(self) -> None:
        strangers, self._strangers = self._strangers, {}
        for stranger in strangers:
            stranger.end()

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        super().close()
        self._send_away()


class TcpLine(Line):
    """The worker's end. A thread of its own, `rayloader-sender`, sends kept data while the worker continues.

    The thread starts when something is queued and ends with `close`; it does not keep alive a line that nothing else
    refers to.
    """

    apart = _HEAD_BYTES
    _thread: DaemonThread | None = None  # for `close` too, if an interrupt came before the constructor's end

    def __init__(self, connection: TcpSocket, new_buffer: NewBuffer) -> None:
        super().__init__(connection)
        self._new_buffer = new_buffer
        self._bell = Bell()  # rung when there is something in the queue

    def new_buffer(self, nbytes: int) -> memoryview:
        """Memory for data that has to be copied before it is sent."""
        return self._new_buffer(nbytes)

    def keep(self) -> None:
        """From here on, the unsent buffers of the last message may be written to."""
        super().keep()
        if self.unsent:
            if self._thread is None:
                self._thread = DaemonThread(functools.partial(_send, weakref.ref(self), self._bell), "rayloader-sender")
            self._thread.start()
            self._bell.ring()

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        super().close()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._bell.ring()
            if threading.current_thread() is not thread:  # the garbage collector may run this there
                thread.join()


def _send(reference: weakref.ref[TcpLine], bell: Bell) -> None:
    """Sends a line's queue whenever the bell rings, until the line is closed."""
    while (line := reference()) is not None and not line.closed:
        line.drain()
        del line
        bell.wait(threading.TIMEOUT_MAX)


def connect(
    address: TcpAddress, new_buffer: NewBuffer, limit: float = CONNECT_S, patience: float = GREETING_S
) -> TcpLine:
    """The worker's end.

    Args:
        address: of the driver's end.
        new_buffer: returns writable memory for data that has to be copied before it is sent.
        limit: seconds until there is a connection.
        patience: seconds from then on until the driver has sent everything that it has to.

    Raises:
        LineError: the driver can't be reached there, has gone, or another process answers there.
    """
    until = time.monotonic() + limit
    while True:
        try:
            return TcpLine(_met(address, until, patience), new_buffer)
        except OSError as error:
            if isinstance(error, ConnectionAbortedError) and time.monotonic() + _RETRY_S < until:
                time.sleep(_RETRY_S)  # turned away for a newer connection
                continue
            raise LineError(
                f"no connection from {socket.gethostname()} to port {address.port} of {address.host}: "
                f"{error or type(error).__name__}. Let that machine open TCP connections to that address, on the ports "
                "of /proc/sys/net/ipv4/ip_local_port_range"
            ) from error


def _met(address: TcpAddress, until: float, patience: float) -> TcpSocket:
    """A connection to the driver, after both ends have proven their identity."""
    family, *_, name = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    connection = TcpSocket(family)
    try:
        connection.settimeout(max(0.01, until - time.monotonic()))
        connection.connect(name)
        connection.watch()
        until = time.monotonic() + patience
        greeting = _exactly(connection, len(MAGIC) + _NONCE, until)
        if not greeting.startswith(MAGIC):
            raise ConnectionError("what answers there is no rayloader")
        theirs, nonce = greeting[len(MAGIC) :], secrets.token_bytes(_NONCE)
        connection.sendall(nonce + _proof(address.secret, b"worker", theirs, nonce))
        proof = _exactly(connection, _PROOF, until)
        if not hmac.compare_digest(proof, _proof(address.secret, b"driver", theirs, nonce)):
            raise ConnectionError("what answers there does not know the line's secret")
    except BaseException:  # including Ctrl-C: no other code has the socket yet
        connection.end()
        raise
    return connection


def _exactly(connection: TcpSocket, nbytes: int, until: float) -> bytes:
    """Exactly `nbytes` bytes, and none of those that follow."""
    said = b""
    while len(said) < nbytes:
        connection.settimeout(max(0.01, until - time.monotonic()))
        try:
            part = connection.recv(nbytes - len(said))
        except ConnectionResetError:
            part = b""
        if not part:
            raise ConnectionAbortedError("it was closed there")
        said += part
    return said


def _proof(secret: bytes, role: bytes, drivers: bytes, workers: bytes) -> bytes:
    return hmac.digest(secret, role + drivers + workers, "sha256")
