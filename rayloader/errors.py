"""What rayloader itself raises. Errors of the user's own code arrive as torch's loader raises them instead."""

from __future__ import annotations


class RayloaderError(RuntimeError):
    """Base of the errors of the machinery; a RuntimeError, as torch's loader raises."""


class WorkerDiedError(RayloaderError):
    """A worker's process ended while it had work; the text begins as torch's does.

    Args:
        message: what happened.
        worker_id: whose process it was, 0 to num_workers - 1.
    """

    def __init__(self, message: str, worker_id: int) -> None:
        super().__init__(message)
        self.worker_id = worker_id

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[str, int]]:
        return type(self), (str(self), self.worker_id)


class BatchTimeoutError(RayloaderError):
    """No batch arrived within the loader's `timeout` seconds; the text begins as torch's does."""


class WorkerStartError(RayloaderError):
    """A worker's actor could not be started in time: the cluster has no room for it."""


class RaySessionError(RayloaderError):
    """The Ray session that an iterator's workers live in has ended, or cannot be used."""


class ReplayError(RayloaderError):
    """A worker cannot be brought to where it was: its dataset gives something else than before, or hides its state."""


class StateError(RayloaderError):
    """A state does not fit the loader that it is loaded into, or the loader cannot tell its state."""


class SkipLimitError(RayloaderError):
    """More samples raised than `max_skipped` allows to skip."""


class ReplicaError(RayloaderError):
    """A worker can't have the dataset: a file that it refers to is missing on a node, or memory can't be reached."""


class ReplicaMemoryError(ReplicaError):
    """There is not memory enough for one copy of the dataset on a node."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, on Python 3.10 too (there nobody prints it, but `__notes__` holds it)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__dict__.setdefault("__notes__", []).append(note)
