"""Where a worker process prints and logs: to the same places as the program, as a forked process would.

Promise: the worker's standard output and error are the program's own, from `open` to `close`. On another machine, or
if the program can't be reached, they stay Ray's, which shows them in the program with a prefix; then log records go
to standard error, with the program's levels and format.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from rayloader.inherit.logging_state import LoggingState
from rayloader.inherit.plain_values import is_plain
from rayloader.transport.line import Line, LineError
from rayloader.transport.local_line import STANDARD_STREAMS, LineAddress, connect, flush_streams


class WorkerOutput:
    """The output of one process."""

    def __init__(self) -> None:
        self._address: LineAddress | None = None
        self._line: Line | None = None
        self._lock = threading.RLock()
        self._streams = sys.stdout, sys.stderr  # Ray's
        self._own: dict[int, int] = {}  # copies of the streams as Ray created them, by number
        self._loggers: LoggingState | None = None
        self._restore: Callable[[], None] | None = None
        self._abandoned: Line | None = None  # of the process from which this one was forked
        os.register_at_fork(after_in_child=self._is_forked)

    def open(self, address: LineAddress | None, loggers: LoggingState) -> None:
        """Prints and logs to the program from now on."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        if address is None or address != self._address or self._line is None or self._line.ended:
            self._disconnect()
            self._connect(address)
        self._loggers = loggers
        self._restore = loggers.adopt(self._handler)

    def settle(self) -> None:
        """To be called when the user's modules are imported: the program has made their settings too."""
        if self._loggers is not None:
            self._loggers.settle(self._handler)
            self._loggers.filter_warnings()

    def close(self) -> None:
        """Prints to Ray's streams, and logs as at the process's start."""
        restore, self._restore, self._loggers = self._restore, None, None
        if restore is not None:
            restore()
        self._disconnect()

    def send(self, names: list[str], fields: dict[str, Any]) -> None:
        """Passes a record to the handlers of the program's loggers; waits while too many are queued."""
        with self._lock:
            if self._abandoned is not None and self._line is None and self._address is not None:
                with contextlib.suppress(LineError):
                    self._line = connect(self._address, {})
            if self._line is not None:
                self._line.send(_pickled(names, fields))
                self._line.drain()

    def _is_forked(self) -> None:
        """In a child that user code forked: it gets a connection of its own, because messages of two would be mixed."""
        self._lock = threading.RLock()  # another thread may have held it
        self._abandoned, self._line = self._line, None  # closing it would end the parent's

    def _handler(self, name: str, level: int) -> logging.Handler:
        handler: logging.Handler
        if self._line is not None:
            handler = _Forwarder(self, name)
        else:
            handler = logging.StreamHandler()
            with contextlib.suppress(Exception):  # there is none, or its class is unknown here
                handler.setFormatter(pickle.loads(self._loggers.formatter))  # type: ignore[union-attr]
        handler.setLevel(level)
        return handler

    def _connect(self, address: LineAddress | None) -> None:
        handed_over: dict[int, int] = {}
        if address is not None:
            with contextlib.suppress(LineError):  # on another machine, for instance
                self._line = connect(address, handed_over)
        self._address = address
        flush_streams()
        if handed_over and not self._own:
            self._own = {number: os.dup(number) for number in STANDARD_STREAMS}
        _put(handed_over)
        if handed_over:  # Ray's streams write a line in pieces: the lines of two processes would mix
            sys.stdout, sys.stderr = (
                os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
                for number in STANDARD_STREAMS
            )

    def _disconnect(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
        own, self._own = self._own, {}
        flush_streams()
        _put(own)
        sys.stdout, sys.stderr = self._streams


class _Forwarder(logging.Handler):
    """Represents the handlers that a logger has in the program.

    Attributes:
        logger_name: name of that logger.
    """

    def __init__(self, output: WorkerOutput, name: str) -> None:
        super().__init__()
        self._output = output
        self.logger_name = name

    def emit(self, record: logging.LogRecord) -> None:
        """Sends the record once, for its own logger and all above it that have handlers in the program."""
        if hasattr(record, _SENT):
            return
        setattr(record, _SENT, True)
        try:
            self._output.send(_forwarding(record.name), _fields(record))
        except Exception:  # a message that does not fit its arguments, for instance
            self.handleError(record)


_SENT = "_rayloader_sent"


def _forwarding(name: str) -> list[str]:
    """The loggers, from this one upwards, that receive its records and have handlers in the program."""
    found: list[str] = []
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        found += [handler.logger_name for handler in logger.handlers if isinstance(handler, _Forwarder)]
        logger = logger.parent if logger.propagate else None
    return found


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The part of a record that is sent. The program need not know the classes of what was logged here."""
    fields = {key: value for key, value in record.__dict__.items() if key != _SENT}
    if not (is_plain(record.msg) and is_plain(record.args)):
        fields.update(msg=record.getMessage(), args=None)
    else:
        record.getMessage()  # raises here the error that it would raise there
    if record.exc_info:
        fields.update(exc_info=None, exc_text=record.exc_text or logging.Formatter().formatException(record.exc_info))
    worker = get_worker_info()
    if worker is not None:
        fields["processName"] = f"DataLoader worker {worker.id}"
    return fields


def _pickled(names: list[str], fields: dict[str, Any]) -> bytes:
    """Pickles the fields; values of other classes that the program has put into the record are sent as text."""
    return pickle.dumps((names, {key: value if is_plain(value) else repr(value) for key, value in fields.items()}))


def _put(descriptors: dict[int, int]) -> None:
    """Makes these the standard streams, by number, and closes the copies."""
    for number, copy in descriptors.items():
        os.dup2(copy, number)
        os.close(copy)
