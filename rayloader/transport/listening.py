"""The driver's end of a line, which waits for the worker.

Promise: whoever may not enter is turned away, and the line goes on waiting; once the worker is in, or the line is
closed, nobody else can connect. Who may enter is another file's: local_line.py, tcp_line.py.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket

from rayloader.transport.line import Line, LineSocket, poll

# Why the system takes no further descriptor; `accept` says so whether somebody has come or not.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ListeningLine(Line):
    """The driver's end. What is sent before the worker has connected is queued.

    Attributes:
        refused: why the worker can't be let in; "" unless that is so.
    """

    _listener: LineSocket | None = None

    def __init__(self) -> None:
        super().__init__()
        self._finishing = False
        self.refused = ""

    @property
    def descriptor(self) -> int:
        """To be waited for, -1 where nothing will come any more."""
        return self._listener.fileno() if self._listener is not None else super().descriptor

    @property
    def events(self) -> int:
        """Of `select.poll`, to be waited for."""
        return select.POLLIN if self._listener is not None else super().events

    def read(self, *, wait: bool = False) -> bool:
        """Reads what has arrived, and keeps it for `arrived`; lets the worker in before."""
        if self._listener is not None:
            self._let_in(self._listener)
        return super().read(wait=wait)

    def _let_in(self, listener: LineSocket) -> None:
        """Lets the worker in, if it has come."""
        raise NotImplementedError

    def _came(self, listener: LineSocket) -> int | None:
        """The descriptor of who has connected; None: nobody yet, or who came has gone again, or this was closed."""
        try:
            return listener.accept()[0].detach()
        except OSError as error:
            if error.errno in NO_ROOM and poll(listener.fileno(), select.POLLIN, 0):
                self.refused = f"can't let a worker in: {error}"
            return None

    def _entered(self, connection: LineSocket) -> None:
        """This is the worker."""
        self._connected(connection)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        if self._closed:  # by another thread, meanwhile
            self.close()
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
        self._closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            if listener.is_ours:  # a forked child may have a copy: nobody is to wait for an answer there
                turn_away(listener)
            listener.close()
        super().close()


def turn_away(listener: LineSocket) -> None:
    """Lets nobody connect from here on; those who have see the end."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()
