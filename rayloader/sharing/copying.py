"""What is done for a consumer's large batches before its user asks for them: fetched to this node, and copied.

Promise: an object of Ray's is fetched as soon as the reply that names it is there. `rayloader-ahead` copies the first
in any case, and those behind it as long as all copies are within COPIED_AHEAD_BYTES. The copies are the user's to write
to, and lie in memory that is used again (transport/recycled.py). Only memory is copied here: the batch is put together
in the user's thread, as a loader's is (driver/preparing.py). Errors of Ray's are left to the user's thread, which asks
for the same object.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from rayloader.ahead import COPIED_AHEAD_BYTES, AheadThread
from rayloader.bell import TICK_S
from rayloader.transport.lanes import Wire, owned
from rayloader.transport.recycled import Recycled


class Copying:
    """Of one epoch of a consumer, whose batches are numbered. The thread starts with the first, and ends with `close`.

    Args:
        fetch: `Link.fetch` of the consumer's link.
        check_session: likewise.
    """

    def __init__(self, fetch: Callable[[Any, Callable[[Any], None]], None], check_session: Callable[[], None]) -> None:
        self._fetch = fetch
        self._check_session = check_session
        self._pid = os.getpid()
        self._fetched: dict[int, Wire] = {}  # read-only yet
        self._copied: dict[int, Wire] = {}
        self._first = 0  # number of the first batch that the user has not taken
        self._closed = False
        self._copies = Recycled()
        self._thread = AheadThread(self._work, None)
        _live.add(self)

    def expect(self, number: int, call: Any) -> None:
        """A batch was asked for by this call, which need not be answered."""
        self._fetch(call, functools.partial(self._came, number))

    def copied(self, number: int, wire: Wire) -> Wire:
        """The copy of a batch that is on this node, once it is made; may be asked for again.

        It is the batch itself where `close` was called meanwhile: whoever opens it copies it then.
        """
        self._first = number  # again, after an interrupt
        self._thread.start()
        while (copied := self._copied.get(number)) is None:
            self._check_session()
            if self._closed:
                return wire
            self._thread.check()
            self._came(number, wire)
            self._thread.wait(TICK_S)
        return copied

    def taken(self, first: int) -> None:
        """The user has all batches before this one."""
        self._first = first
        for batches in (self._fetched, self._copied):
            for number in [number for number in list(batches) if number < first]:
                batches.pop(number, None)
        self._thread.ring()

    def close(self, *, wait: bool) -> None:
        """Ends the thread, and waits for it if so asked; callable more than once."""
        if os.getpid() != self._pid:  # a forked child has neither the lock in order nor the thread
            return
        self._closed = True
        self._thread.close(wait=wait)
        self._fetched.clear()
        self._copied.clear()
        self._copies.close()

    def _came(self, number: int, wire: Any) -> None:
        """The object is here, or an error of Ray's in its place; in any thread."""
        wanted = number >= self._first and number not in self._copied and not self._closed
        if wanted and not isinstance(wire, Exception):
            self._fetched[number] = wire
            self._thread.ring()

    # ---- in the thread

    def _work(self) -> bool:
        """Copies a batch; False if none is here that may be copied."""
        number = min(list(self._fetched), default=None)
        if number is None or (wire := self._fetched.get(number)) is None:
            return False
        ahead = sum(_nbytes(copied) for copied in list(self._copied.values()))
        if number > self._first and ahead + _nbytes(wire) > COPIED_AHEAD_BYTES:
            return False
        self._copied[number] = owned(wire, self._copies.copy)
        self._fetched.pop(number, None)
        if number < self._first:  # taken meanwhile
            self._copied.pop(number, None)
        return True


def _nbytes(wire: Wire) -> int:
    return sum(memoryview(buffer).nbytes for buffer in wire[1])


def close_all() -> None:
    """Ends all threads: what they copy from goes with Ray's session."""
    for copying in list(_live):
        copying.close(wait=True)


_live: weakref.WeakSet[Copying] = weakref.WeakSet()
# Runs before Ray's own handler, which was registered before it.
atexit.register(close_all)
