"""What one worker was told, and its snapshots: enough to go on with it in another process.

Promise: pure bookkeeping. A worker that starts from `state` and is told `entries` again is where the lost one was to
be; one that starts from `base` and builds the tasks in `replay` again is where the user is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from rayloader.snapshot import WorkerState
from rayloader.transport.codec import Encoded


class Told(NamedTuple):
    """A task that the worker was given."""

    task_id: int
    indices: Encoded


class Resumed(NamedTuple):
    """A new epoch that the worker was told to begin."""

    epoch: int
    shared_seed: int | None
    undo_from: int | None


class Journal:
    """Of one worker; `base`, `replay` and what the user has taken are of the current epoch."""

    def __init__(self) -> None:
        self.state: WorkerState | None = None  # newest snapshot; None: as `start` makes it
        self.entries: deque[Told | Resumed] = deque()  # told since
        self.base: WorkerState | None = None  # newest snapshot that the user has got to
        self._since: deque[WorkerState] = deque()  # snapshots after `base`, oldest first
        self._taken: deque[int] = deque()  # tasks after `base` that the user has taken, oldest first
        self._last_taken = -1
        self._since_base: deque[Told] = deque()  # all that it was told after `base`
        self.shared_seed: int | None = None  # of the epoch of `state`, if that is not the first
        self.begun = True  # `base` is of this epoch
        self.resumed: Any = None  # until it is: where the snapshot of the epoch's begin will come from

    @property
    def replay(self) -> list[int]:
        """Tasks that the user has, and `base` has not."""
        return list(self._taken)

    def told(self, entries: Iterable[Told | Resumed]) -> None:
        """The worker was given something more to do."""
        for entry in entries:
            self.entries.append(entry)
            if isinstance(entry, Told):
                self._since_base.append(entry)

    def untell(self, from_task: int) -> bool:
        """Back to before it was told this task of the current epoch, or a later one; whether it was."""
        if not self._since_base or self._since_base[-1].task_id < from_task:
            return False
        self._since = deque(state for state in self._since if state.last_task < from_task)
        self.state = self._since[-1] if self._since else self.base
        self._since_base = deque(entry for entry in self._since_base if entry.task_id < from_task)
        last_task = -1 if self.state is None else self.state.last_task
        self.entries = deque(entry for entry in self._since_base if entry.task_id > last_task)
        return True

    def begins(self, resumed: Resumed) -> None:
        """A new epoch begins."""
        self.begun = False
        if resumed.undo_from and self.state is not None and self.state.last_task >= resumed.undo_from:
            # What is to be undone can't be told to another process any more.
            self.state = self.state._replace(error="it died between an epoch that was broken off and the next")
        self.entries.append(resumed)
        self._since.clear()
        self._since_base.clear()
        self._taken.clear()
        self._last_taken = -1

    def reached_begin(self, state: WorkerState) -> None:
        """The snapshot of the epoch's begin has come, a whole one."""
        self.begun, self.resumed = True, None
        while any(isinstance(entry, Resumed) for entry in self.entries):
            entry = self.entries.popleft()
            if isinstance(entry, Resumed):
                self.shared_seed = entry.shared_seed
        self.state = self.base = state

    def reached(self, state: WorkerState) -> None:
        """A snapshot has come with the answer to a call: what it has done need not be told again."""
        self.state = state.over(self.state)
        while self.entries and isinstance(first := self.entries[0], Told) and first.task_id <= state.last_task:
            self.entries.popleft()
        self._since.append(self.state)
        self._advance()

    def taken(self, task_id: int) -> None:
        """The user has this task's batch; a worker's batches are taken in the order in which it built them.

        Telling it twice does no harm, and no interrupt comes between what belongs together, here and in `_advance`:
        Python lets signal handlers run when a call returns, and there is none.
        """
        if task_id != self._last_taken:
            self._taken += (task_id,)
            self._last_taken = task_id
        self._advance()

    def starts_at(self, base: WorkerState | None, replay: Iterable[Told]) -> None:
        """The worker goes on from where another run's was."""
        self.state = self.base = base
        self.entries = deque(replay)
        self._taken = deque(entry.task_id for entry in self.entries if isinstance(entry, Told))
        self._since_base = deque(entry for entry in self.entries if isinstance(entry, Told))
        self._last_taken = self._taken[-1] if self._taken else -1

    def _advance(self) -> None:
        while self._since and self._since[0].last_task <= self._last_taken:
            self.base = self._since[0]
            del self._since[0]
        while self.base is not None and self._taken and self._taken[0] <= self.base.last_task:
            del self._taken[0]
        while self.base is not None and self._since_base and self._since_base[0].task_id <= self.base.last_task:
            del self._since_base[0]
