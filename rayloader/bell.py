"""How one thread wakes another, or waits for its end, also where a signal handler may raise.

Promise: `Bell.wait` is one call of a lock that CPython implements in C. A handler that raises in the main thread breaks
it off and leaves nothing locked. `threading.Condition`, and with it `Event` and `queue.Queue`, take their lock in
Python code, where an exception may come right after: then it is held for ever. And an exception within `is_alive` or
`join` of a `threading.Thread` can mark a thread that runs as ended: a `DaemonThread` says itself when it ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

# How long a wait may stay unaware of a ring that an interrupt has swallowed, in seconds; it costs one wake-up each.
TICK_S = 0.1


class Bell:
    """Rung by any thread, heard by one: a ring that nobody waited for ends the next wait at once.

    An interrupt may swallow a ring, so whoever waits looks first whether there is still something to wait for.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held until it rings
        self._silent.acquire()

    def ring(self) -> None:
        """Ends a wait, this one's or the next."""
        with contextlib.suppress(RuntimeError):  # it has rung, and nobody has heard it yet
            self._silent.release()

    def wait(self, timeout: float) -> bool:
        """Waits for a ring, for `timeout` seconds at most; whether there was one."""
        return self._silent.acquire(timeout=max(0.0, timeout))


class DaemonThread(threading.Thread):
    """A thread whose end may be waited for by threads that a signal handler interrupts.

    Args:
        work: what it does.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._pid = os.getpid()
        self._over = False
        self._end = Bell()

    def run(self) -> None:
        """Does the work."""
        try:
            super().run()
        finally:
            self._over = True
            self._end.ring()

    def is_alive(self) -> bool:
        """Whether it was started and its work goes on; False in a forked child."""
        return self.ident is not None and not self._over and os.getpid() == self._pid

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended; `timeout`: in seconds, from the end of its work on."""
        while self.is_alive():
            self._end.wait(TICK_S)
        self._end.ring()  # for others that wait
        super().join(timeout)
