"""How one thread starts another, wakes it, or waits for its end, and marks changes, even if a signal handler may raise.

Promise: `Bell.wait` is one call of a lock that CPython implements in C. A handler that raises in the main thread
interrupts it and leaves nothing locked. `threading.Condition`, and with it `Event` and `queue.Queue`, take their lock
in Python code, where an exception may come right after: then it is held for ever. And an exception within `start` of a
`threading.Thread` may leave a thread that nothing refers to, or end it at once; one within `is_alive` or `join` can
mark a running thread as ended. A `DaemonThread` is started once, in a place where no handler runs, and reports its own
end.

NOTE [interrupts]
In the main thread a signal handler, for instance that of Ctrl-C, may raise at almost any line. Six rules keep `next()`
correct. They bind `epoch/`, and code that `next()` calls in the user's thread.
1. A batch remains the next one until `EpochIterator.__next__` notes, in its very last step, that the user has it
   (`Position.handed`). CPython runs handlers when a call returns, when a function is entered and in loops, and between
   that note and the user there is none of these. Everything before may be repeated, or is marked as done.
2. Changes of what the engine owns are marked before and after (`change`). If a foreign exception interrupts one, the
   epoch is `broken`: `next()` says so, and the next `iter()` starts with fresh workers. The position is right
   nevertheless, because it counts only batches that were handed over.
3. Locks that the user's thread takes are of `new_lock`, and waits are one call of a lock or of `select.epoll`.
4. No generator is left before its end, by `any` or `next` for instance: an exception that a handler raises while Python
   closes it is printed and dropped. That is why lists are used where generators would do.
5. An exception from opening a batch is attributed to the data only if opening it again raises as well. In `__del__`
   Python prints and drops a handler's exception, as it does everywhere.
6. An `Exception` raised while the sampler draws counts as the sampler's, because a handler's cannot be told from it. It
   takes the place of a batch, as with torch's loader, which is why handlers should raise a `BaseException`.

NOTE [with]
`with lock:` enters and leaves a lock of CPython's in C. On Python 3.14 a handler may run when `__enter__` has returned
and the block does not count as entered yet (CPython's issue 148874): the lock is then held for ever. No handler runs
there if `__enter__` is a function in Python. So `new_lock` gives a lock whose `__enter__` is one: it takes the lock and
notes that it has it in one call in C, and lets go of it if a handler raises after that call. Its `__exit__` remains the
one in C, as no handler must run before it.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, TypeVar, cast

from rayloader.errors import RayloaderError

_Method = TypeVar("_Method", bound=Callable[..., Any])

# How long a wait may miss a ring that an interrupt has swallowed, in seconds; each such period costs one wake-up.
TICK_S = 0.1
_WITH_IS_SAFE = sys.version_info[:2] != (3, 14)  # see NOTE [with]
_ONCE = [()]  # a call without arguments


def new_lock(*, reentrant: bool = True) -> threading.RLock:
    """A lock for `with` that a handler's exception leaves free, on each version of Python; see NOTE [with]."""
    lock = threading.RLock() if reentrant else threading.Lock()
    return cast(threading.RLock, lock if _WITH_IS_SAFE else GuardedLock(lock))


class GuardedLock:
    """A lock of CPython's, as `new_lock` gives it on Python 3.14."""

    __slots__ = ("__exit__", "acquire", "release")  # `with` finds the first in C, too

    def __init__(self, lock: Any) -> None:
        self.acquire, self.release, self.__exit__ = lock.acquire, lock.release, lock.__exit__

    def __enter__(self) -> None:
        held: list[bool] = []
        try:
            return held.extend(starmap(self.acquire, _ONCE))  # leaves no line between here and the block
        except BaseException:
            if held:
                self.release()
            raise


class Bell:
    """Rung by any thread, heard by one: a ring while no thread waits ends the next wait at once.

    An interrupt may swallow a ring, so a waiting thread first checks whether there is still something to wait for.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held until it rings
        self._silent.acquire()

    def ring(self) -> None:
        """Ends a wait: the current one or the next."""
        with contextlib.suppress(RuntimeError):  # it has rung, and no thread has heard it yet
            self._silent.release()

    def wait(self, timeout: float) -> bool:
        """Waits for a ring, for `timeout` seconds at most; returns whether there was one."""
        return self._silent.acquire(timeout=max(0.0, timeout))


class Waker:
    """A descriptor that any thread can make readable.

    It is closed with the last reference to it, or when the garbage collector finds it in a cycle. A finalizer in the
    same cycle may still use it afterwards: a ring after that does nothing.

    Args:
        later: does what is left to do at its end, in the thread that may still ring then; None: it is done at once.
    """

    _fds: Sequence[int] = ()  # also for `__del__`, if an interrupt came before the constructor's first line
    _later: Callable[[Callable[[], object]], object] | None = None

    def __init__(self, later: Callable[[Callable[[], object]], object] | None = None) -> None:
        self._later = later
        fds: list[int] = []
        self._fds = fds
        fds.extend(map(os.eventfd, [0], [os.EFD_CLOEXEC | os.EFD_NONBLOCK]))  # in one step, see `MemoryFile`

    @property
    def descriptor(self) -> int:
        """-1 after the end."""
        return self._fds[0] if self._fds else -1

    def ring(self) -> None:
        """Makes the descriptor readable."""
        if self._fds:  # otherwise nobody waits any more
            os.eventfd_write(self._fds[0], 1)

    def heard(self) -> None:
        """Makes it readable no more, until the next ring."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(
        self, close: Callable[[int], None] = os.close, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        fds, self._fds = self._fds, ()

        def end() -> None:
            for descriptor in fds:
                close(descriptor)

        if self._later is None or is_finalizing():  # by then no other thread runs
            end()
        else:
            self._later(end)


class DaemonThread(threading.Thread):
    """A thread that may be started, and waited for, by threads that a signal handler interrupts.

    Keep a reference to it before starting it: after an interrupt `start` is called again.

    Args:
        work: what it does.
        name: of the thread.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._work = work
        self._pid = os.getpid()
        self._unclaimed = threading.Lock()  # held from when it is being started, or given up
        self._begun = False
        self._over = False
        self._given_up = False
        self._error: BaseException | None = None  # why it could not be started
        self._changed = Bell()  # it has begun, or ended

    @property
    def spent(self) -> bool:
        """Whether the thread is finished: it ended, was abandoned, or belongs to the parent of this forked process."""
        return self._over or self._given_up or os.getpid() != self._pid

    def start(self) -> None:
        """Starts the thread if it has not started. Callable more than once.

        Raises:
            RuntimeError: no further thread can be started now.
        """
        while not self._begun and not self.spent:
            _thread.start_new_thread(self._start_here, ())  # one call in C: either the thread exists, or it does not
            self._changed.wait(TICK_S)
            if (error := self._error) is not None:
                self._error = None
                raise error

    def give_up(self) -> bool:
        """Prevents its start, unless it is being started; returns whether it has prevented it."""
        if not self._unclaimed.acquire(blocking=False):
            return False
        self._given_up = True
        return True

    def _start_here(self) -> None:
        """Runs in a thread that is not the main one."""
        if self._unclaimed.acquire(blocking=False):
            try:
                super().start()
            except BaseException as error:  # any error: it is raised where the thread is needed
                super().__init__(target=self._work, name=self.name, daemon=True)  # Python starts none twice
                self._error = error
                self._unclaimed.release()
                self._changed.ring()

    def run(self) -> None:
        """Does the work of the thread."""
        self._begun = True
        self._changed.ring()
        try:
            super().run()
        finally:
            self._over = True
            self._changed.ring()

    def is_alive(self) -> bool:
        """Whether it has begun and its work continues; False in a forked child."""
        return self._begun and not self.spent

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended, if it has begun; for `timeout` seconds at most."""
        until = threading.TIMEOUT_MAX if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left := until - time.monotonic()) > 0:
            self._changed.wait(min(TICK_S, left))
        if self._over:
            self._changed.ring()  # for other threads that wait
            super().join(None if timeout is None else max(0.0, until - time.monotonic()))


class Changes:
    """Counts the changes of one epoch, which happen under its lock.

    Args:
        lock: of the epoch.
    """

    __slots__ = ("begun", "ended", "lock")

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.begun = self.ended = 0

    @property
    def are_broken(self) -> bool:
        """Whether one was interrupted."""
        if self.ended == self.begun:  # in this order: a change that another thread ends meanwhile hides none
            return False
        with self.lock:
            return self.begun != self.ended


def change(method: _Method) -> _Method:
    """Marks a method that changes an object with `changes`; see NOTE [interrupts]."""

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **named: Any) -> Any:
        changes: Changes = self.changes
        with changes.lock:
            changes.begun += 1
            try:
                result = method(self, *args, **named)
            except BaseException as error:
                if isinstance(error, RayloaderError) or threading.current_thread() is not threading.main_thread():
                    changes.ended += 1  # no interrupt: no change was left half done
                raise
            changes.ended += 1
            return result

    return marked  # type: ignore[return-value]


def interrupted() -> RayloaderError:
    """The error of an epoch in which a change was interrupted."""
    return RayloaderError(
        "this iterator was interrupted (by Ctrl-C, or a signal handler that raised) and has lost its place; "
        "call iter() on the loader again. state_dict() still says which batches were taken"
    )
