"""Passes this process's standard output and error to its workers, and their log records to its handlers.

Promise: a worker's output goes where the program prints, at once and unchanged, as from a forked process: the worker
has the program's own descriptors. Its log records reach the program's handlers, in the thread `rayloader-output`. Only
processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
import traceback

from rayloader.interrupts import Bell, DaemonThread
from rayloader.transport.line import NO_ROOM, Line, LineError, LineSocket, Message, turn_away, unpacked
from rayloader.transport.local_line import (
    STANDARD_STREAMS,
    LineAddress,
    flush_streams,
    hand_over,
    listen,
    peer,
)

_QUEUE = 128  # workers that may connect at the same time
# How often a wait for the thread checks whether it has missed a round of it, in seconds.
TICK_S = 0.1
# How long the end of an epoch waits at most for the workers' log records, in seconds.
SETTLE_S = 2.0


class Output:
    """Serves workers from `start` until `close`.

    Attributes:
        address: what workers connect to; None where this system has no such sockets.
    """

    def __init__(self) -> None:
        self.address: LineAddress | None = None
        self._listener = LineSocket()
        self._lines: dict[int, Line] = {}  # by descriptor
        self._closing = False
        self._spare = os.open(os.devnull, os.O_RDWR)  # closed to turn a worker away if no descriptor is left
        self._pid = os.getpid()
        self._at_work = False
        self._rounds = Bell()  # of the thread
        self._thread = DaemonThread(self._serve, "rayloader-output")
        with contextlib.suppress(LineError):
            self.address = listen(self._listener, "output", _QUEUE)

    def start(self) -> None:
        """Starts the service, if it does not run; see `DaemonThread`."""
        if self.address is not None and not self._closing:
            self._thread.start()

    def settle(self) -> None:
        """Waits for a limited time until all that workers have sent so far is handled."""
        if threading.current_thread() is self._thread or os.getpid() != self._pid:
            return
        until = time.monotonic() + SETTLE_S
        while self._thread.is_alive() and (self._at_work or _readable(list(self._lines))):
            if time.monotonic() > until:  # a handler may wait for a lock that this thread holds
                return
            self._rounds.wait(TICK_S)

    def close(self) -> None:
        """Ends the service once all that workers have sent so far is handled; callable more than once."""
        self._closing = True
        if self.address is not None and self._listener.is_ours:
            turn_away(self._listener)
            self._thread.join()
        self._listener.close()
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)

    def _serve(self) -> None:
        while not self._closing:
            poll = select.poll()
            poll.register(self._listener.fileno(), select.POLLIN)
            for descriptor in self._lines:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll()
            self._at_work = True
            for descriptor, _ in ready:
                try:
                    if descriptor in self._lines:
                        self._handle(descriptor)
                    elif not self._closing:
                        self._let_in()
                except BaseException:  # any error: workers depend on this thread
                    _print_error()
            self._at_work = False
            self._rounds.ring()
        for descriptor in list(self._lines):
            self._handle(descriptor)
        for line in self._lines.values():
            line.close()

    def _let_in(self) -> None:
        try:
            connection = LineSocket(fileno=self._listener.accept()[0].detach())
        except OSError as error:  # otherwise the worker that connected is gone again
            if error.errno in NO_ROOM:
                self._turn_one_away()
            return
        if peer(connection)[1] != os.getuid():
            connection.close()
            return
        flush_streams()
        # What the program has closed prints nothing in a worker too; Ray would print it to the other stream.
        hand_over(connection, {number: number if _has_stream(number) else self._spare for number in STANDARD_STREAMS})
        line = Line(connection)
        self._lines[line.descriptor] = line

    def _turn_one_away(self) -> None:
        """No descriptor is left: the waiting worker sees the end of its connection, and prints through Ray."""
        with contextlib.suppress(OSError):
            os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDWR)
        except OSError:  # another thread has taken it
            self._spare = -1
            select.poll().poll(TICK_S * 1000)  # the waiting worker cannot even be turned away yet

    def _handle(self, descriptor: int) -> None:
        line = self._lines[descriptor]
        for message in line.receive():
            try:
                handle(message)
            except BaseException:  # the user's handlers may raise anything, even SystemExit
                _print_error()
        if line.ended:
            del self._lines[descriptor]
            line.close()


def _print_error() -> None:
    """Not through logging, whose handlers may have raised the error."""
    with contextlib.suppress(Exception):
        traceback.print_exc()


def _readable(descriptors: list[int]) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool([descriptor for descriptor, events in poll.poll(0) if events & select.POLLIN])


def handle(message: Message) -> None:
    """Lets the handlers of the loggers of these names handle a worker's log record.

    The program's own record factory and filters make and filter the record: once, as in a forked process.
    """
    names, fields = unpacked(message)
    make = logging.getLogRecordFactory()
    known = (fields[name] for name in ("name", "levelno", "pathname", "lineno", "msg"))
    # The arguments come with the other fields: a record's may be one dict, which the factory does not accept.
    record = make(*known, (), None, fields["funcName"], fields["stack_info"])
    record.__dict__.update(fields)
    source = logging.getLogger(record.name)
    found = source.filter(record)  # newer versions of Python may return another record
    if not found:
        return
    if isinstance(found, logging.LogRecord):
        record = found
    for name in names:
        for handler in logging.getLogger(name or None).handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def _has_stream(number: int) -> bool:
    """Whether that descriptor is the program's standard output or error, and not a file that was opened later."""
    stream = {1: sys.__stdout__, 2: sys.__stderr__}[number]
    return stream is not None and not stream.closed
