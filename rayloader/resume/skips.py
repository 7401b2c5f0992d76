"""`skip_steps`: the batches of a run that nobody builds and nobody gets.

Promise: the sampler's draws stay as they are, and so do the numbers of all other steps; what is skipped is part of a
state. An entry that comes too late, after its step was drawn, is never in effect, which a warning says.

NOTE [A growing file]. A file is read at each `iter()`, and during an epoch when it has changed. Ranks read it at
different moments, so one could skip a step that another builds, and training would hang: a loader that is one of
several ranks reads it at `iter()` only.
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from typing_extensions import override

from rayloader.task import Given, NothingSkipped, Step

_LINE = re.compile(r"(?:(\d+)[ \t:,]+)?(\d+)$")


class SkipSteps(NothingSkipped):
    """The steps that a loader skips.

    Args:
        given: the loader's `skip_steps`.
        known: the steps that it skipped by a state, or in its earlier epochs.
        at: the first step that is not drawn yet.
        follows: whether the file, if it is one, is read again when it has changed.
    """

    def __init__(self, given: Given = None, known: Iterable[Step] = (), at: Step = (0, 0), *, follows: bool = False):
        super().__init__(known)
        self._path = Path(given) if follows and isinstance(given, (str, os.PathLike)) else None
        self._seen = None if self._path is None else _version(self._path)
        self._late: set[Step] = set()
        self._add(steps_in(given), at)

    @override
    def has(self, step: Step) -> bool:
        if self._path is not None and (version := _version(self._path)) != self._seen:
            self._seen = version
            self._read_again(self._path, step)
        return step in self.steps

    def _read_again(self, path: Path, at: Step) -> None:
        try:
            new = _read(path, complete=True)
        except (OSError, ValueError) as error:  # a mistake in the file is not to end the run
            warnings.warn(f"skip_steps could not be read again, and stays as it was: {error}", stacklevel=2)
        else:
            self._add(new, at)

    def _add(self, new: Iterable[Step], at: Step) -> None:
        new = {*new} - self.steps - self._late
        late = {step for step in new if step < at}
        self._late |= late
        self.steps |= new - late
        if late:
            warnings.warn(
                f"skip_steps names {in_words(late)}, but the run is at {in_words([at])} already: it is not skipped. "
                "Load a state from before it",
                stacklevel=2,
            )

    @override
    def forget(self, epoch: int) -> None:
        self._path = None
        if dropped := {step for step in self.steps if step[0] == epoch}:
            self.steps -= dropped
            warnings.warn(
                f"skip_steps names {in_words(dropped)}; but the rest of epoch {epoch} is dealt out to another number "
                "of ranks, its steps have other numbers, and none of them is skipped",
                stacklevel=2,
            )


class AllBut(SkipSteps):
    """Skips what is not needed to build one batch again.

    Args:
        needed: the steps of the epoch that are built, but for those that were skipped in the run.
        skipped: these, as a state has them.
        end: the step after the last one.
        worker_id: the worker that builds them.
    """

    def __init__(self, needed: Container[int], end: int, worker_id: int, skipped: Iterable[Step] = ()) -> None:
        super().__init__()
        self._needed, self._skipped = needed, {*skipped}
        self.end, self.only_worker = end, worker_id

    @override
    def has(self, step: Step) -> bool:
        return step[1] not in self._needed or step in self._skipped


def steps_in(given: Given) -> set[Step]:
    """The steps that a value of `skip_steps` names.

    Raises:
        ValueError: one is negative, or a line of the file is no step.
        TypeError: it holds something that is no step.
        FileNotFoundError: there is no such file.
    """
    if given is None:
        return set()
    if isinstance(given, (str, os.PathLike)):
        if not Path(given).exists():
            raise FileNotFoundError(f"skip_steps names the file {given}, which is not there; make it, if only empty")
        return {*_read(Path(given))}
    try:
        return {_step(entry) for entry in given}
    except TypeError:
        raise TypeError(
            f"skip_steps must hold numbers of steps, or pairs of an epoch and a step, or be the path of a file of "
            f"these, got {given!r}"
        ) from None


def _step(entry: Any) -> Step:
    pair = entry if isinstance(entry, (tuple, list)) else (0, entry)
    if len(pair) != 2 or any(isinstance(number, bool) for number in pair):
        raise TypeError
    epoch, step = map(operator.index, pair)
    if epoch < 0 or step < 0:
        raise ValueError(f"skip_steps must hold numbers of steps and epochs >= 0, got {entry!r}; both count from 0")
    return epoch, step


def _read(path: Path, *, complete: bool = False) -> list[Step]:
    """The steps in a file; `complete`: without a last line that somebody may be about to write."""
    lines = path.read_text().split("\n")
    steps = []
    for number, line in enumerate(lines[:-1] if complete else lines, start=1):
        content = line.partition("#")[0].strip()
        match = _LINE.match(content)
        if match is not None:
            steps.append((int(match[1] or 0), int(match[2])))
        elif content:
            raise ValueError(
                f"skip_steps: each line of {path} must hold a step, or an epoch and a step, such as 48213 or 0:48213, "
                f"got {content!r} in line {number}"
            )
    return steps


def _version(path: Path) -> tuple[int, int, int] | None:
    """A value that changes with the file; None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def in_words(steps: Iterable[Step]) -> str:
    """Steps, for a message."""
    first, *others = sorted(steps)
    more = f" and {len(others)} more" if others else ""
    return f"step {first[1]} of epoch {first[0]}{more}"
