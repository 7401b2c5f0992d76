"""Turns a result into what the user gets: the batch, or the exception that came in its place."""

from __future__ import annotations

import threading
from typing import Any

from rayloader import skipping
from rayloader._compat import ExceptionWrapper
from rayloader.protocol import Result, ResultKind
from rayloader.task import Task
from rayloader.transport.lanes import Wire, from_wire


def opened(task: Task, result: Result) -> Any:
    """The batch, or an ExceptionWrapper, also if it can't be unpickled; `skipping.NOTHING` if all was skipped."""
    if result.kind == ResultKind.EMPTY:
        return skipping.NOTHING
    if result.wire is None:
        return _RemoteError(result.text)
    try:
        return from_wire(result.wire)
    except Exception:  # the user's own unpickling may raise anything, and so may a signal handler here
        if threading.current_thread() is threading.main_thread() and _opens(result.wire):
            raise  # from a signal handler: the batch is still the next one, see NOTE [interrupts] in interrupts.py
        if result.kind == ResultKind.ERROR:
            return _RemoteError(result.text)
        return ExceptionWrapper(where=f"unpickling a batch of DataLoader worker process {task.worker_id}")


def _opens(wire: Wire) -> bool:
    try:
        from_wire(wire)
    except Exception:  # the user's own unpickling, again
        return False
    return True


class _RemoteError(ExceptionWrapper):
    """A user's exception whose type cannot come here: raised as torch raises one that it cannot construct."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reraise(self) -> None:
        raise RuntimeError(self._text)
