"""A timeline of a loader at work: what each worker and the trainer did when, for Perfetto or chrome://tracing.

Promise: while no trace is on, nothing is kept. The size of a trace is bounded by the batches taken while it is on,
and it is always written, at the latest when the loader or the program ends.
The file is in the Trace Event Format, JSON:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from rayloader.protocol import Spent

TRAINER = 0  # the trainer's lane; worker w has lane 1 + w


class _Built(NamedTuple):
    """A batch that a worker has sent."""

    process: object  # equal for the same process of that worker
    received: float | None  # perf_counter() of this machine; None if the worker is on it
    batch: int
    indices: str
    spent: Spent

    @property
    def lane(self) -> int:
        return 1 + int(self.spent.worker_id)


class Trace:
    """Collects events. Any thread may report one: each appends to a list."""

    def __init__(self) -> None:
        self._built: list[_Built] = []
        self._of_trainer: list[tuple[str, int, float, float]] = []  # what, batch, from, to

    def trainer(self, what: str, batch: int, began: float, ended: float) -> None:
        """The trainer waited for a batch, or took its step with it."""
        self._of_trainer.append((what, batch, began, ended))

    def built(self, process: object, near: bool, batch: int, indices: str, spent: Spent) -> None:
        """A worker has sent a batch.

        Args:
            process: equal for events from the same process of the worker.
            near: whether it is on this machine, where all processes share one clock.
            batch: number of the task.
            indices: of the task, as text.
            spent: on it, by that worker.
        """
        self._built.append(_Built(process, None if near else perf_counter(), batch, indices, spent))

    def write(self, path: Path, title: str) -> None:
        """Writes the file, replacing an existing one; compressed if its name ends with .gz."""
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self.events(title))}).encode()
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
        unfinished.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        unfinished.replace(path)

    def events(self, title: str) -> Iterator[dict[str, Any]]:
        """The contents of the file: names of the lanes, and slices."""
        built, trainer = list(self._built), list(self._of_trainer)
        yield _named("process_name", TRAINER, title)
        yield _named("thread_name", TRAINER, "trainer")
        for lane in sorted({one.lane for one in built}):
            yield _named("thread_name", lane, f"worker {lane - 1}")
        for what, batch, began, ended in trainer:
            yield _slice(what, TRAINER, began, ended, {"batch": batch})
        for process in dict.fromkeys((one.lane, one.process) for one in built):
            yield from _of_process([one for one in built if (one.lane, one.process) == process])


class _Traced(Protocol):
    def set_trace(self, trace: Trace | None) -> None:
        """Sets where to report events from now on."""


class Tracing:
    """A trace that is being recorded: made by `DataLoader.trace`.

    It ends, and the file is written, with `close()` or the end of a `with` block; without either, when the loader is
    dropped or the program ends.
    """

    def __init__(self, recorder: _Traced, path: Path, title: str) -> None:
        self._recorder = weakref.ref(recorder)
        trace = Trace()
        recorder.set_trace(trace)
        self._write = weakref.finalize(recorder, _write, trace, path, title, os.getpid())

    def close(self) -> None:
        """Ends the recording, and writes the file; callable more than once."""
        recorder = self._recorder()
        if self._write.alive and recorder is not None:
            recorder.set_trace(None)
        self._write()

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(trace: Trace, path: Path, title: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked child ends too
        trace.write(path, title)


def _of_process(built: list[_Built]) -> Iterable[dict[str, Any]]:
    # Another machine's clock: assumes that the fastest batch arrived at the moment when it was sent.
    ahead = min(
        (one.received - one.spent.began - one.spent.build for one in built if one.received is not None), default=0.0
    )
    nexts = [one.spent.began for one in built[1:]]
    for one, next_began in zip(built, [*nexts, float("inf")], strict=True):
        args = {"batch": one.batch, **({"indices": one.indices} if one.indices else {})}
        began = one.spent.began
        for what in ("fetch", "collate", "transfer"):
            # Sending is reported with the next batch, so it could seem to end after that has begun.
            ended = min(began + getattr(one.spent, what), next_began)
            yield _slice(what, one.lane, began + ahead, ended + ahead, args)
            began = ended


def _slice(what: str, lane: int, began: float, ended: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": began * 1e6, "dur": (ended - began) * 1e6}
    return {"ph": "X", "name": what, "pid": os.getpid(), "tid": lane, **times, "args": args}


def _named(what: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": os.getpid(), "tid": lane, "args": {"name": name}}
