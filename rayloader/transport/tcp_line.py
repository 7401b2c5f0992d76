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
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rayloader.transport.line import Line, LineError, LineSocket
from rayloader.transport.listening import ListeningLine
from rayloader.transport.sender import Sender
from rayloader.transport.tcp_socket import TcpSocket

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

NewBuffer = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Everything that the worker needs to connect, and to prove that it may."""

    host: str  # a numeric address
    port: int
    secret: bytes = field(repr=False)


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
            if not self._arrived and connection.is_silent:
                self.ended = True
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
        if self._closed:
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
    """The worker's end. A thread of its own sends kept data while the worker continues."""

    apart = _HEAD_BYTES

    def __init__(self, connection: TcpSocket, new_buffer: NewBuffer) -> None:
        super().__init__(connection)
        self._new_buffer = new_buffer
        self._sender: Sender | None = None

    def new_buffer(self, nbytes: int) -> memoryview:
        """Memory for data that has to be copied before it is sent."""
        return self._new_buffer(nbytes)

    def keep(self) -> None:
        """From here on, the unsent buffers of the last message may be written to."""
        super().keep()
        if self.unsent:
            if self._sender is None:
                self._sender = Sender(self)
            self._sender.ring()

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        super().close()
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


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
