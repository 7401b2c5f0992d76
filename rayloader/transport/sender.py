"""The thread that sends a line's queue while its worker builds batches.

Promise: owns one thread, `rayloader-sender`, which starts when something is queued and ends with `close`, or with the
line. It does not keep a line alive that nothing else refers to.
"""

from __future__ import annotations

import threading
import weakref

from rayloader.bell import Bell, DaemonThread
from rayloader.transport.line import Line


class Sender:
    """The sender of one line."""

    def __init__(self, line: Line) -> None:
        self._line = weakref.ref(line)
        self._bell = Bell()
        self._closed = False
        self._thread = DaemonThread(self._loop, "rayloader-sender")

    def ring(self) -> None:
        """There is something in the queue."""
        self._thread.start()
        self._bell.ring()

    def close(self) -> None:
        """Ends the thread, and waits for it. The line must have been closed, because the thread may wait for that."""
        self._closed = True
        self._bell.ring()
        if threading.current_thread() is not self._thread:  # the garbage collector may run this there
            self._thread.join()

    def _loop(self) -> None:
        while not self._closed:
            line = self._line()
            if line is None:
                break
            line.drain()
            del line
            self._bell.wait(threading.TIMEOUT_MAX)
