"""Signal handlers belong to the program: those that Ray sets in their place are removed again.

Promise: `SignalHandlers().restore()` makes every signal do what it did when that object was created, or what the
program has made it do since. Ray replaces the handler of SIGTERM in Python, and those of SIGTERM and of the signals of
a crash (`faulthandler`'s) below Python, in the kernel's table; at its shutdown it removes its own and leaves none. So
both tables are saved.
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
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p


class SignalHandlers:
    """The current action of each signal of this process."""

    def __init__(self) -> None:
        numbers = signal.valid_signals()
        self._in_python: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
        self._in_kernel: dict[int, bytes] = {number: _action(number) for number in numbers}

    def restore(self) -> None:
        """Restores them; Python lets only the main thread change its own handlers, so other threads leave these."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._in_python.items():
                if handler is not None and signal.getsignal(number) is not handler:  # None: not set by Python
                    signal.signal(number, handler)
        for number, action in self._in_kernel.items():
            if _action(number) == action:
                continue
            while True:  # the main thread may set another handler at any moment
                handler = signal.getsignal(number)
                self._restore_in_kernel(number, handler)
                if signal.getsignal(number) is handler:
                    break

    def _restore_in_kernel(self, number: int, handler: Any) -> None:
        """Makes the kernel do what Python's handler says: the program may have set another one than the saved one."""
        if handler is self._in_python[number]:
            _libc.sigaction(number, self._in_kernel[number], None)
        elif callable(handler):
            if _PYTHONS_ACTION is not None:
                _libc.sigaction(number, _PYTHONS_ACTION, None)
        elif handler is not None:  # None: not set by Python
            _libc.signal(number, int(handler))


def _action(number: int) -> bytes:
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _libc.sigaction(number, None, action)
    return action.raw


def _pythons_action() -> bytes | None:
    """The kernel's action for signals with a handler in Python, which is one for all of them; None if it is unknown."""
    if callable(signal.getsignal(signal.SIGINT)):  # usually, unless the program runs in the background
        return _action(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        return None
    free = max(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_DFL)
    before = _action(free)
    signal.signal(free, lambda *_: None)
    try:
        return _action(free)
    finally:
        signal.signal(free, signal.SIG_DFL)
        _libc.sigaction(free, before, None)  # a library may have set one that Python does not know of


_PYTHONS_ACTION = _pythons_action()  # on import, because only the main thread can find it out
