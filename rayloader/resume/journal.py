"""The calls made to one worker, its answers, and its snapshots: enough to continue it in another process.

Promise: pure bookkeeping. A worker that starts from `state` and is told `entries` again reaches the position of the
lost one; a worker that starts from `base` and rebuilds the tasks in `to_rebuild` reaches the user's position.

NOTE [Proof]. Whether a worker has been restored correctly shows when it rebuilds a delivered batch: the digests of the
two must be equal. So `state` and `base` are snapshots from before the last task that was answered, or taken, and at
least that one is rebuilt, also where the dataset has a state of its own, which may leave something out. Only the first
such state of a worker is a `base` at once: without one, another run would begin with what its own dataset holds. If
nothing of an epoch was answered, or taken, it is one of the previous epoch: the snapshot of the epoch's start proves
nothing. With a state of the dataset's own it may be used all the same, unless it may be stale: then the previous epoch
is gone through again until there is another one, from where something was built after. And for a stream that has ended
nothing can be built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task


class Resumed(NamedTuple):
    """A new epoch that the worker was told to begin."""

    epoch: int
    shared_seed: int | None
    dataset_epoch: int | None = None  # for the dataset's `set_epoch`


class Before(NamedTuple):
    """Where a worker was in an epoch before the current one, and how it came from there to the start of this one."""

    state: WorkerState | None = None
    entries: tuple[Task | Resumed, ...] = ()
    shared_seed: int | None = None  # of the epoch of `state`, if that is not the first

    def leads_to(self, state: WorkerState) -> bool:
        """Whether that must be repeated to reach the start of this epoch, and can be."""
        if self.state is not None and self.state.error:
            return False
        known = [entry for entry in self.entries if isinstance(entry, Task) and entry.digest is not None]
        return state.may_be_stale or (state.is_to_be_proven and bool(known))


_NOTHING = Before()


class Journal:
    """The journal of one worker; `base`, `to_rebuild` and what the user has taken are of the current epoch."""

    def __init__(self) -> None:
        self.base: WorkerState | None = None  # newest snapshot that the user has passed; None: as `start` makes it
        self._snapshots: deque[WorkerState] = deque()  # after `base`, oldest first
        self._given: dict[int, Task] = {}  # tasks after `base`, ascending
        # Those that the user has taken. Only added to: to remove some, another dict takes its place.
        self.to_rebuild: dict[int, Task] = {}
        self._last_answered = -1
        self.last_taken = -1  # task
        self._before = _NOTHING  # dropped once this epoch has something to prove
        self._shared_seed: int | None = None  # of this epoch, if that is not the first
        self.begun = True  # `base` is of this epoch
        self.resumed: Any = None  # until the epoch's first snapshot has come: where that will come from

    @property
    def state(self) -> WorkerState | None:
        """The snapshot that another process starts from; None: as `start` makes it."""
        return self._start().state

    def _start(self) -> Before:
        """Where another process starts, and how it comes from there to here."""
        usable = [s for s in self._snapshots if _is_before(s, self._last_answered)]
        state = usable[-1] if usable else self.base
        unproven = bool(self._before.entries) and (self._last_answered < 0 or may_be_stale(state))
        if unproven or not self.begun:
            return self._before._replace(entries=(*self._before.entries, *self._given.values()))
        done = -1 if state is None else state.last_task
        return Before(state, tuple([task for task in self._given.values() if task.task_id > done]), self._shared_seed)

    @property
    def shared_seed(self) -> int | None:
        """The shared seed of the epoch of `state`, if that is not the first."""
        return self._start().shared_seed

    @property
    def before(self) -> Before | None:
        """Where a worker must be started to prove that it reaches `base`; None: at `base` itself."""
        return self._before if self._before.entries and (self.last_taken < 0 or may_be_stale(self.base)) else None

    @property
    def newest(self) -> WorkerState | None:
        """The newest snapshot, for information about the worker; None if there is none."""
        return self._snapshots[-1] if self._snapshots else self.base

    @property
    def entries(self) -> list[Task | Resumed]:
        """The calls after `state`."""
        return [*self._start().entries]

    @property
    def tasks(self) -> list[Task]:
        """The tasks in `entries` that are of the current epoch."""
        return [one for one in self.entries if isinstance(one, Task) and self._given.get(one.task_id) is one]

    @property
    def remembers(self) -> bool:
        """Whether the worker's batches depend on its earlier ones, even if each batch is seeded by itself."""
        state = self.newest
        if state is None:
            return bool(self.to_rebuild)  # it has not reported what its dataset holds
        return bool(state.dataset or state.iterator or state.random.held)

    def given(self, task: Task) -> None:
        """The worker was given another task."""
        self._given[task.task_id] = task

    def begins(self, resumed: Resumed) -> None:
        """A new epoch begins."""
        state, entries, shared_seed = self._start()
        self._before = Before(state, (*entries, resumed), shared_seed)
        self._shared_seed = resumed.shared_seed
        self.begun = False
        self._snapshots.clear()
        self._given.clear()
        self.to_rebuild = {}
        self._last_answered = self.last_taken = -1

    def reached_begin(self, state: WorkerState) -> None:
        """The snapshot of the epoch's start has come, a complete one."""
        self.begun, self.resumed = True, None
        self.base = state
        if not self._before.leads_to(state):
            self._before = _NOTHING

    def answered(self, task_id: int, digest: int) -> None:
        """The worker has built this task."""
        if (task := self._given.get(task_id)) is not None:
            task.digest = digest
        self._last_answered = max(self._last_answered, task_id)

    def reached(self, state: WorkerState) -> None:
        """A snapshot has come with the answer to a call."""
        state = state.over(self.newest)
        if self._snapshots and self._snapshots[-1].last_task == state.last_task:
            self._snapshots[-1] = state  # the one before may never be passed: see NOTE [Proof]
        else:
            self._snapshots.append(state)
        self._advance()

    def exhausted(self) -> None:
        """The worker's stream has ended: its remaining tasks will not be built."""
        self._given = {task_id: task for task_id, task in self._given.items() if task.digest is not None}

    def taken(self, task_id: int) -> None:
        """The user has this task's batch; a worker's batches are taken in the order in which it built them.

        Calling it twice does no harm, not even after an interrupt in the middle of it, see `_advance`.
        """
        if (task := self._given.get(task_id)) is not None:
            self.to_rebuild[task_id] = task
        self.last_taken = task_id
        self._advance()
        if self._before is not _NOTHING and not may_be_stale(self.base):
            self._before = _NOTHING

    def starts_before(self, before: Before) -> None:
        """The worker continues from the start of an epoch of another run, of which the user had taken nothing."""
        self._before, self.begun = before, False

    def starts_at(self, base: WorkerState | None, to_rebuild: Iterable[Task]) -> None:
        """The worker continues from where another run's was, with the tasks that the user had taken since."""
        self.base = base
        if base is not None:
            self._last_answered = self.last_taken = base.last_task
        for task in to_rebuild:
            self._given[task.task_id] = self.to_rebuild[task.task_id] = task
            self._last_answered = self.last_taken = task.task_id

    @property
    def _is_first(self) -> bool:
        """Whether the next snapshot is the first one with a state of the dataset's own, and the user is there."""
        state = self._snapshots[0]
        return self.base is None and state.has_own and state.last_task == self.last_taken

    def _advance(self) -> None:
        # Python lets signal handlers run when a call returns: none comes between steps that belong together here.
        while self._snapshots and (_is_before(self._snapshots[0], self.last_taken) or self._is_first):
            self.base = self._snapshots[0]
            del self._snapshots[0]
        done = -1 if self.base is None else self.base.last_task
        if self._given and next(iter(self._given)) <= done:
            self._given = {task_id: task for task_id, task in self._given.items() if task_id > done}
        if self.to_rebuild and next(iter(self.to_rebuild)) <= done:
            self.to_rebuild = {task_id: task for task_id, task in self.to_rebuild.items() if task_id > done}


def may_be_stale(state: WorkerState | None) -> bool:
    """Whether this snapshot, if it is one, may tell an old position."""
    return state is not None and state.may_be_stale


def _is_before(state: WorkerState, task_id: int) -> bool:
    """Whether this snapshot may be used if everything up to a task is known; see NOTE [Proof]."""
    return state.last_task < task_id or (state.last_task == task_id and state.exhausted)
