"""The thread that prepares batches before the user asks for them: copies or pins them.

Promise: owns one thread, `rayloader-ahead`, from `start` on. It ends when `close` is called, or with an error, which
`check` raises.
An exception that a signal handler raises in the user's thread, at any line, leaves nothing locked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rayloader.bell import TICK_S, Bell, DaemonThread

# How many bytes of batches are copied, or received, ahead of the user, beyond the first one.
COPIED_AHEAD_BYTES = 64 << 20


class AheadThread:
    """Does the given work in a thread of its own.

    Args:
        work: does one thing, or waits for it; returns False if there is nothing to do before the next ring.
        device_index: accelerator whose context the thread uses, None without one.
    """

    def __init__(self, work: Callable[[], bool], device_index: int | None) -> None:
        self._work = work
        self._device_index = device_index
        self._bell = Bell()  # there may be something to do
        self._done = Bell()  # something was done, or the thread has ended
        self._closed = False
        self._error: BaseException | None = None  # what ended the thread
        self._thread = DaemonThread(self._loop, "rayloader-ahead")

    def start(self) -> None:
        """Starts the thread, if it has not been started; see `DaemonThread`."""
        self._thread.start()

    def ring(self) -> None:
        """Tells the thread that there may be something to do."""
        self._bell.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something was done; returns whether it was."""
        return self._done.wait(timeout)

    def check(self) -> None:
        """Raises the error that has ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread, and waits for it."""
        self._closed = True
        self._bell.ring()
        self._done.ring()
        if wait and threading.current_thread() is not self._thread:  # the garbage collector may run this there
            self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(1)  # for this thread only: a copy into pinned memory must not take every core
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        while not self._closed:
            try:
                if self._work():
                    self._done.ring()
                else:
                    self._bell.wait(TICK_S)
            except BaseException as error:  # any error: the user's thread raises it
                self._error = error
                self._done.ring()
                break
