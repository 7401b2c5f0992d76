"""The workers that one process hosts: which of them is active, what an answer reports, and how they end.

Promise: only the active worker uses the process's random generators. No Ray, and no channel.

NOTE [Finalizers]. Torch's worker ends by `os._exit`: its iterator is finalized, because the function that holds it
returns, and the dataset is not. No `__del__` of it and no `atexit` callback runs: a folder that the dataset would
remove remains for the trainer. An actor's process drops the dataset and goes on, but runs no `__del__` either. The
files, mappings and memory that the objects hold are released all the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rayloader._compat import call_at_begin_of_exit, set_worker_info
from rayloader.host.shard_info import nobody_reads
from rayloader.host.worker import BuildOrder, HostedWorker
from rayloader.protocol import Answer, Result
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.lanes import WorkerLane

# Packages whose `__del__` only releases memory and descriptors of this process.
_HARMLESS = {"rayloader", "ray", "torch", "multiprocessing"}


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
        # For `Answer.spent`, perf_counter() or seconds.
        self._free_since = 0.0  # when it had finished all its calls
        self._answered = 0.0  # when the last answer was ready
        self._sending = 0.0  # time to send it, and for what had to be done before the next task

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[HostedWorker]:
        return iter(self._workers.values())

    def hurry(self, worker_id: int) -> None:
        """Another process will soon be that worker."""
        if worker_id in self._workers:
            self._workers[worker_id].hurry()

    def add(self, worker_id: int, worker: HostedWorker) -> None:
        """This process hosts the worker from now on, and it is the active one."""
        self.remove(worker_id)
        self._switch_to(None)
        for other in list(self._workers.values())[:1]:
            other.rewind_modules()
        self._at_work = self._workers[worker_id] = worker

    def remove(self, worker_id: int) -> None:
        """This process no longer hosts the worker."""
        if worker_id in self._workers:
            self._workers[worker_id].end()
            with without_finalizers():
                if self._at_work is self._workers[worker_id]:
                    self._nobody_works()
                del self._workers[worker_id]

    def end(self) -> None:
        """What torch's worker finalizes itself at its end, its iterator, is finalized."""
        for worker_id in self._workers:  # no variable may keep a worker: `clear` drops it
            self._workers[worker_id].end()

    def clear(self) -> None:
        """This process hosts no worker any more."""
        self.end()
        with without_finalizers():
            self._workers.clear()
            self._nobody_works()

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


# ---- what is finalized


def exit_without_callbacks() -> None:
    """From now on this process exits without `atexit` callbacks and finalizers."""
    call_at_begin_of_exit(functools.partial(_end_process, os.getpid()))


def _end_process(pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of it
        with contextlib.suppress(Exception):  # what user code has put there
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


@contextlib.contextmanager
def without_finalizers() -> Iterator[None]:
    """No `__del__` in Python runs of what is dropped in this block, or was garbage before."""
    methods = list(_methods())
    for kind, _ in methods:
        type.__setattr__(kind, "__del__", _nothing)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # files that are not closed explicitly
            yield
            gc.collect()
    finally:
        for kind, method in methods:
            type.__setattr__(kind, "__del__", method)


def _methods() -> Iterator[tuple[type, Any]]:
    """The classes of objects that have come since `gc.freeze`, and of their bases, with a `__del__` in Python."""
    kinds = {base for kind in set(map(type, gc.get_objects())) for base in kind.__mro__}
    for kind in kinds:
        method = vars(kind).get("__del__")
        if method is None or isinstance(method, types.WrapperDescriptorType):  # in C
            continue
        if kind.__module__.partition(".")[0] not in _HARMLESS:
            yield kind, method


def _nothing(_: object) -> None:
    pass
