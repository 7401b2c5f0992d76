"""What a provenance log tells of a run, and where two runs part ways.

Promise: pure functions over logs. Two runs are the same as far as both have logged: same indices, outcomes and digests
of every step. Which worker built a batch, and what the runs had besides (seeds, versions, parts of the program), is
reported too; by itself it makes no run another one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayloader.replay.describe import Difference, described, in_words, unequal
from rayloader.replay.provenance import OUTCOMES, Iteration, Log
from rayloader.resume.state import State

# Columns by which runs part ways, and then what is only told.
_DECIDE = ("indices", "indices_other", "outcome", "digest")
_TOLD = ("worker",)
_FEW = 10  # iterations of a loader that are told, apart from the last
_OF_A_LOADER = ("dataset", "samplers", "seeds", "workers", "ranks", "saved with")
_TO_TELL = {"error": "errors", "empty": "without a sample that could be built", "skipped": "in skip_steps"}


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
        causes: what else differs at the start of the epoch of the first parting, or else of the first epoch of both.
    """

    compared: int
    partings: list[Parting]
    causes: list[Difference]

    @property
    def same(self) -> bool:
        """Whether the runs had the same batches."""
        return not any(parting.is_decisive for parting in self.partings)


def compared(a: Log, b: Log) -> Comparison:
    """Compares two runs."""
    ours, theirs = _steps(a), _steps(b)
    epochs = sorted(ours.keys() & theirs.keys())
    partings: dict[str, Parting] = {}
    count = 0
    for epoch in epochs:
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
    ordered = sorted(partings.values(), key=lambda parting: (parting.epoch, parting.step))
    decisive = [parting.epoch for parting in ordered if parting.is_decisive]
    causes = [*_causes(a, b, (decisive or epochs)[0])] if epochs else []
    return Comparison(count, ordered, causes)


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


def _causes(a: Log, b: Log, epoch: int) -> Iterator[Difference]:
    """What differs when this epoch begins: versions, parts of the program, and what the states say of the start."""
    ours, theirs = (next(one for one in log.iterations if one.epoch == epoch) for log in (a, b))
    yield from unequal(ours.versions, theirs.versions, "versions")
    yield from unequal(ours.parts, theirs.parts, "parts")
    yield from unequal(_begin(ours), _begin(theirs))


def _begin(iteration: Iteration) -> dict[str, Any]:
    """Of the state before the first batch, what stays the same in an epoch."""
    if iteration.state is None:
        return {}
    found = described(State.load(iteration.state))
    kept = {name: found[name] for name in ("seeds", "loader", "dataset", "samplers", "ranks", "skip_steps")}
    return {**kept, "workers": {"num_workers": found["workers"]["num_workers"]}}


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
        "parts": {**iteration.parts},
    }


def log_in_words(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The same, as pairs of a heading and a text."""
    iterations = found["iterations"]
    steps = sum(one["steps"] for one in iterations)
    rows = [("provenance log", f"{steps:,} rows, {found['bytes'] / 1000:,.1f} kB")]
    for name in found["loaders"]:
        own = [one for one in iterations if one["loader"] == name]
        rows.append(("loader", name))
        rows += [(f"epoch {one['epoch']:,}", _iteration_in_words(one)) for one in own[:_FEW]]
        if len(own) > _FEW:
            rows += [("...", f"{len(own) - _FEW - 1:,} more")] * (len(own) > _FEW + 1)
            rows.append((f"epoch {own[-1]['epoch']:,}", _iteration_in_words(own[-1])))
        last = own[-1]
        if last["state"] is not None:
            rows += [row for row in in_words(last["state"]) if row[0] in _OF_A_LOADER]
        rows.append(("parts", ", ".join(last["parts"])))
    return [(heading, text) for heading, text in rows if text]


def _iteration_in_words(one: dict[str, Any]) -> str:
    texts = [f"steps {one['first_step']:,} to {one['last_step']:,}" if one["steps"] else "no steps"]
    texts += [f"{count:,} {_TO_TELL[name]}" for name, count in one["outcomes"].items() if name in _TO_TELL]
    texts += [f"{one['samples_skipped']:,} samples skipped"] * bool(one["samples_skipped"])
    texts += [f"{one['restarts']:,} workers lost"] * bool(one["restarts"])
    texts += [f"no state: {one['error']}"] * bool(one["error"])
    return "; ".join(texts)
