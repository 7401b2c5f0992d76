"""The provenance log: what the user got in each step, in a file to which run after run appends.

Promise: the next run continues a file that a killed process has left. No row is lost or written twice, whatever
interrupts the program: see NOTE [one write]. A log that cannot be written any more, because a disk is full, ends, and
the training goes on; the next `iter()` goes on with the log.

NOTE [one write]. A message is written at the offset where the last complete one ends. That offset moves in the line
before the message is dropped from the queue: there is no call in between, and so no place for a signal handler. After
an interrupt the same message is written again at the same place. A finalizer may come in the middle of
a write of its own thread: it only adds to the queue, which that write goes on to empty.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import logging
import os
import re
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import torch

from rayloader.errors import RayloaderError
from rayloader.interrupts import new_lock
from rayloader.observe.recorder import Tally
from rayloader.replay.provenance import BEGIN, KEY, SCHEMA, Log, end_of, read
from rayloader.resume import checkpoint
from rayloader.resume.position import Position
from rayloader.resume.samplers import trains_in_a_group
from rayloader.resume.state import VERSIONS
from rayloader.task import Outcome

logger = logging.getLogger("rayloader")

ROWS = 1024  # are written together
SECONDS = 1.0  # after the last write, what is there is written with the next row
_MOST_COUNTED = 2**15 - 1  # by columns of 16 bits
_Indices = tuple[bytes | None, bytes | None]  # whole numbers; others, pickled
_NONE: _Indices = (None, None)  # there are none, or they cannot be pickled


class LogFile:
    """A file that this process appends to, for all of its loaders.

    Args:
        path: of the file, for messages.
        descriptor: of the file, locked.
        end: where its last complete message ends.
    """

    def __init__(self, path: Path, descriptor: int, end: int) -> None:
        self.path = path
        self.lock = new_lock()
        self.queue: list[Any] = []  # messages to be written, as Arrow's buffers, oldest first
        self._descriptor = descriptor
        self._end = end
        self._writes = False
        self._has_failed = False
        if not end:
            self.queue.append(pa.py_buffer(BEGIN))

    def write(self) -> None:
        """Writes what is in the queue; see NOTE [one write]."""
        with self.lock:
            if self._has_failed or self._descriptor < 0:  # the second: a forked child has the parent's log
                self.queue = []
            if self._writes:
                return
            self._writes = True
            try:
                while self.queue:
                    self._write_next()
            except OSError as error:
                self._fail(error)
            finally:
                self._writes = False

    def _write_next(self) -> None:
        message, written = self.queue[0], 0
        while written < (nbytes := len(message)):  # a disk that is nearly full takes a part
            written += os.pwrite(self._descriptor, message[written:], self._end + written)
        self._end += nbytes
        del self.queue[0]  # no interrupt comes in between

    def _fail(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # the file system may have become read-only
            os.ftruncate(self._descriptor, self._end)  # an incomplete message is none
        logger.warning(
            "rayloader: the provenance log %s cannot be written, and has nothing more of this epoch: %s",
            self.path,
            str(error),  # the error itself would keep this file with its traceback
        )
        self.queue, self._has_failed = [], True

    def begin(self) -> None:
        """An epoch begins: tries again, if the last one could not be written."""
        with self.lock:
            if self._has_failed:
                self.queue, self._has_failed = [] if self._end else [pa.py_buffer(BEGIN)], False

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Lets other processes write to it; also at the interpreter's end."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    def leave(self) -> None:
        """In a forked child: the file, its lock and what is not written yet are the parent's."""
        self.queue = []
        self.close()
        self.lock = new_lock()

    def __del__(self) -> None:
        self.close()


# By device and inode: two names of one file mean the same.
_files: weakref.WeakValueDictionary[tuple[int, int], LogFile] = weakref.WeakValueDictionary()


def _leave_after_fork() -> None:
    for file in list(_files.values()):
        file.leave()
    _files.clear()


os.register_at_fork(after_in_child=_leave_after_fork)


def opened(loader: Any) -> Rows:
    """The log of a new iterator of the loader; see `DataLoader._opened_log`."""
    path = _path_of(loader)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no folder {path.parent} for the provenance log; make it first") from None
    try:
        status = os.fstat(descriptor)
        if (file := _files.get((status.st_dev, status.st_ino))) is None:
            _lock(descriptor, path)
            if (end := end_of(path)) < status.st_size:
                os.ftruncate(descriptor, end)  # cuts an incomplete last message off
            _files[status.st_dev, status.st_ino] = file = LogFile(path, descriptor, end)
            descriptor = -1
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return Rows(file)


def log_of(loader: Any, path: str | os.PathLike[str] | None = None) -> Log:
    """The log of a loader, in its own file or in another, up to the last batch that was taken."""
    if path is not None:
        log = read(path)
        return log.of_loader(loader._label) if len(log.loaders) > 1 else log
    if loader._position is not None:
        loader._position.flush_log()
    return read(_path_of(loader)).of_loader(loader._label)


def _path_of(loader: Any) -> Path:
    given = os.fspath(loader.provenance)
    if not (given.endswith(os.sep) or os.path.isdir(given)):
        return Path(given)
    os.makedirs(given, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", loader._label)
    rank = checkpoint.rank_of(loader)
    if rank is None and trains_in_a_group():
        rank = torch.distributed.get_rank()
    return Path(given, f"{name}.arrows" if rank is None else f"{name}-rank{rank}.arrows")


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RayloaderError(
            f"another process writes to the provenance log {path}; give each process a file of its own. The ranks of "
            'one run get one each in a folder: provenance="folder/"'
        ) from None
    except OSError:  # this file system has no locks
        logger.info("rayloader: nothing keeps other processes from the provenance log %s: no file can be locked", path)


class Rows:
    """The rows of one iterator: a `StepLog`. Only numbers are kept, and no batch."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._iteration = ""
        self._tally: Any = Tally()
        self._written_at = 0.0
        self.forget()

    def forget(self) -> None:
        """Another epoch begins; what there was of the last one is written."""
        self._indices: dict[int, _Indices] = {}  # of steps that are drawn, and not in a row yet
        self._rows: dict[int, tuple[Any, ...]] = {}  # by step
        self._newest = -1  # the step that was added last

    def begin(self, loader: Any, position: Position, tally: Any) -> None:
        """Writes with what the epoch begins, or goes on."""
        state, error = None, ""
        try:
            state = checkpoint.make_state(loader, position, position.num_workers)
        except Exception as problem:  # a StateError, or what code of the user's raises
            error = f"{type(problem).__name__}: {problem}"
        self._iteration, self._epoch, self._tally = os.urandom(6).hex(), position.epoch_of_run, tally
        begin = {
            "iteration": self._iteration,
            "loader": loader._label,
            "epoch": self._epoch,
            "began": time.time(),
            "error": error,
            "versions": VERSIONS,
        }
        message = _message([], {**begin, **_as_json(state)})
        self._file.begin()
        with self._file.lock:
            self._file.queue = [*self._file.queue, message]
        self._file.write()

    def drawn(self, step: int, indices: Any, *, skipped: bool) -> None:
        """Keeps the indices of a step until its row; a step that is skipped has it at once."""
        packed = _packed(indices)
        if skipped:
            self._rows[step] = step, *packed, -1, 0, Outcome.SKIPPED, 0, self._tally.restarts
        elif packed is not _NONE:
            self._indices[step] = packed

    def add(self, step: int, worker_id: int, digest: int, outcome: int, skipped: int) -> None:
        """Adds a row; see `StepLog.add`."""
        if step == self._newest:
            return
        if len(self._rows) >= ROWS or time.monotonic() - self._written_at >= SECONDS:
            self.flush()
        row = step, *self._indices.get(step, _NONE), worker_id, digest, outcome, skipped, self._tally.restarts
        self._rows[step], self._newest = row, step  # no interrupt comes in between
        self._indices.pop(step, None)

    def flush(self) -> None:
        """Writes the rows."""
        self._written_at = time.monotonic()
        if not self._rows:
            self._file.write()  # what an interrupt may have left
            return
        message = _message(list(self._rows.values()), {"iteration": self._iteration}, self._epoch)
        none: dict[int, tuple[Any, ...]] = {}
        with self._file.lock:
            self._rows, self._file.queue = none, [*self._file.queue, message]  # no interrupt comes in between
        self._file.write()


def _packed(indices: Any) -> _Indices:
    """The indices of a step, in memory of their own."""
    if indices is None:
        return _NONE
    numbers = indices if type(indices) is list else [indices] if type(indices) is int else None
    if numbers is not None:
        try:
            return struct.pack(f"={len(numbers)}q", *numbers), None
        except Exception:  # they may be of any type
            if not any(number is not None for number in numbers):  # a stream's
                return _NONE
    try:
        return None, cloudpickle.dumps(indices)
    except Exception:  # whatever an object's pickling raises; without workers nobody else pickles them
        return _NONE


def _message(rows: list[tuple[Any, ...]], told: dict[str, Any], epoch: int = 0) -> Any:
    """A message with these rows, as `Rows` keeps them, and with metadata."""
    steps, whole, others, workers, digests, outcomes, *counts = zip(*rows, strict=True) if rows else [()] * 8
    lists = pa.ListArray.from_arrays(
        np.cumsum([0, *(len(one or b"") // 8 for one in whole)], dtype=np.int32),
        np.frombuffer(b"".join([one or b"" for one in whole]), np.int64),
        mask=pa.array([one is None for one in whole], pa.bool_()),
    )
    skipped, restarts = (np.array(column, np.int64).clip(max=_MOST_COUNTED) for column in counts)
    columns = [steps, np.full(len(rows), epoch), lists, others, workers, digests, outcomes, skipped, restarts]
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, SCHEMA)
    batch = pa.record_batch(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA)
    writer.write_batch(batch, custom_metadata={KEY: json.dumps(told)})
    return sink.getvalue()[len(BEGIN) :]


def _as_json(state: dict[str, Any] | None) -> dict[str, Any]:
    """A loader's state in types of JSON; what only torch can save, because the dataset's own state has it, as text."""
    try:
        json.dumps(state)
        return {"state": state}
    except (TypeError, ValueError):
        saved = io.BytesIO()
    try:
        torch.save(state, saved)
    except Exception as problem:  # whatever an object's pickling raises
        return {"state": None, "error": f"its state cannot be saved: {type(problem).__name__}: {problem}"}
    return {"state": None, "saved": base64.b64encode(saved.getvalue()).decode("ascii")}
