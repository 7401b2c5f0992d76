"""The workers that one process hosts: which of them is active, and what an answer reports about its work.

Promise: only the active worker uses the process's random generators. No Ray, and no channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rayloader._compat import set_worker_info
from rayloader.data.shard_info import nobody_reads
from rayloader.host.finalizers import finalize_at_exit, without_finalizers
from rayloader.host.worker import BuildOrder, HostedWorker
from rayloader.protocol import Answer, Result
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.lanes import WorkerLane


class Hosting:
    """The workers of one process.

    Args:
        lane: takes batches; an answer reports what happened to the batch there.

    Attributes:
        idle: seconds since the last answer without anything to do, for `Answer.spent`.
    """

    def __init__(self, lane: WorkerLane) -> None:
        self.idle = 0.0
        self._lane = lane
        self._workers: dict[int, HostedWorker] = {}  # by their ids
        self._at_work: HostedWorker | None = None  # the active one, whose generators are the process's
        self._left_out: list[str] = []  # finalizers of workers that have gone
        # For `Answer.spent`, perf_counter() or seconds.
        self._free_since = 0.0  # when it had finished all its calls
        self._answered = 0.0  # when the last answer was ready
        self._sending = 0.0  # time to send it, and for what had to be done before the next task

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[HostedWorker]:
        return iter(self._workers.values())

    def get(self, worker_id: int) -> HostedWorker | None:
        """That worker, if this process hosts it."""
        return self._workers.get(worker_id)

    def add(self, worker_id: int, worker: HostedWorker) -> None:
        """This process hosts the worker from now on, and it is the active one."""
        self.remove(worker_id)
        self._switch_to(None)
        self._at_work = self._workers[worker_id] = worker

    def remove(self, worker_id: int) -> None:
        """This process no longer hosts the worker."""
        if worker_id in self._workers:
            self._workers[worker_id].end()
            with without_finalizers() as left_out:
                if self._at_work is self._workers[worker_id]:
                    self._nobody_works()
                del self._workers[worker_id]
            self._left_out += left_out

    def clear(self) -> list[str]:
        """This process hosts no worker any more: what torch's workers finalize at their end is finalized.

        Returns:
            The kinds of finalizers that were left out, after which the process must not go on.
        """
        self._end_iterators()
        finalize_at_exit()
        with without_finalizers() as left_out:
            self._workers.clear()
            self._nobody_works()
        left_out += self._left_out
        self._left_out = []
        return left_out

    def _end_iterators(self) -> None:
        for worker in self._workers.values():
            worker.end()

    def _nobody_works(self) -> None:
        self._at_work = None
        set_worker_info(None)
        nobody_reads()

    def begins(self) -> None:
        """One of the workers begins an epoch."""
        self._free_since = time.perf_counter()
        self.idle = self._sending = 0.0

    def was_idle(self) -> None:
        """There was nothing to do since `is_free`."""
        self.idle += time.perf_counter() - self._free_since

    def is_free(self) -> None:
        """The last answer was sent."""
        self._free_since = time.perf_counter()
        self._sending = self._free_since - self._answered

    def resume(self, worker_id: int, resumed: Resumed) -> WorkerState:
        """A worker begins a new epoch with the same dataset object."""
        self._switch_to(worker_id)
        state = self._workers[worker_id].resume(resumed)
        self.begins()
        return state

    def run(self, worker_id: int, task: BuildOrder, arena: ArenaWriter | None) -> Answer:
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
        tasks: Iterable[tuple[int, tuple[Any, ...], int | None]],
        dropped: Callable[[int, int], bool],
    ) -> Answer:
        """A worker rebuilds batches; see `HostedWorker.replay`."""
        self._switch_to(worker_id)
        worker = self._workers[worker_id]
        began = time.perf_counter()
        again = [BuildOrder(call, task_id, indices, again=True, digest=digest) for task_id, indices, digest in tasks]
        result = worker.replay(again, dropped)
        return self._answer(worker, result, began)

    def _answer(self, worker: HostedWorker, result: Result | None, began: float) -> Answer:
        self._answered = ended = time.perf_counter()
        seconds, lane = ended - began, self._lane
        progress, state = worker.progress, worker.snapshot_if_due(seconds)
        spent = worker.spent(ended, self.idle, self._sending)
        self.idle = self._sending = 0.0
        return Answer(result, seconds, spent, progress, state, lane.take_full(), lane.error)

    def _switch_to(self, worker_id: int | None) -> None:
        """Lets another worker of the process use its generators."""
        worker = self._workers[worker_id] if worker_id is not None else None
        if worker is self._at_work:
            return
        if self._at_work is not None:
            self._at_work.park()
        if worker is not None:
            worker.unpark()
        self._at_work = worker
