"""Pins delivered batches in a background thread, in delivery order.

Promise: owns one thread, `rayloader-pin`, which ends when its source does or when `close` is called; holds at most
one pinned batch beyond the one in work. An error of the source, or of pinning, reaches the user in its turn.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

# How long a blocked `put` may stay unaware of `close`, in seconds; it costs one wake-up each.
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
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._error: BaseException | None = None  # what ended the thread, once the user has seen it
        self._thread = threading.Thread(target=self._loop, name="rayloader-pin", daemon=True)
        self._thread.start()

    def get(self, timeout: float) -> T | None:
        """The next item; None when there is none within `timeout` seconds. Raises what ended the thread, each time."""
        if self._error is None:
            try:
                item, self._error = self._queue.get(timeout=timeout)
            except queue.Empty:
                return None
        if self._error is not None:
            raise self._error
        return item

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread and waits for it (it looks at least every TICK_S, given that `produce` does)."""
        self._closed.set()
        if wait and threading.current_thread() is not self._thread:  # a collector may run us in there
            self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(1)  # of this thread: the copy into pinned memory must not take every core
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        error: BaseException | None = None
        while not self._closed.is_set() and error is None:
            item: T | None = None
            try:
                item = self._produce()
            except BaseException as caught:  # whatever it is, the user's thread is where it is raised
                error = caught
            if item is None and error is None:
                return
            self._put((item, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(entry, timeout=TICK_S)
            except queue.Full:
                continue
