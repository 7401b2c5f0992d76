"""The provenance log: what the user got in each step, in a file to which run after run appends.

Promise: a process that is killed at any moment leaves a file that `read` reads up to its last complete message, and
that the next run continues. No row is lost or written twice, whatever interrupts the program: see NOTE [one write]. A
log that cannot be written any more, because a disk is full, does not stop the training.

The file is a stream of Arrow's IPC format without the mark of its end. Each iteration of a loader, which begins an
epoch or goes on with one, writes a message without rows, whose metadata under the key "rayloader" are a JSON object:
the number of the epoch, the loader's state before the iteration's first batch, versions, and the parts that batches
depend on. Its rows follow, in the order of delivery; those of loaders that share a file are in messages of their own.

NOTE [one write]. A message is written by one call, at the offset where the last complete one ends, and that offset
moves in the same line that drops the message from the queue: an assignment, between whose parts Python runs no signal
handler. After an interrupt, or a full disk, the same message is written again at the same place. A finalizer may come
in the middle of a write of its own thread: it only adds to the queue, which that write goes on to empty.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import io
import json
import logging
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rayloader.data.fingerprint import parts_of
from rayloader.errors import RayloaderError
from rayloader.observe.recorder import Tally
from rayloader.resume import checkpoint
from rayloader.resume.position import Position
from rayloader.resume.ranks import trains_in_a_group
from rayloader.resume.state import VERSIONS, State
from rayloader.task import Outcome

logger = logging.getLogger("rayloader")

OUTCOMES = ("batch", "error", "empty", "skipped")  # by the numbers of `Outcome`
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("epoch", pa.int32()),
        ("indices", pa.list_(pa.int64())),  # null: they are no whole numbers, or the dataset is a stream
        ("indices_other", pa.binary()),  # these, pickled
        ("worker", pa.int16()),  # -1: none
        ("digest", pa.uint32()),  # of the batch, as `resume/digest.py` computes it, or of the exception's type
        ("outcome", pa.int8()),  # a place in OUTCOMES
        ("skipped", pa.int16()),  # samples that were left out of the batch
        ("restarts", pa.int16()),  # workers that were lost in this iteration so far
    ],
    metadata={"rayloader": "provenance 1"},
)
_KEY = b"rayloader"  # of a message's metadata
_BEGIN: bytes = SCHEMA.serialize().to_pybytes()
_CONTINUES = b"\xff\xff\xff\xff"  # begins each message, and its length follows

ROWS = 1024  # are written together
SECONDS = 1.0  # after the last write, what is there is written with the next row
QUEUED = 64  # messages that wait for a disk that is full; then the oldest are given up


# ---- writing


class LogFile:
    """A file that this process appends to, for all of its loaders.

    Args:
        path: of the file, for messages.
        descriptor: of the file, locked.
        end: where its last complete message ends.
    """

    def __init__(self, path: Path, descriptor: int, end: int) -> None:
        self.path = path
        self.lock = threading.RLock()
        self.queue: list[Any] = []  # Arrow's buffers:  messages to be written, oldest first
        self._descriptor = descriptor
        self._end = end
        self._writes = False
        self._has_failed = False  # the last write has
        self._is_gone = False  # which was told
        if not end:
            self.queue.append(pa.py_buffer(_BEGIN))

    def write(self) -> None:
        """Writes what is in the queue; see NOTE [one write]."""
        with self.lock:
            if self._writes or self._descriptor < 0:  # the second: a forked child has the parent's log
                return
            self._writes = True
            try:
                self._look()
                while self.queue:
                    self._write_next(len(self.queue[0]))
                self._has_failed = False
            except OSError as error:
                self._failed(error)
            finally:
                self._writes = False

    def _write_next(self, nbytes: int) -> None:
        _write_at(self._descriptor, self.queue[0], self._end)
        self._end += nbytes
        del self.queue[0]  # no interrupt comes in between

    def _look(self) -> None:
        """Notices what somebody else has done to the file."""
        status = os.fstat(self._descriptor)
        if status.st_size < self._end:
            logger.warning(
                "rayloader: the provenance log %s was truncated while it is written; what it had is lost, and it "
                "begins again with the next rows",
                self.path,
            )
            os.ftruncate(self._descriptor, 0)
            self.queue, self._end = [pa.py_buffer(_BEGIN), *self.queue], 0
        if not status.st_nlink and not self._is_gone:
            logger.warning(
                "rayloader: the provenance log %s was deleted while it is written; its rows are lost until the next "
                "iter() makes it again",
                self.path,
            )
            self._is_gone = True

    def _failed(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # the file system may have become read-only
            os.ftruncate(self._descriptor, self._end)  # an incomplete message is none
        lost, self.queue = self.queue[:-QUEUED], self.queue[-QUEUED:]
        if lost or not self._has_failed:
            logger.warning(
                "rayloader: the provenance log %s cannot be written, and the program goes on without it: %s; it is "
                "tried again, and %s",
                self.path,
                str(error),  # the error itself would keep this file with its traceback
                f"{len(lost)} messages of up to {ROWS} rows are lost" if lost else "nothing is lost so far",
            )
        self._has_failed = True

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Lets other processes write to it; also at the interpreter's end."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if self.queue:
                logger.warning(
                    "rayloader: %d messages of up to %d rows could not be written to the provenance log %s, and are "
                    "lost",
                    *(len(self.queue), ROWS, self.path),
                )
            close(descriptor)

    def leave(self) -> None:
        """In a forked child: the file, its lock and what is not written yet are the parent's."""
        self.queue = []
        self.close()
        self.lock = threading.RLock()

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
    """The log of a new iterator of the loader; see `DataLoader.opened_log`."""
    path = _path_of(loader)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no folder {path.parent} for the provenance log; make it first") from None
    try:
        status = os.fstat(descriptor)
        if (file := _files.get((status.st_dev, status.st_ino))) is None:
            _lock(descriptor, path)
            _files[status.st_dev, status.st_ino] = file = LogFile(path, descriptor, _continued(descriptor, path))
            descriptor = -1
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return Rows(file)


def _path_of(loader: Any) -> Path:
    given = os.fspath(loader.provenance)
    if not (given.endswith(os.sep) or os.path.isdir(given)):
        return Path(given)
    os.makedirs(given, exist_ok=True)
    name = re.sub(r"[^\w.-]", "_", loader.label)
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


def _write_at(descriptor: int, content: Any, place: int) -> None:
    written = 0
    while written < len(content):  # a disk that is nearly full takes a part
        written += os.pwrite(descriptor, content[written:], place + written)


def _continued(descriptor: int, path: Path) -> int:
    """Cuts an incomplete last message off; returns where the next one begins."""
    size = os.fstat(descriptor).st_size
    if size < len(_BEGIN) and os.pread(descriptor, size, 0) == _BEGIN[:size]:
        return 0
    end = _complete(_mapped(path), path)
    os.ftruncate(descriptor, end)
    return end


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
        self._indices: dict[int, bytes | _Other | None] = {}  # of steps that are drawn, and not in a row yet
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
            "loader": loader.label,
            "epoch": self._epoch,
            "began": time.time(),
            "error": error,
            "versions": VERSIONS,
            "parts": parts_of(loader),
        }
        message = _message([], {**begin, **_as_json(state)})
        with self._file.lock:
            self._file.queue = [*self._file.queue, message]
        self._file.write()

    def drawn(self, step: int, indices: Any, *, skipped: bool) -> None:
        """Keeps the indices of a step until its row; a step that is skipped has it at once."""
        packed = _packed(indices)
        if skipped:
            self._rows[step] = step, packed, -1, 0, Outcome.SKIPPED, 0, self._tally.restarts
        elif packed is not None:
            self._indices[step] = packed

    def add(self, step: int, worker_id: int, digest: int, outcome: int, skipped: int) -> None:
        """Adds a row; see `StepLog.add`."""
        if step == self._newest:
            return
        if len(self._rows) >= ROWS or time.monotonic() - self._written_at >= SECONDS:
            self.flush()
        row = step, self._indices.get(step), worker_id, digest, outcome, skipped, self._tally.restarts
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


class _Other(bytes):
    """Indices that are no whole numbers, pickled."""


def _packed(indices: Any) -> bytes | None:
    """The indices of a step, in memory of their own; None: there are none, or they cannot be pickled."""
    if indices is None:
        return None
    numbers = indices if type(indices) is list else [indices] if type(indices) is int else None
    if numbers is not None:
        try:
            return _numbers(len(numbers)).pack(*numbers)
        except Exception:  # they may be of any type
            if not any(number is not None for number in numbers):  # a stream's
                return None
    try:
        return _Other(cloudpickle.dumps(indices))
    except Exception:  # whatever an object's pickling raises; without workers nobody else pickles them
        return None


@functools.cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"={count}q")


def _message(rows: list[tuple[Any, ...]], told: dict[str, Any], epoch: int = 0) -> Any:
    """A message with these rows, as `Rows` keeps them, and with metadata."""
    steps, packed, workers, digests, outcomes, skipped, restarts = zip(*rows, strict=True) if rows else [()] * 7
    whole = [None if type(one) is _Other else one for one in packed]
    columns = [
        pa.array(steps, pa.int32()),
        pa.array(np.full(len(rows), epoch, np.int32)),
        _lists(whole),
        pa.array([one if type(one) is _Other else None for one in packed], pa.binary()),
        pa.array(workers, pa.int16()),
        pa.array(digests, pa.uint32()),
        pa.array(outcomes, pa.int8()),
        pa.array(_as_int16(skipped)),
        pa.array(_as_int16(restarts)),
    ]
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, SCHEMA)
    writer.write_batch(pa.record_batch(columns, schema=SCHEMA), custom_metadata={_KEY: json.dumps(told)})
    return sink.getvalue()[len(_BEGIN) :]


def _lists(whole: list[bytes | None]) -> Any:
    """The column of lists, each from the bytes of its numbers."""
    values = pa.Array.from_buffers(
        pa.int64(),
        sum(lengths := [len(one or b"") // 8 for one in whole]),
        [None, pa.py_buffer(b"".join([one for one in whole if one is not None]))],
    )
    offsets = np.zeros(len(whole) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = pa.array([one is None for one in whole]) if None in whole else None
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _as_int16(counts: tuple[int, ...]) -> Any:
    return np.minimum(np.array(counts, np.int64), np.iinfo(np.int16).max).astype(np.int16)


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


# ---- reading


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a loader: an epoch, or the rest of one.

    Attributes:
        loader: its name.
        epoch: of the run, from 0.
        state: the loader's state before the first of these batches; None: there is none.
        error: why there is none.
        versions: of what built the batches.
        parts: hashes of what the batches depend on, by names such as "dataset.transform".
        began: seconds since 1970.
        rows: as in `SCHEMA`.
    """

    loader: str
    epoch: int
    state: dict[str, Any] | None
    error: str
    versions: dict[str, str]
    parts: dict[str, str]
    began: float
    rows: Any

    @property
    def place(self) -> tuple[int, tuple[int, ...]]:
        """The first step that was not taken before it, and those after that which were."""
        if self.state is not None:
            state = State.load(self.state)
            return state.step, () if state.position is None else state.position.ahead
        return pc.min(self.rows["step"]).as_py() or 0, ()


@dataclass(frozen=True, slots=True)
class Log:
    """A provenance log.

    Attributes:
        path: of its file.
        iterations: in the order in which they began.
    """

    path: Path
    iterations: list[Iteration]

    @property
    def epochs(self) -> list[int]:
        """The numbers of the epochs, ascending."""
        return sorted({iteration.epoch for iteration in self.iterations})

    @property
    def loaders(self) -> list[str]:
        """The names of the loaders, in the order in which they began."""
        return list(dict.fromkeys(iteration.loader for iteration in self.iterations))

    def of_loader(self, name: str) -> Log:
        """The part that one loader has written."""
        return Log(self.path, [iteration for iteration in self.iterations if iteration.loader == name])

    def states_of(self, epoch: int) -> list[dict[str, Any]]:
        """The states with which an epoch began, and went on.

        Raises:
            LookupError: there is no such epoch, or it has no state.
        """
        iterations = self._of_epoch(epoch)
        if not (states := [one.state for one in iterations if one.state is not None]):
            raise LookupError(f"{self.path} has no state of epoch {epoch}: {iterations[-1].error}")
        return states

    def steps_of(self, epoch: int) -> Any:
        """The rows of an epoch, by ascending step. Where a resumed run has gone on, its rows replace those after it.

        Raises:
            LookupError: there is no such epoch.
        """
        kept: list[Any] = []
        for iteration in self._of_epoch(epoch):
            start, ahead = iteration.place
            kept = [rows.filter(_stays(rows, start, ahead, iteration.rows)) for rows in kept]
            kept.append(iteration.rows)
        return pa.concat_tables(kept).sort_by("step")

    def row(self, epoch: int, step: int) -> dict[str, Any]:
        """What is logged of a step.

        Raises:
            LookupError: nothing is.
        """
        rows = self.steps_of(epoch)
        place = int(np.searchsorted(steps := rows["step"].to_numpy(), step))
        if place == len(steps) or steps[place] != step:
            raise LookupError(f"{self.path} has no step {step} of epoch {epoch}")
        row: dict[str, Any] = rows.slice(place, 1).to_pylist()[0]
        return row

    def of_worker(self, epoch: int, worker: int) -> dict[int, int]:
        """The digests of the batches that a worker has built, by their steps, ascending."""
        rows = self.steps_of(epoch)
        steps, workers, digests = (rows[name].to_numpy() for name in ("step", "worker", "digest"))
        chosen = workers == worker
        return dict(zip(steps[chosen].tolist(), digests[chosen].tolist(), strict=True))

    def _of_epoch(self, epoch: int) -> list[Iteration]:
        if len(self.loaders) > 1:
            raise LookupError(f"{self.path} is of several loaders, {', '.join(self.loaders)}: choose one")
        if not (found := [iteration for iteration in self.iterations if iteration.epoch == epoch]):
            raise LookupError(f"{self.path} has no epoch {epoch}; it has {self.epochs}")
        return found


def _stays(rows: Any, start: int, ahead: tuple[int, ...], later: Any) -> Any:
    """Which rows are of steps that were taken before an iteration that began at this step, and has these rows."""
    steps = rows["step"]
    taken = pc.or_(pc.less(steps, start), pc.is_in(steps, pa.array(ahead, pa.int32())))
    return pc.and_not(taken, pc.is_in(steps, later["step"].combine_chunks()))


def log_of(loader: Any, path: str | os.PathLike[str] | None = None) -> Log:
    """The log of a loader, in its own file or in another, up to the last batch that was taken."""
    if path is not None:
        log = read(path)
        return log.of_loader(loader.label) if len(log.loaders) > 1 else log
    if loader._position is not None:
        loader._position.flush_log()
    return read(_path_of(loader)).of_loader(loader.label)


def read(path: str | os.PathLike[str]) -> Log:
    """Reads a log, also one that is being written, or whose program was killed.

    Raises:
        RayloaderError: it is no provenance log, or is damaged.
        OSError: it cannot be read.
    """
    path = Path(path)
    content = _mapped(path)
    if not (size := _complete(content, path)):
        return Log(path, [])
    reader = pa.ipc.open_stream(content.slice(0, size))
    begins: dict[str, dict[str, Any]] = {}
    batches: dict[str, list[Any]] = {}
    while (one := _next(reader)) is not None:
        told = json.loads(one.custom_metadata[_KEY])
        number = told["iteration"]
        if "epoch" in told:
            begins[number] = told
        batches.setdefault(number, []).append(one.batch)
    return Log(path, [_iteration(told, batches[number]) for number, told in begins.items()])


def _next(reader: Any) -> Any:
    """The next batch with its metadata, None after the last."""
    try:
        return reader.read_next_batch_with_custom_metadata()
    except StopIteration:
        return None


def _iteration(told: dict[str, Any], batches: list[Any]) -> Iteration:
    state = told["state"]
    if "saved" in told:
        state = torch.load(io.BytesIO(base64.b64decode(told["saved"])), weights_only=True)
    of_all = {name: told[name] for name in ("loader", "epoch", "error", "versions", "parts", "began")}
    return Iteration(state=state, rows=pa.Table.from_batches(batches, SCHEMA).combine_chunks(), **of_all)


def _mapped(path: Path) -> Any:
    return pa.memory_map(os.fspath(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")


def _complete(content: Any, path: Path) -> int:
    """How many bytes of a file are complete messages.

    Raises:
        RayloaderError: it is no provenance log, or is damaged.
    """
    if content.size < len(_BEGIN) and content.to_pybytes() == _BEGIN[: content.size]:
        return 0  # nothing is written yet
    try:
        known = pa.ipc.read_schema(content)
    except (pa.ArrowInvalid, OSError, EOFError):
        known = None
    if known is None or not known.equals(SCHEMA, check_metadata=True):
        raise RayloaderError(f"{path} is no provenance log that this rayloader has written; give another path")
    end = 0
    while content.size - end >= 8:
        begin = content.slice(end, 8).to_pybytes()
        if not any(begin) and not any(content.slice(end).to_pybytes()):  # as a machine that fails may leave it
            break
        length = int.from_bytes(begin[4:], "little")
        if begin[:4] == _CONTINUES and end + 8 + length > content.size:
            break
        message = None
        if begin[:4] == _CONTINUES:
            try:
                message = pa.ipc.read_message(content.slice(end))
            except (pa.ArrowInvalid, EOFError):
                pass
            except OSError as error:
                if "flatbuffers" not in str(error):  # its body is incomplete
                    break
        if message is None:
            raise RayloaderError(
                f"the provenance log {path} is damaged after {end} bytes: copy these to another file, which can be read"
            )
        end += 8 + message.metadata.size + message.body.size
    return end
