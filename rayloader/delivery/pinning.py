"""Pins delivered batches in a background thread, in delivery order.

Promise: owns one thread, `rayloader-pin`, which ends when its source does or when `close` is called; holds at most
one pinned batch beyond the one in work. An error of the source, or of pinning, reaches the user in its turn. What a
signal handler raises in the user's thread, at any line, loses no item and leaves nothing locked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from rayloader.bell import Bell

T = TypeVar("T")

# How long a wait may stay unaware of `close`, or of a ring that an interrupt has swallowed, in seconds; it costs one
# wake-up each.
TICK_S = 0.1


class PinThread(Generic[T]):
    """Runs `produce` again and again in a thread of its own and queues what it gives.

    Args:
        produce: blocks until the next item; None ends the thread. What it raises ends it too and is raised by `get`.
        device_index: accelerator whose context the thread uses, None without one.
    """

    def __init__(self, produce: Callable[[], T | None], device_index: int | None) -> None:
        self._produce = produce
        self._device_index = device_index
        self._items: deque[T] = deque()  # one at most
        self._came = Bell()  # an item, or the end
        self._room = Bell()
        self._closed = False
        self._error: BaseException | None = None  # what ended the thread
        self._thread = threading.Thread(target=self._loop, name="rayloader-pin", daemon=True)
        self._thread.start()

    def get(self, timeout: float) -> T | None:
        """The next item, which stays the next until `taken`; None when there is none within `timeout` seconds.

        Raises:
            BaseException: what ended the thread, each time.
        """
        give_up = time.monotonic() + timeout
        while not self._items and self._error is None and self._came.wait(give_up - time.monotonic()):
            pass  # it may have rung for an item that was there without a wait
        error = self._error  # looked at first: the items before it come first
        if self._items:
            return self._items[0]
        if error is not None:
            raise error
        return None

    def taken(self, item: T) -> None:
        """Makes room for the next; telling it twice does no harm."""
        if self._items and self._items[0] is item:
            self._items.popleft()
        self._room.ring()

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread and waits for it (it looks at least every TICK_S, given that `produce` does)."""
        self._closed = True
        self._room.ring()
        if wait and threading.current_thread() is not self._thread:  # a collector may run us in there
            self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(1)  # of this thread: the copy into pinned memory must not take every core
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        while not self._closed:
            try:
                item = self._produce()
            except BaseException as error:  # whatever it is, the user's thread is where it is raised
                self._error = error
                item = None
            if item is None:
                break
            while self._items and not self._closed:
                self._room.wait(TICK_S)
            self._items.append(item)
            self._came.ring()
        self._came.ring()
