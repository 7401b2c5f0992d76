"""Turns a result into what the user gets: the batch, or the exception that came in its place."""

from __future__ import annotations

import reprlib
import threading
from dataclasses import dataclass
from typing import Any

from rayloader import skipping
from rayloader._compat import ExceptionWrapper
from rayloader.epoch.messages import Task
from rayloader.protocol import Result, ResultKind, WorkerAddress
from rayloader.transport.lanes import Wire, from_wire


@dataclass(eq=False, slots=True)
class Delivery:
    """A task and its batch, or the user's exception in its place; `skipping.NOTHING` if all samples were skipped."""

    task: Task
    data: Any
    skipped: tuple[tuple[str, str], ...] = ()
    taken: bool = False  # the schedule knows
    counted: bool = False  # the position knows: the user has it
    recorded: bool = False  # the epoch's tally knows
    samples: int = 0
    nbytes: int = 0


def opened(task: Task, result: Result) -> Delivery:
    """Opens a task's result."""
    data = skipping.NOTHING if result.kind == ResultKind.EMPTY else _open(task, result)
    return Delivery(task, data, result.skipped, samples=result.samples, nbytes=result.nbytes)


def _open(task: Task, result: Result) -> Any:
    """The batch, or the ExceptionWrapper, in a result; an ExceptionWrapper too if it cannot be unpickled."""
    if result.wire is None:
        return _RemoteError(result.text)
    try:
        return from_wire(result.wire)
    except Exception:  # the user's own unpickling may raise anything, and so may a signal handler here
        if threading.current_thread() is threading.main_thread() and _opens(result.wire):
            raise  # from a signal handler: the batch is still the next one, see NOTE [interrupts] in tables.py
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


def describe(task: Task, address: WorkerAddress | None) -> str:
    """Names batch, worker and indices; `address` is the worker's, if known."""
    where = f" (pid {address.pid} on {address.hostname}, node {address.node_id})" if address is not None else ""
    of_what = f", indices {shown}" if (shown := indices_of(task)) else ""
    worker = "any worker" if task.is_anybodys else f"worker {task.worker_id}"
    return f"batch {task.task_id} from {worker}{where}{of_what}"


def indices_of(task: Task, *, at_most: int = 6) -> str:
    """At most so many of a task's indices, as text; "" for an iterable dataset."""
    shortened = reprlib.Repr()
    shortened.maxlist = shortened.maxtuple = at_most
    indices = task.indices.indices
    return "" if _stands_for_nothing(indices) else shortened.repr(indices)


def _stands_for_nothing(indices: Any) -> bool:
    """Whether these are the placeholders that torch draws for iterable datasets."""
    return indices is None or (isinstance(indices, list) and all(index is None for index in indices))
