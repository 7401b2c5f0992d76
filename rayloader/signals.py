"""Signal handlers belong to the program: those that Ray sets in their place are removed again.

Promise: `SignalHandlers().restore()` makes every signal do what it did when that object was created. Ray replaces the
handler of SIGTERM in Python, and those of SIGTERM and of the signals of a crash (`faulthandler`'s) below Python, in the
kernel's table; at its shutdown it removes its own and leaves none. So both tables are saved.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from typing import Any

# Larger than any system's `struct sigaction`, whose content does not matter here: it is restored unchanged.
_ACTION_BYTES = 512

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class SignalHandlers:
    """The current action of each signal of this process."""

    def __init__(self) -> None:
        numbers = signal.valid_signals()
        self._in_python: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._in_kernel = {number: _action(number) for number in numbers}

    def restore(self) -> None:
        """Restores them; Python lets only the main thread change its own handlers, so other threads leave these."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._in_python.items():
                if handler is not None and signal.getsignal(number) is not handler:  # None: not set by Python
                    signal.signal(number, handler)
        for number, action in self._in_kernel.items():
            if _action(number) != action:
                _libc.sigaction(number, self._wanted(number, action), None)

    def _wanted(self, number: int, action: bytes) -> bytes:
        """The action for the kernel: the saved one, unless the program has set another handler meanwhile."""
        handler = signal.getsignal(number)
        if handler is self._in_python[number]:
            return action
        if not callable(handler):
            return _action(number)
        interrupt = self._in_python[signal.SIGINT]  # CPython has one function for all handlers in Python
        return self._in_kernel[signal.SIGINT] if callable(interrupt) else _action(number)


def _action(number: int) -> bytes:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _libc.sigaction(number, None, action)
    return action.raw
