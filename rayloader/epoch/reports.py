"""What the engine says of tasks, workers and memory: in errors, in notes to the user's exceptions, and in the log.

Promise: texts only; nothing here changes anything but which warnings were given.
"""

from __future__ import annotations

import logging
import reprlib
from typing import Any

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
    return "" if _stands_for_nothing(indices) else shortened.repr(indices)


def _stands_for_nothing(indices: Any) -> bool:
    """Whether these are the placeholders that torch draws for iterable datasets."""
    return indices is None or (isinstance(indices, list) and all(index is None for index in indices))


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
    """Of a traceback, the error at its end."""
    return cause.rstrip().splitlines()[-1] if "Traceback" in cause else cause


_warned_of_bytes = False  # all loaders warn once


def has_warned_of_bytes() -> bool:
    """Whether `warn_of_bytes` was called."""
    return _warned_of_bytes


def warn_of_bytes(kept: int, ready: int, under_way: int, limit: int, *, automatic: bool) -> None:
    """Tells that batches take more memory than was agreed.

    Args:
        kept: bytes of batches that the program keeps.
        ready: bytes of batches that were not taken.
        under_way: bytes of what the workers are building or will.
        limit: the loader's prefetch_bytes.
        automatic: whether the depth is, and the workers are given less because of this.
    """
    global _warned_of_bytes
    _warned_of_bytes = True
    logger.warning(
        "rayloader: the program keeps %d MB of batches, %d MB are ready, and about %d MB are under way, where "
        "prefetch_bytes is %d MB. %s",
        *(kept >> 20, ready >> 20, under_way >> 20, limit >> 20),
        "Meanwhile the workers are given no more to do than torch's would be. Drop batches once they are used, or "
        "raise prefetch_bytes"
        if automatic
        else "The workers are given as many batches to build as prefetch_factor says, or torch's would be. Drop "
        "batches once they are used, lower prefetch_factor, or raise prefetch_bytes",
    )
