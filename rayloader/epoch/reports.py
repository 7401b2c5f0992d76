"""What the engine says of tasks, workers and memory: in errors, in notes to the user's exceptions, and in the log.

Promise: texts only; nothing here changes anything but which warnings were given.
"""

from __future__ import annotations

import logging
import re
import reprlib

from rayloader.epoch.messages import Fail
from rayloader.errors import BatchTimeoutError, WorkerDiedError, add_note
from rayloader.protocol import WorkerAddress
from rayloader.task import Task

logger = logging.getLogger("rayloader")


def describe(task: Task, address: WorkerAddress | None, sample: str = "") -> str:
    """Names the sample that raised, if known, batch, worker and indices; `address` is the worker's, if known."""
    where = ""
    if address is not None:
        node = f", node {address.node_id}" if address.node_id else ""  # a fork has none
        where = f" (pid {address.pid} on {address.hostname}{node})"
    worker = f"worker {task.worker_id}" if task.is_assigned else "any worker"
    return describe_here(task, sample, f", {worker}{where}")


def describe_here(task: Task, sample: str, worker: str = "") -> str:
    """The same without workers."""
    of_what = f", indices {shown}" if (shown := indices_of(task)) else ""
    return f"{sample}{', ' if sample else ''}batch {task.task_id}{worker}{of_what}"


def indices_of(task: Task, *, at_most: int = 6) -> str:
    """At most so many of a task's indices, as text; "" for an iterable dataset."""
    shortened = reprlib.Repr()
    shortened.maxlist = shortened.maxtuple = at_most
    indices = getattr(task.indices, "indices", None)  # without workers a stream's task has none
    # Nothing but None: the placeholders that torch draws for iterable datasets.
    none = indices is None or (isinstance(indices, list) and all(index is None for index in indices))
    return "" if none else shortened.repr(indices)


def worker_died(fail: Fail, address: WorkerAddress | None, task: str | None) -> WorkerDiedError:
    """The error of an epoch that has lost a worker for good; `task`: the description of the one at fault."""
    process, node = (f"(pid(s) {address.pid})", f" on {address.hostname}") if address else ("(not started)", "")
    error = WorkerDiedError(
        f"DataLoader worker {process} exited unexpectedly: worker {fail.worker_id}{node}. Cause: {fail.cause}",
        fail.worker_id,
    )
    if task is not None:
        add_note(error, task)
    return error


def timed_out(timeout: float, task: str | None) -> BatchTimeoutError:
    """The error of a batch that is overdue; `task`: its description."""
    what = f" waiting for {task}" if task is not None else " waiting for pinned memory"
    return BatchTimeoutError(
        f"DataLoader timed out after {timeout} seconds{what}. Raise timeout if batches may take so "
        'long; on_timeout="restart" replaces a worker that hangs'
    )


def briefly(cause: str) -> str:
    """Of a traceback, the error at its end; of a group's, the group without its parts."""
    # Frames and parts are indented further.
    return re.findall(r"^(?:  \| )?(\S.*)", cause, re.MULTILINE)[-1] if "Traceback" in cause else cause
