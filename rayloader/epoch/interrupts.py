"""What an exception that a signal handler raises in the user's thread can tear, and how that shows.

NOTE [interrupts]
In the main thread a signal handler, for instance that of Ctrl-C, may raise at almost any line. Six rules keep `next()`
correct. They bind this folder, and code that `next()` calls in the user's thread.
1. A batch remains the next one until `EpochIterator.__next__` notes, in its very last step, that the user has it
   (`Position.handed`). CPython runs handlers when a call returns, when a function is entered and in loops, and between
   that note and the user there is none of these. Everything before may be repeated, or is marked as done.
2. Changes of what the engine owns are marked before and after (`change`). If a foreign exception interrupts one, the
   epoch is `broken`: `next()` says so, and the next `iter()` starts with fresh workers. The position is right
   nevertheless, because it counts only batches that were handed over.
3. Locks that the user's thread takes are implemented in C, and waits are one call of `select.poll`.
4. No generator is left before its end, by `any` or `next` for instance: an exception that a handler raises while Python
   closes it is printed and dropped. That is why lists are used where generators would do.
5. An exception from opening a batch is attributed to the data only if opening it again raises as well. In `__del__`
   Python prints and drops a handler's exception, as it does everywhere.
6. An `Exception` raised while the sampler draws counts as the sampler's, because a handler's cannot be told from it. It
   takes the place of a batch, as with torch's loader, which is why handlers should raise a `BaseException`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from rayloader.errors import RayloaderError
from rayloader.workers.channel import ActorLost

_Method = TypeVar("_Method", bound=Callable[..., Any])


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
                ours = isinstance(error, (RayloaderError, ActorLost))
                if ours or threading.current_thread() is not threading.main_thread():
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
