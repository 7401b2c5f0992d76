"""The driver's end of a line, which waits for the worker.

Promise: processes that may not connect are turned away, and the line goes on waiting; once the worker is connected, or
the line is closed, no other process can connect. Which ones may connect is decided in local_line.py and tcp_line.py.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket

from rayloader.transport.line import Line, LineSocket, poll

# Errors when the system has no further descriptor; `accept` raises them whether a process has connected or not.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListeningLine(Line):
    """The driver's end. Messages sent before the worker has connected are queued.

    Attributes:
        refused: why the worker can't be accepted; "" if it can.
    """

    _listener: LineSocket | None = None

    def __init__(self) -> None:
        super().__init__()
        self._finishing = False
        self.refused = ""

    @property
    def descriptor(self) -> int:
        """The descriptor to wait for; -1 if nothing more will come."""
        return self._listener.fileno() if self._listener is not None else super().descriptor

    @property
    def events(self) -> int:
        """The events of `select.poll` to wait for."""
        return select.POLLIN if self._listener is not None else super().events

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
        if self._closed:  # by another thread, meanwhile
            self.close()
        self.flush()

    def flush(self) -> None:
        """Sends what the socket accepts."""
        super().flush()
        if self._finishing and self._socket is not None and not self._out:
            self._finishing = False
            super().finish()

    def finish(self) -> None:
        """Nothing more will be sent; the other end learns that after reading everything."""
        self._finishing = True
        self.flush()

    def close(self) -> None:
        """Ends the line at once, even if data is in transit. Callable more than once, and by any thread."""
        self._closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            if listener.is_ours:  # a forked child may have a copy: no process must wait there for an answer
                turn_away(listener)
            listener.close()
        super().close()


def turn_away(listener: LineSocket) -> None:
    """Lets no process connect from here on; those that have connected see the end."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
