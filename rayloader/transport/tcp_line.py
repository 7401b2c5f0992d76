"""Lines to workers that no local socket reaches: how the two ends of a TCP connection meet.

Promise: the driver listens at an address of its node, on a port that the system picks, until the worker is in. Both
ends prove that they know a secret of 256 random bits, which has gone to the worker with a Ray call; before that nothing
that the other says is looked into. What goes over the line is not encrypted, as what goes between Ray's own processes
is not, unless Ray is told to use TLS: then there are no such lines.

NOTE [Handshake]
The driver says: MAGIC and 32 random bytes. The worker answers with 32 of its own and with the HMAC, by the secret, of
its role and both; then the driver says the HMAC of its own role and both. Whoever does not answer right is turned away,
and has learned 32 random bytes. Only so many may be about to answer, and the newest takes the place of the oldest: a
stranger holds up nobody, for a worker that was turned away so tries again for as long as it may take to connect.
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
# What is read at once of a message that has large buffers behind it: more would be copied once more.
_HEAD_BYTES = 1 << 12
_MOST_AWAITED = 1 << 30  # bytes; the system takes less where it has less room
# Connections that have yet to prove themselves.
MOST_STRANGERS = 8
_BACKLOG = 64  # that the system keeps until the driver looks
# How long a connection may take, in seconds: then there is a firewall. Longer than a few lost packets take TCP.
CONNECT_S = 8.0
# How long the driver may take to say something then, in seconds: the program may keep its threads from running.
GREETING_S = 60.0
_RETRY_S = 0.05

NewBuffer = Callable[[int], memoryview]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """All that the worker needs to connect, and to prove that it may."""

    host: str  # a numeric address
    port: int
    secret: bytes = field(repr=False)


class TcpDriverLine(ListeningLine):
    """The driver's end.

    Args:
        host: a numeric address of this machine, which workers reach.
        new_buffer: gives writable memory for a buffer of so many bytes that is to arrive.

    Attributes:
        address: what the worker connects to.

    Raises:
        LineError: no socket can listen there.
    """

    chunk_bytes = _HEAD_BYTES

    def __init__(self, host: str, new_buffer: NewBuffer) -> None:
        super().__init__()
        self._new_buffer = new_buffer
        self._wakes_for = 1  # bytes
        self._strangers: dict[TcpSocket, tuple[bytes, bytearray]] = {}  # oldest first: nonce, and what it has said
        try:
            family, *_, name = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            listener = TcpSocket(family)
            self._listener = listener  # an interrupt finds it here
            listener.bind(name)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            self.close()
            raise LineError(f"can't listen at {host}: {error}") from error
        self.address = TcpAddress(host, listener.getsockname()[1], secrets.token_bytes(32))

    def new_buffer(self, nbytes: int) -> memoryview:
        """Memory for a buffer that is to arrive."""
        return self._new_buffer(nbytes)

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """All that has to be waited for, with the events of `select.poll`."""
        strangers = [(stranger.fileno(), select.POLLIN) for stranger in list(self._strangers)]
        return super().descriptors + strangers

    @property
    def is_quiet(self) -> bool:
        """Whether it is open, and there is nothing to wait for but what comes."""
        return super().is_quiet and not self._strangers

    def read(self, *, wait: bool = False) -> bool:
        """Reads what has arrived, and keeps it for `arrived`; lets the worker in before."""
        done = super().read(wait=wait)
        connection = self._socket
        if done and isinstance(connection, TcpSocket):
            if not self._arrived and connection.is_silent:
                self.ended = True
            self._wake_for(connection, max(1, sum(view.nbytes for view in self._rest)))
        return done

    def _wake_for(self, connection: TcpSocket, nbytes: int) -> None:
        """Nobody is to be woken for less than so many bytes, or half of what the system has room for."""
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
        """Whether all that it had to say has come, and is right."""
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
        """Ends the line at once, whatever is under way. Callable more than once, and by any thread."""
        super().close()
        self._send_away()


class TcpLine(Line):
    """The worker's end. What is kept is sent while the worker goes on with something else, by a thread of its own."""

    apart = _HEAD_BYTES

    def __init__(self, connection: TcpSocket, new_buffer: NewBuffer) -> None:
        super().__init__(connection)
        self._new_buffer = new_buffer
        self._sender: Sender | None = None

    def new_buffer(self, nbytes: int) -> memoryview:
        """Memory for what has to be copied before it is sent."""
        return self._new_buffer(nbytes)

    def keep(self) -> None:
        """What is not sent of the last message's buffers may be written to from here on."""
        super().keep()
        if self.unsent:
            if self._sender is None:
                self._sender = Sender(self)
            self._sender.ring()

    def close(self) -> None:
        """Ends the line at once, whatever is under way. Callable more than once, and by any thread."""
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
        new_buffer: gives writable memory for what has to be copied before it is sent.
        limit: seconds until there is a connection.
        patience: seconds from then on until the driver has said all that it has to.

    Raises:
        LineError: the driver can't be reached there, has gone, or is not what answers there.
    """
    until = time.monotonic() + limit
    while True:
        try:
            return TcpLine(_met(address, until, patience), new_buffer)
        except OSError as error:
            if isinstance(error, ConnectionAbortedError) and time.monotonic() + _RETRY_S < until:
                time.sleep(_RETRY_S)  # turned away for somebody who came later
                continue
            raise LineError(
                f"no connection from {socket.gethostname()} to port {address.port} of {address.host}: "
                f"{error or type(error).__name__}. Let the workers' machines open TCP connections to that address, on "
                "the ports of /proc/sys/net/ipv4/ip_local_port_range"
            ) from error


def _met(address: TcpAddress, until: float, patience: float) -> TcpSocket:
    """A connection to the driver, which both ends have proven to be that."""
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
    except BaseException:  # Ctrl-C too: nobody else has the socket yet
        connection.end()
        raise
    return connection


def _exactly(connection: TcpSocket, nbytes: int, until: float) -> bytes:
    """So many bytes, and not one of what follows."""
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
