"""A TCP connection whose end, and whose silence, is noticed.

NOTE [Silence]
A machine that loses power says nothing. TCP asks it whether it is there, when there is nothing to send (keepalive).
When something was sent, it only sends that again, for a quarter of an hour; so the driver looks how long ago the other
machine has acknowledged something. TCP_USER_TIMEOUT would do the same but for one case: it also ends the connection to
a worker that is there, and does not read while it builds a batch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref

from rayloader.transport.line import LineSocket

# After how many seconds without any sign of it a machine is taken for dead.
SILENCE_S = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, tries
_TCP_INFO = struct.Struct("8B24I")  # of Linux; more may follow
_PROBES, _UNACKED, _LAST_ACK = 3, 8 + 4, 8 + 12  # places in it: unanswered, packets, milliseconds ago


class TcpSocket(LineSocket):
    """One whose end the other machine hears of at once, and whose silence is noticed."""

    def __init__(self, family: int, fileno: int | None = None) -> None:
        super().__init__(family, fileno)
        _sockets.add(self)

    def watch(self) -> None:
        """Connected: small messages go at once, and a machine that is gone is noticed."""
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                self.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def reset_at_end(self) -> None:
        """The other end is to see at once that this one is closed, and not only that it says no more."""
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @property
    def is_silent(self) -> bool:
        """Whether the other machine has given no sign for too long, though it has been sent something."""
        try:
            info = _TCP_INFO.unpack(self.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        except (OSError, AttributeError, struct.error):  # closed, or not Linux: then TCP tells later
            return False
        asked: bool = info[_UNACKED] > 0 or info[_PROBES] > 1
        return asked and bool(info[_LAST_ACK] >= SILENCE_S * 1000)


_sockets: weakref.WeakSet[TcpSocket] = weakref.WeakSet()


def _close_copies() -> None:
    """In a forked child: the other end is to hear of the parent's death, whatever becomes of the child."""
    for copy in list(_sockets):
        copy.end()


os.register_at_fork(after_in_child=_close_copies)
