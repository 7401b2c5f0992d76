"""The workers that one process hosts: which of them is at work, and what an answer says of the work.

Promise: one worker at a time has the process's random generators, the one that works. No Ray, and no channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from rayloader.protocol import Answer, Result
from rayloader.state.journal import Resumed
from rayloader.state.snapshot import WorkerState
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.lanes import Wire, WorkerLane
from rayloader.worker.worker import Task, Worker


class Hosting:
    """Of one process.

    Args:
        lane: where batches go; an answer says what became of it.

    Attributes:
        idle: seconds since the last answer for which there was nothing to do, for `Answer.spent`.
    """

    def __init__(self, lane: WorkerLane) -> None:
        self.idle = 0.0
        self._lane = lane
        self._workers: dict[int, Worker] = {}  # by their ids
        self._at_work: Worker | None = None  # whose generators are the process's
        # For `Answer.spent`, perf_counter() or seconds.
        self._free_since = 0.0  # it has done all that it was told
        self._answered = 0.0  # the last answer was ready
        self._sending = 0.0  # it, and what had to be done before the next task

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, worker_id: int) -> Worker | None:
        """That worker, if it is here."""
        return self._workers.get(worker_id)

    def add(self, worker_id: int, worker: Worker) -> None:
        """It is here, and at work."""
        self._switch_to(None)
        self._at_work = self._workers[worker_id] = worker

    def remove(self, worker_id: int) -> None:
        """It is somewhere else."""
        if self._at_work is self._workers.pop(worker_id, None):
            self._at_work = None

    def clear(self) -> None:
        """None is here."""
        self._workers.clear()
        self._at_work = None

    def begins(self) -> None:
        """An epoch, for one of the workers."""
        self._free_since = time.perf_counter()
        self.idle = self._sending = 0.0

    def was_idle(self) -> None:
        """There was nothing to do since `is_free`."""
        self.idle += time.perf_counter() - self._free_since

    def is_free(self) -> None:
        """The last answer is on its way."""
        self._free_since = time.perf_counter()
        self._sending = self._free_since - self._answered

    def resume(self, worker_id: int, resumed: Resumed) -> WorkerState:
        """A worker begins a new epoch with the same dataset object."""
        self._switch_to(worker_id)
        state = self._workers[worker_id].resume(resumed)
        self.begins()
        return state

    def run(self, worker_id: int, task: Task, arena: ArenaWriter | None) -> Answer:
        """A worker builds a batch, in the arena if there is one."""
        self._switch_to(worker_id)
        worker = self._workers[worker_id]
        began = time.perf_counter()
        result = worker.run(task, arena)
        return self._answer(worker, result, began)

    def replay(
        self,
        worker_id: int,
        call: int,
        tasks: Iterable[tuple[int, Wire, int | None]],
        dropped: Callable[[int, int], bool],
    ) -> Answer:
        """A worker builds again what it had built; see `Worker.replay`."""
        self._switch_to(worker_id)
        worker = self._workers[worker_id]
        began = time.perf_counter()
        again = [Task(call, task_id, indices, again=True, digest=digest) for task_id, indices, digest in tasks]
        result = worker.replay(again, dropped)
        return self._answer(worker, result, began)

    def _answer(self, worker: Worker, result: Result | None, began: float) -> Answer:
        self._answered = ended = time.perf_counter()
        seconds, lane = ended - began, self._lane
        progress, doubt, state = worker.progress, worker.take_doubt(), worker.snapshot_if_due(seconds)
        spent = worker.spent(ended, self.idle, self._sending)
        self.idle = self._sending = 0.0
        return Answer(result, seconds, spent, progress, doubt, state, lane.take_full(), lane.error)

    def _switch_to(self, worker_id: int | None) -> None:
        """Workers of one process take turns with its generators."""
        worker = self._workers[worker_id] if worker_id is not None else None
        if worker is self._at_work:
            return
        if self._at_work is not None:
            self._at_work.park()
        if worker is not None:
            worker.unpark()
        self._at_work = worker
