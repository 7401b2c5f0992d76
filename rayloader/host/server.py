"""The worker process's end of a line: what comes over it is carried out in order, and answered.

Promise: user code runs in the thread that serves. No Ray, except for the references that an answer may carry.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rayloader.host.hosting import Hosting
from rayloader.host.worker import BuildOrder
from rayloader.protocol import Answer, Down, Served, Setup, Up
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.lanes import WorkerLane, pack, unpack
from rayloader.transport.line import Line, packed

# How often a busy process checks for new messages on its line, in seconds: it need not begin calls that were
# cancelled.
LOOK_SECONDS = 0.001

_MANAGES = Down.START, Down.HURRY, Down.LEAVE


class LineServer:
    """The process's end of a line: carries out the calls that come over it, in order, and answers.

    Not the actor's class, because Ray wraps each method of that in a function of its own, and these run for each batch.
    It owns the line.

    Args:
        hosting: carries out the calls.
        lane: takes batches.
        start: makes the process a worker, where that comes over the line: in forks.
    """

    def __init__(
        self, hosting: Hosting, lane: WorkerLane, start: Callable[[Setup, WorkerState | None], None] | None = None
    ) -> None:
        self._hosting = hosting
        self._lane = lane
        self._start = start
        self._line: Line | None = None
        self._calls: deque[tuple[Any, ...]] = deque()  # received over the line and not begun, oldest first
        self._looked = 0.0  # perf_counter(): when the line was checked last
        # Of the calls after the first number and up to the second, the tasks from the third on are cancelled.
        self._dropped = 0, 0, 0

    def serve(self, line: Line) -> Served:
        """Carries out over a line what `run`, `replay` and `resume` do, until the line ends.

        It also ends, with the line left open, if an answer has to go through Ray.
        """
        self._line = line
        while self._calls or not line.ended:
            self._attend(line)
            if not self._calls:
                continue
            kind, worker_id, call, *arguments = self._calls.popleft()
            line.keep()  # see NOTE [final] in protocol.py
            if kind in _MANAGES:
                self._manage(kind, worker_id, *arguments)
                line.send(packed((Up.MANAGED, worker_id, call, kind), line.apart))
                continue
            if kind == Down.RESUME:
                state = self._hosting.resume(worker_id, Resumed(*arguments))
                line.send(packed((Up.BEGUN, worker_id, call, tuple(state)), line.apart))
                continue
            answer = self._do(kind, worker_id, call, *arguments)
            if answer is None:
                continue
            wire = None if answer.result is None else answer.result.wire
            fields = (None if answer.result is None else answer.result.fields, *answer.fields[1:])
            if wire is not None and wire.carried:  # references to Ray's objects
                line.drain()  # older answers come first
                self._hosting.is_free()
                return Served(answer=pack((worker_id, call, fields), [wire.fields]))
            line.send(packed((Up.ANSWER, worker_id, call, fields), line.apart))
            self._hosting.is_free()
        line.drain()
        self.hang_up()
        return Served(refused=line.fault)

    def _manage(self, kind: int, worker_id: int, *arguments: Any) -> None:
        """Begins, hurries or leaves a worker."""
        if kind == Down.START:
            assert self._start is not None
            self._start(*arguments)
        elif kind == Down.HURRY:
            self._hosting.hurry(worker_id)
        else:
            self._hosting.remove(worker_id)

    def _do(self, kind: int, worker_id: int, call: int, *arguments: Any) -> Answer | None:
        """Carries out a call that came over the line; None if it was cancelled."""
        if kind == Down.REPLAY:
            (tasks,) = arguments
            return self._hosting.replay(worker_id, call, tasks, self.is_dropped)
        task_id, indices, room = arguments
        arena = self._lane.open(room)  # it brings news of the arena, even if the task is cancelled
        if self.is_dropped(call, task_id):
            return None
        return self._hosting.run(worker_id, BuildOrder(call, task_id, indices), arena)

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
            self._hosting.idle += time.perf_counter() - now
        self._looked = now
        if line.unsent:
            line.flush()
        if line.ended and line.hung_up:
            self._calls.clear()

    def take_in(self, messages: list[Any]) -> None:
        """Takes what has come over the line, or comes before it."""
        for message in map(unpack, messages):
            if message[0] == Down.DROP:
                self._dropped = message[1:]
            else:
                self._calls.append(message)

    def is_dropped(self, call: int, task_id: int) -> bool:
        """Whether this task, which came with this call, was cancelled."""
        after_call, up_to_call, from_task = self._dropped
        return (after_call < call <= up_to_call and task_id >= from_task) or (
            self._line is not None and self._line.ended and self._line.hung_up
        )

    def hang_up(self) -> None:
        """Ends the line, and drops the calls that came over it."""
        self._calls.clear()
        line, self._line = self._line, None
        if line is not None:
            line.close()
