"""A worker process as the driver's calls reach it: the worker that it is, and its end of a line.

Promise: what comes over the line is carried out in order, and answered; user code runs in the thread that serves. No
Ray, except for the references that an answer may carry. A fork has the replica, the modules and all settings as they
were when it was forked.

NOTE [Finalizers]. Torch's worker ends by `os._exit`: its iterator is finalized, because the function that holds it
returns, and the dataset is not. No `__del__` of it and no `atexit` callback runs: a folder that the dataset would
remove remains for the trainer. An actor's process drops the dataset and goes on, but runs no `__del__` either. The
files, mappings and memory that the objects hold are released all the same. What `multiprocessing.util.Finalize` was
given runs when the process ends in order, as in a process that `multiprocessing` has spawned.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rayloader._compat import call_at_begin_of_exit, run_finalizers, set_worker_info
from rayloader.host.shard_info import nobody_reads
from rayloader.host.worker import BuildOrder, HostedWorker
from rayloader.protocol import Answer, Down, Replica, ResultKind, Served, Setup, Up
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.lanes import WorkerLane, unpack
from rayloader.transport.line import Line, LineSocket, packed

# How often a busy process checks for new messages on its line, in seconds: it need not begin calls that were
# cancelled.
LOOK_SECONDS = 0.001
# Packages whose `__del__` only releases memory and descriptors of this process.
_HARMLESS = {"rayloader", "ray", "torch", "multiprocessing"}


class Hosting:
    """The worker of one process, and its end of a line, which it owns: carries out calls, in order, and answers.

    Not the actor's class, because Ray wraps each method of that in a function of its own, and these run for each batch.

    Args:
        opened: of a fork, which is told over its line that it is a worker: as for `HostedWorker.start`.
    """

    def __init__(self, opened: Callable[[], Replica] | None = None) -> None:
        self._opened = opened
        self._lane = WorkerLane()
        self._worker: HostedWorker | None = None
        self._line: Line | None = None
        self._calls: deque[tuple[Any, ...]] = deque()  # received over the line and not begun, oldest first
        # For `Answer.spent`, perf_counter() or seconds.
        self._looked = 0.0  # when the line was checked last
        self._free_since = 0.0  # when it had finished all its calls
        self._idle = 0.0  # since the last answer without anything to do
        self._answered = 0.0  # when the last answer was ready
        self._sending = 0.0  # time to send it, and for what had to be done before the next task

    # ---- the worker

    @property
    def worker(self) -> HostedWorker:
        """Which worker this process is."""
        assert self._worker is not None
        return self._worker

    def start(self, setup: Setup, opened: Callable[[], Replica], state: WorkerState | None) -> None:
        """This process becomes a worker, and no longer is the one that it was; see `HostedWorker.start`."""
        self.clear()
        self._worker = HostedWorker(setup)
        self._worker.start(opened, state)
        self._begins()

    def end(self) -> None:
        """What torch's worker finalizes itself at its end, its iterator, is finalized."""
        if self._worker is not None:
            self._worker.end()

    def clear(self) -> None:
        """This process is no worker any more."""
        if self._worker is not None:
            self._worker.end()
            with without_finalizers():
                self._worker = None
                set_worker_info(None)
                nobody_reads()

    def _begins(self) -> None:
        """The worker begins an epoch."""
        self._free_since = time.perf_counter()
        self._idle = self._sending = 0.0

    # ---- calls

    def was_idle(self) -> None:
        """There was nothing to do since `is_free`."""
        self._idle += time.perf_counter() - self._free_since

    def is_free(self) -> None:
        """The last answer was sent."""
        self._free_since = time.perf_counter()
        self._sending = self._free_since - self._answered

    def resume(self, resumed: Resumed) -> WorkerState:
        """The worker begins a new epoch with the same dataset object."""
        state = self.worker.resume(resumed)
        self._begins()
        return state

    def run(self, task: BuildOrder, arena: ArenaWriter | None) -> Answer:
        """Builds a batch, in the arena if there is one."""
        began = time.perf_counter()
        return self._completed(self.worker.run(task, arena), began)

    def rebuild(self, tasks: Iterable[tuple[int, tuple[Any, ...], int | None]]) -> Answer:
        """Rebuilds batches; see `HostedWorker.rebuild`."""
        began = time.perf_counter()
        again = [BuildOrder(task_id, indices, again=True, digest=digest) for task_id, indices, digest in tasks]
        answer = self.worker.rebuild(again, self.is_unwanted) or Answer(-1, ResultKind.REBUILT)
        return self._completed(answer, began)

    def _completed(self, answer: Answer, began: float) -> Answer:
        """The answer to a call that began at that time, with the news of worker and lane."""
        self._answered = ended = time.perf_counter()
        answer.seconds = ended - began
        answer.full, answer.no_arena = self._lane.take_full(), self._lane.error
        self.worker.complete(answer, ended, self._idle, self._sending)
        self._idle = self._sending = 0.0
        return answer

    # ---- over a line

    def serve(self, line: Line) -> Served:
        """Carries out over a line what `run`, `rebuild` and `resume` do, until the line ends.

        It also ends, with the line left open, if an answer has to go through Ray.
        """
        self._line = line
        while self._calls or not line.ended:
            self._attend(line)
            if not self._calls:
                continue
            kind, call, *arguments = self._calls.popleft()
            line.keep()  # see NOTE [final] in protocol.py
            if kind == Down.START:
                setup, state = arguments
                assert self._opened is not None
                self.start(setup, self._opened, state)
                line.send(packed((Up.STARTED, call, None), line.apart))
                continue
            if kind == Down.RESUME:
                resumed = self.resume(Resumed(*arguments))
                line.send(packed((Up.BEGUN, call, tuple(resumed)), line.apart))
                continue
            answer = self._do(kind, *arguments)
            if answer is None:
                continue
            if answer.wire is not None and answer.wire[2]:  # it carries references to Ray's objects
                line.drain()  # older answers come first
                self.is_free()
                return Served(answer=(call, answer.fields))
            line.send(packed((Up.ANSWER, call, answer.fields), line.apart))
            self.is_free()
        line.drain()
        self.hang_up()
        return Served(refused=line.fault)

    def _do(self, kind: int, *arguments: Any) -> Answer | None:
        """Carries out a call that came over the line; None if nobody waits for it."""
        if kind == Down.REBUILD:
            return self.rebuild(*arguments)
        task_id, indices, room = arguments
        arena = self._lane.open(room)  # it brings news of the arena, even if nobody waits for the batch
        if self.is_unwanted():
            return None
        return self.run(BuildOrder(task_id, indices), arena)

    def _attend(self, line: Line) -> None:
        """Receives from the line, waiting if there is nothing to do; sends what is unsent."""
        now = time.perf_counter()
        if self._calls:
            if now - self._looked < LOOK_SECONDS and not line.unsent:
                return
            self.take_in(line.receive())
        elif not line.ended:
            if line.unsent:
                line.wait()
            self.take_in(line.receive() if line.unsent else line.receive_next())
            self._idle += time.perf_counter() - now
        self._looked = now
        if line.unsent:
            line.flush()
        if line.ended:
            self._calls.clear()

    def take_in(self, messages: list[Any]) -> None:
        """Takes what has come over the line, or comes before it."""
        self._calls.extend(map(unpack, messages))

    def is_unwanted(self) -> bool:
        """Whether nobody waits for an answer over the line any more."""
        return self._line is not None and self._line.ended

    def hang_up(self) -> None:
        """Ends the line, and drops the calls that came over it."""
        self._calls.clear()
        line, self._line = self._line, None
        if line is not None:
            line.close()


def serve(replica: Replica, end: int) -> None:
    """What a fork of the driver does, from its first moment to its last: serves its end of a line until it ends.

    It uses nothing else of the driver's: no line, no thread, no Ray.

    Args:
        replica: the driver's own objects, as they were when it forked.
        end: the descriptor of this process's end of the line.
    """
    hosting = Hosting(lambda: replica)
    hosting.serve(Line(LineSocket(fileno=end)))
    hosting.end()


# ---- what is finalized


def exit_without_callbacks() -> None:
    """From now on this process exits without `atexit` callbacks, but with what `multiprocessing` finalizes."""
    call_at_begin_of_exit(functools.partial(_end_process, os.getpid()))


def _end_process(pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of it
        with contextlib.suppress(Exception):  # of user code
            run_finalizers()
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
