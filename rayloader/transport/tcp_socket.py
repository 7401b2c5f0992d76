"""A TCP connection that notices when the other end closes or falls silent.

NOTE [Silence]
A machine that loses power sends nothing. TCP probes it when there is nothing to send (keepalive).
If something was sent, TCP only sends it again, for a quarter of an hour; so the driver checks how long ago the other
machine has acknowledged anything. TCP_USER_TIMEOUT would do the same with one exception: it also ends the connection to
a worker that is alive, and does not read while it builds a batch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref

from rayloader.transport.line import LineSocket

# A machine is considered dead after this many seconds without any sign of it.
SILENCE_S = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, tries
_TCP_INFO = struct.Struct("8B24I")  # of Linux; more may follow
_PROBES, _UNACKED, _LAST_ACK = 3, 8 + 4, 8 + 12  # places in it: unanswered, packets, milliseconds ago


class TcpSocket(LineSocket):
    """A socket whose end the other machine notices at once, and that notices the other's silence."""

    def __init__(self, family: int, fileno: int | None = None) -> None:
        super().__init__(family, fileno)
        _sockets.add(self)

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

    @property
    def is_silent(self) -> bool:
        """Whether the other machine has given no sign for too long, although something was sent to it."""
        try:
            info = _TCP_INFO.unpack(self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except (OSError, AttributeError, struct.error):  # closed, or not Linux: then TCP reports it later
            return False
        asked: bool = info[_UNACKED] > 0 or info[_PROBES] > 1
        return asked and bool(info[_LAST_ACK] >= SILENCE_S * 1000)


_sockets: weakref.WeakSet[TcpSocket] = weakref.WeakSet()


def _close_copies() -> None:
    """In a forked child: the other end must learn of the parent's death, whatever the child does."""
    for copy in list(_sockets):
        copy.end()


os.register_at_fork(after_in_child=_close_copies)
