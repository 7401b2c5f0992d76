"""What a provenance log tells of a run, and where two runs part ways.

Promise: pure functions over logs. Two runs are the same as far as both have logged: same indices, outcomes and digests
of every step. Which worker built a batch is reported too; by itself it makes no run another one.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayloader.replay.describe import described
from rayloader.replay.provenance import OUTCOMES, Iteration, Log
from rayloader.resume.state import State

# Columns by which runs part ways, and then what is only told.
_DECIDE = ("indices", "indices_other", "outcome", "digest")
_TOLD = ("worker",)


class Parting(NamedTuple):
    """The first step at which two runs differ in one column.

    Attributes:
        column: of the log, or "step" where only one of the runs has logged this step.
        epoch: of the step.
        step: the number of the batch.
        a: the value in the first log; None: there is none.
        b: the value in the second log.
    """

    column: str
    epoch: int
    step: int
    a: Any
    b: Any

    @property
    def is_decisive(self) -> bool:
        """Whether it makes two different runs of them."""
        return self.column not in _TOLD


class Comparison(NamedTuple):
    """Two runs, by their logs.

    Attributes:
        compared: steps that both have logged.
        partings: for each column that differs, the first step at which it does; the earliest one first.
    """

    compared: int
    partings: list[Parting]

    @property
    def same(self) -> bool:
        """Whether the runs had the same batches."""
        return not any(parting.is_decisive for parting in self.partings)


def compared(a: Log, b: Log) -> Comparison:
    """Compares two runs."""
    ours, theirs = _steps(a), _steps(b)
    partings: dict[str, Parting] = {}
    count = 0
    for epoch in sorted(ours.keys() & theirs.keys()):
        one, other = ours[epoch], theirs[epoch]
        both, left, right = np.intersect1d(_numbers(one), _numbers(other), return_indices=True)
        count += len(both)
        for column in (*_DECIDE, *_TOLD):
            if column in partings:
                continue
            found = _first(both, one.column(column).take(left), other.column(column).take(right))
            if found is not None:
                step, *values = found
                partings[column] = Parting(column, epoch, step, *[_plain(column, value) for value in values])
    if ours and theirs and (lone := _lone(ours, theirs)) is not None:
        partings["step"] = lone
    return Comparison(count, sorted(partings.values(), key=lambda parting: (parting.epoch, parting.step)))


def _steps(log: Log) -> dict[int, pa.Table]:
    """The rows of each epoch that has some, by ascending step."""
    found = {epoch: log.steps_of(epoch) for epoch in log.epochs}
    return {epoch: rows for epoch, rows in found.items() if len(rows)}


def _numbers(rows: pa.Table) -> Any:
    return rows.column("step").to_numpy()


def _first(steps: Any, a: pa.ChunkedArray, b: pa.ChunkedArray) -> tuple[int, Any, Any] | None:
    """The first step at which two columns differ, and the values there."""
    if a.equals(b):
        return None
    place = next(place for place, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
    return int(steps[place]), a[place].as_py(), b[place].as_py()


def _plain(column: str, value: Any) -> Any:
    """A value of a log in types that JSON knows; pickled indices are not unpickled, for that could run code."""
    if column == "outcome":
        return OUTCOMES[value]
    return f"{len(value)} bytes, checksum {zlib.crc32(value):08x}" if isinstance(value, bytes) else value


def _lone(a: dict[int, pa.Table], b: dict[int, pa.Table]) -> Parting | None:
    """The first step that only one has logged, although the other was logging before it and after it."""
    spans = _span(a), _span(b)
    for epoch in sorted({*a, *b}):
        numbers = [_numbers(one[epoch]) if epoch in one else np.empty(0, np.int32) for one in (a, b)]
        lone = [
            (step, has)
            for has, (first, last) in ((0, spans[1]), (1, spans[0]))
            for step in np.setdiff1d(numbers[has], numbers[1 - has])
            if first < (epoch, step) < last
        ]
        if lone:
            step, has = min(lone)
            return Parting("step", epoch, int(step), *(("logged", None) if has == 0 else (None, "logged")))
    return None


def _span(steps: dict[int, pa.Table]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The first step that was logged and the last one, each with its epoch."""
    first, last = min(steps), max(steps)
    return (first, int(_numbers(steps[first])[0])), (last, int(_numbers(steps[last])[-1]))


# ---- one log


def described_log(log: Log) -> dict[str, Any]:
    """What was logged, in types that JSON knows."""
    return {
        "bytes": log.path.stat().st_size,
        "loaders": log.loaders,
        "iterations": [_iteration(one) for one in log.iterations],
    }


def _iteration(iteration: Iteration) -> dict[str, Any]:
    rows = iteration.rows
    steps = _numbers(rows)
    outcomes = {OUTCOMES[one["values"].as_py()]: one["counts"].as_py() for one in pc.value_counts(rows["outcome"])}
    return {
        "loader": iteration.loader,
        "epoch": iteration.epoch,
        "began": iteration.began,
        "first_step": int(steps.min()) if len(steps) else None,
        "last_step": int(steps.max()) if len(steps) else None,
        "steps": len(steps),
        "outcomes": outcomes,
        "samples_skipped": pc.sum(rows["skipped"]).as_py() or 0,
        "restarts": pc.max(rows["restarts"]).as_py() or 0,
        "state": None if iteration.state is None else described(State.load(iteration.state)),
        "error": iteration.error,
        "versions": {**iteration.versions},
    }
