"""The errors that rayloader itself raises.

Errors in the user's own code arrive as torch's loader raises them.

::

    RuntimeError
    └── RayloaderError
        ├── WorkerDiedError
        ├── BatchTimeoutError
        ├── WorkerStartError
        ├── RaySessionError
        ├── ReplayError
        ├── StateError
        ├── SkipLimitError
        ├── CacheError
        ├── ShareError
        └── ReplicaError
            └── ReplicaMemoryError
"""

# Also here: what tracebacks and warnings show of rayloader, and the one error where a version of another package lacks
# a private name that rayloader needs; see `_compat*.py`.

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import platform
import signal
import warnings
from collections.abc import Iterator
from types import TracebackType

__all__ = [
    "BatchTimeoutError",
    "CacheError",
    "RaySessionError",
    "RayloaderError",
    "ReplayError",
    "ReplicaError",
    "ReplicaMemoryError",
    "ShareError",
    "SkipLimitError",
    "StateError",
    "WorkerDiedError",
    "WorkerStartError",
]

# Their lines tell the user nothing: this package, and torch's loader.
_OURS = ("rayloader.", "torch.utils.data.")


class RayloaderError(RuntimeError):
    """Base class of the loader's own errors; a RuntimeError, which is what torch's loader raises."""


class WorkerDiedError(RayloaderError):
    """A worker's process ended while it had work to do. The text begins with torch's.

    Args:
        message: what happened.
        worker_id: the worker whose process ended, 0 to num_workers - 1; None if the error was made from its text alone,
            as torch's `ExceptionWrapper` makes an error again.
    """

    def __init__(self, message: str = "", worker_id: int | None = None) -> None:
        super().__init__(message)
        self.worker_id = worker_id


class BatchTimeoutError(RayloaderError):
    """No batch arrived within the loader's `timeout` seconds. The text begins with torch's."""


class WorkerStartError(RayloaderError):
    """No worker could start: the cluster had no room within the time allowed, or no process could be forked."""


class RaySessionError(RayloaderError):
    """The Ray session in which an iterator's workers live has ended, or cannot be used."""


class ReplayError(RayloaderError):
    """A worker's position cannot be restored: its dataset gives other batches than before, or hides its state."""


class StateError(RayloaderError):
    """A state does not fit the loader that it is loaded into, or the loader's state cannot be determined."""


class SkipLimitError(RayloaderError):
    """More samples raised than `max_skipped` allows the loader to skip."""


class CacheError(RayloaderError):
    """A cache can't be used: its samples differ each time, it has no room or place, or others may have written it."""


class ShareError(RayloaderError):
    """A shared loader has ended, cannot be found, or has another reader with the same name or rank."""


class ReplicaError(RayloaderError):
    """A worker cannot open the dataset: a file is missing on its node, or shared memory is out of reach."""


class ReplicaMemoryError(ReplicaError):
    """A node has too little memory for one copy of the dataset."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception.

    It comes before those of `pickle`, which on Python 3.14 name the way to what can't be pickled, a line for each step.
    """
    with contextlib.suppress(Exception):  # the user's class may not allow attributes: its error matters more
        notes = error.__dict__.setdefault("__notes__", [])
        notes.insert(len(own_notes(error)), note)


def own_notes(error: BaseException) -> list[str]:
    """The notes of an exception, without those of `pickle`."""
    return [note for note in getattr(error, "__notes__", ()) if not str(note).startswith("when serializing ")]


def shorten(error: BaseException, says_all: bool) -> None:
    """Shortens the traceback of an error that passes through this package; it then holds none of our objects.

    Args:
        error: the one that is being raised; the function that calls this stays in its traceback.
        says_all: it does not need the line where it was raised. Otherwise only the lines between the user's are
            removed: an error that was raised in this package is a fault of it, and keeps all lines.
    """
    first = error.__traceback__
    if first is None or (lines := first.tb_next) is None:
        return
    theirs: TracebackType | None = lines
    while theirs is not None and theirs.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        theirs = theirs.tb_next
    if theirs is not None or says_all:
        first.tb_next = theirs


def level_outside(*packages: str) -> int:
    """The `stacklevel` for `warnings.warn` at which the caller's warning names the first line outside of packages."""
    level, frame = 0, inspect.currentframe()  # this function's, in this package
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        level, frame = level + 1, frame.f_back
    return level


@contextlib.contextmanager
def warning_at_the_users_line() -> Iterator[None]:
    """Lets the warnings of other packages in this block name the line of the user's that calls us; not in a fork."""
    process = os.getpid()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught if os.getpid() == process else ():
        warnings.warn(warning.message, stacklevel=level_outside("rayloader", "torch", "contextlib"))


def exit_in_words(code: int | None) -> str:
    """How a process has ended, in torch's words, by its exit code: minus a signal's number if that has killed it."""
    if code is None:
        return "its process has ended; neither a signal nor an exit code is known"
    return f"killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


# The oldest and the newest versions that were tested.
TESTED = {
    "Python": "3.11 to 3.14",
    "torch": "2.6 to 2.13",
    "ray": "2.52 to 2.60",
    "cloudpickle": "3.0 to 3.1",
    "datasets": "5.2",
}


@contextlib.contextmanager
def private_names_of(package: str) -> Iterator[None]:
    """For looking them up.

    Raises:
        ImportError: the installed version lacks one.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        installed = platform.python_version() if package == "Python" else importlib.metadata.version(package)
        raise ImportError(
            f"rayloader does not work with {package} {installed}, which lacks a private name that it uses ({error}); "
            f"install a version that it was tested with, {TESTED[package]}, or a newer rayloader"
        ) from error


class OfOneProcess:
    """An iterator that cannot be sent to another process; raises torch's error, with a text that helps."""

    def __getstate__(self) -> object:
        raise NotImplementedError(
            f"{type(self).__name__} cannot be pickled: an iterator of a DataLoader belongs to one process; pass on the "
            "loader in its place and call iter() there, or drop it in __getstate__ of the object that holds it"
        )


# Levels of a state as packed; each takes several nested calls, and Python allows 1,000 by default.
NESTING = 100


def too_deep() -> StateError:
    """The error for a state that is nested too deep."""
    return StateError(
        f"what state_dict() gives must not hold itself, nor be nested more than {NESTING} levels deep; give its parts "
        "in one list, with their places in it instead of the parts themselves"
    )
