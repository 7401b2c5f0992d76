"""Hands this process's standard output and error to its workers, and has its loggers handle what they log.

Promise: what a worker prints goes where the program prints, at once and unchanged, as from a forked process: the worker
has the program's own descriptors. What it logs reaches the program's handlers, in the thread `rayloader-output`. Only
processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import sys
import threading

from rayloader.transport.line import (
    STANDARD_STREAMS,
    Line,
    LineAddress,
    LineError,
    LocalSocket,
    hand_over,
    listen,
    peer,
    turn_away,
)

_QUEUE = 128  # workers that may ask at once


class Output:
    """Serves workers until `close`.

    Attributes:
        address: what workers connect to; None where this system has no such sockets.
    """

    def __init__(self) -> None:
        self.address: LineAddress | None = None
        self._listener = LocalSocket()
        self._lines: dict[int, Line] = {}  # by descriptor
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="rayloader-output", daemon=True)
        with contextlib.suppress(LineError):
            self.address = listen(self._listener, "output", _QUEUE)
            self._thread.start()

    def close(self) -> None:
        """Ends it when all that workers have sent so far is handled; callable more than once."""
        self._closing = True
        if self.address is not None and self._listener.is_ours:
            turn_away(self._listener)
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing:
            poll = select.poll()
            poll.register(self._listener.fileno(), select.POLLIN)
            for descriptor in self._lines:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor in self._lines:
                    self._handle(descriptor)
                elif not self._closing:
                    self._let_in()
        for descriptor in list(self._lines):
            self._handle(descriptor)
        for line in self._lines.values():
            line.close()

    def _let_in(self) -> None:
        try:
            connection = LocalSocket(self._listener.accept()[0].detach())
        except OSError:  # who came has gone again
            return
        if peer(connection)[1] != os.getuid():
            connection.close()
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be anything: closed, or None
                stream.flush()  # what this process has printed so far comes first
        hand_over(connection, STANDARD_STREAMS)
        line = Line(connection)
        self._lines[line.descriptor] = line

    def _handle(self, descriptor: int) -> None:
        line = self._lines[descriptor]
        for message in line.receive():
            try:
                handle(message)
            except Exception:  # the user's handlers, and what they are given, may raise anything
                logging.getLogger("rayloader").warning("rayloader: a worker's log record was lost", exc_info=True)
        if line.ended:
            del self._lines[descriptor]
            line.close()


def handle(message: bytes) -> None:
    """Has the handlers of one logger handle what a worker has logged."""
    name, fields = pickle.loads(message)
    record = logging.makeLogRecord(fields)
    if logging.getLogger(record.name).filter(record):
        for handler in logging.getLogger(name or None).handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
