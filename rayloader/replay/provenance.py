"""The provenance log as a file: its form, and what is read of it.

Promise: a process that is killed at any moment leaves a file that `read` reads up to its last complete message.

The file is a stream of Arrow's IPC format without the mark of its end. Each iteration of a loader, which begins an
epoch or goes on with one, writes a message without rows, whose metadata under the key "rayloader" are a JSON object:
the number of the epoch, the loader's state before the iteration's first batch, and versions. Its rows follow, in the
order of delivery; those of loaders that share a file are in messages of their own.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rayloader.errors import RayloaderError
from rayloader.resume.state import State

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
KEY = b"rayloader"  # of a message's metadata
BEGIN: bytes = SCHEMA.serialize().to_pybytes()
_NAMED = b'{"iteration": '  # begins the metadata of each


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a loader: an epoch, or the rest of one.

    Attributes:
        loader: its name.
        epoch: of the run, from 0.
        state: the loader's state before the first of these batches; None: there is none.
        error: why there is none.
        versions: of what built the batches.
        began: seconds since 1970.
        rows: as in `SCHEMA`.
    """

    loader: str
    epoch: int
    state: dict[str, Any] | None
    error: str
    versions: dict[str, str]
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


def read(path: str | os.PathLike[str]) -> Log:
    """Reads a log, also one that is being written, or whose program was killed.

    Raises:
        RayloaderError: it is no provenance log, or is damaged.
        OSError: it cannot be read.
    """
    path = Path(path)
    begins: dict[str, dict[str, Any]] = {}
    batches: dict[str, list[Any]] = {}
    done = len(BEGIN)
    for end, batch, told in messages(path):
        try:
            batch.validate(full=True)  # Arrow itself trusts the offsets in a file
            if "epoch" in told:
                begins[told["iteration"]] = _begin(told)
            batches.setdefault(told["iteration"], []).append(batch)
        except Exception as error:  # whatever Arrow and torch make of other bytes
            raise _damaged(path, done) from error
        done = end
    return Log(
        path,
        [
            Iteration(rows=pa.Table.from_batches(batches[number], SCHEMA).combine_chunks(), **begin)
            for number, begin in begins.items()
        ],
    )


def _begin(told: dict[str, Any]) -> dict[str, Any]:
    """What an iteration begins with."""
    if "saved" in told:
        told["state"] = torch.load(io.BytesIO(base64.b64decode(told["saved"])), weights_only=True)
    return {one.name: told[one.name] for one in fields(Iteration) if one.name != "rows"}


def messages(path: Path) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    """The complete messages of a file: the offset of each one's end, its rows, and its metadata.

    Raises:
        RayloaderError: it is no provenance log, or is damaged.
    """
    content = pa.memory_map(os.fspath(path)).read_buffer() if path.stat().st_size else pa.py_buffer(b"")
    if content.size < len(BEGIN) and content.to_pybytes() == BEGIN[: content.size]:
        return  # nothing is written yet
    source = pa.BufferReader(content)
    try:
        reader: Any = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError, EOFError):
        reader = None
    if reader is None or not reader.schema.equals(SCHEMA, check_metadata=True):
        raise RayloaderError(f"{path} is no provenance log that this rayloader has written; give another path")
    while (end := source.tell()) < content.size:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            told = json.loads(metadata[KEY])
        except Exception as error:  # whatever Arrow and JSON make of it
            if content.slice(end).to_pybytes().count(_NAMED) > 1:
                raise _damaged(path, end) from error
            return  # one message, which a process that was killed has left incomplete
        yield source.tell(), batch, told


def end_of(path: Path) -> int:
    """Where the last complete message of a file ends; raises as `messages` does."""
    begin = len(BEGIN) if path.stat().st_size >= len(BEGIN) else 0
    return max([begin, *(end for end, *_ in messages(path))])


def _damaged(path: Path, end: int) -> RayloaderError:
    return RayloaderError(
        f"the provenance log {path} is damaged after {end} bytes: copy these to another file, which can be read"
    )
