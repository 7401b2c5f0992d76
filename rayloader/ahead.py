"""The thread that prepares batches before the user asks for them: copies or pins them.

Promise: owns one thread, `rayloader-ahead`, from `start` on. It ends when `close` is called, or with an error, which
`check` raises.
What a signal handler raises in the user's thread, at any line, leaves nothing locked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rayloader.bell import TICK_S, Bell, DaemonThread

# How many bytes of batches are copied out of Ray's object store, beyond the first one.
COPIED_AHEAD_BYTES = 64 << 20


class AheadThread:
    """Does in a thread of its own what there is to do.

    Args:
        work: does one thing, or waits for it; returns False where there is nothing to do before the next ring.
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
        """Starts the thread, unless it has been; see `DaemonThread`."""
        self._thread.start()

    def ring(self) -> None:
        """There may be something to do."""
        self._bell.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something was done; whether it was."""
        return self._done.wait(timeout)

    def check(self) -> None:
        """Raises what has ended the thread, if something has."""
        if self._error is not None:
            raise self._error

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread, and waits for it."""
        self._closed = True
        self._bell.ring()
        self._done.ring()
        if wait and threading.current_thread() is not self._thread:  # a collector may run us in there
            self._thread.join()

    def _loop(self) -> None:
        torch.set_num_threads(1)  # of this thread: a copy into pinned memory must not take every core
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        while not self._closed:
            try:
                if self._work():
                    self._done.ring()
                else:
                    self._bell.wait(TICK_S)
            except BaseException as error:  # whatever it is, the user's thread is where it is raised
                self._error = error
                self._done.ring()
                break
