"""Raises KeyboardInterrupt at the n-th point at which Python may run a signal handler in rayloader's own code."""

import contextlib
import signal
import sys
from pathlib import Path

import rayloader

PACKAGE = str(Path(rayloader.__file__).parent)
HANG_LIMIT = 500  # seconds for one step; on expiry the test fails
POINTS = 2000  # more than any operation has


class Interrupt:
    """Fires once: at the `number`-th entry of one of our functions or return of a C function called by one.

    These are the points at which CPython looks for signals, besides the loops, which call functions. A finalizer is
    spared, and so is what a weak reference calls: Python only prints what is raised there.
    """

    def __init__(self, number):
        self.number, self.count, self.where = number, 0, None

    def __call__(self, frame, event, argument):
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if argument is sys.setprofile or in_finalizer(frame):
            return
        self.count += 1
        if self.count == self.number:
            self.where = f"{frame.f_code.co_name}:{frame.f_lineno} ({event} {argument})"
            sys.setprofile(None)
            raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    @property
    def fired(self):
        return self.where is not None


def in_finalizer(frame):
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_tidy_later"):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def no_hang(what):
    """Raises AssertionError in the main thread when the block takes too long."""

    def expired(*_):
        raise AssertionError(f"hangs after an interrupt at {what()}")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(HANG_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def each_point(stride=1):
    """An `Interrupt` at one point after the other, up to the last of the operations that it is laid around."""
    for number in range(1, POINTS, stride):
        interrupt = Interrupt(number)
        with no_hang(lambda: (interrupt.number, interrupt.where)):  # noqa: B023
            yield interrupt
        if not interrupt.fired:
            return
    raise AssertionError("POINTS is too small")
