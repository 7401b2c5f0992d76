"""How one thread wakes another, also where a signal handler may raise.

Promise: `wait` is one call of a lock that CPython implements in C. A handler that raises in the main thread breaks it
off and leaves nothing locked. `threading.Condition`, and with it `Event` and `queue.Queue`, take their lock in Python
code, where an exception may come right after: then it is held for ever.
"""

from __future__ import annotations

import contextlib
import threading


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
