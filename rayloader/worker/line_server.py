"""The worker's end of a line: does what comes over it, in order, and answers.

Promise: nothing here is called for each batch through Ray, which wraps each method of an actor's class in a function of
its own: hence a class beside the actor's. No thread; it owns the line and the memory in which answers wait.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from rayloader.protocol import Answer, Down, Served, Up
from rayloader.state.journal import Resumed
from rayloader.transport import local_line, tcp_line
from rayloader.transport.lanes import WorkerLane, pack, unpack
from rayloader.transport.line import Line, LineError, packed
from rayloader.transport.recycled import Recycled
from rayloader.worker.hosting import Hosting
from rayloader.worker.worker import Task

# How often a process that has something to do looks what else has come over its line, in seconds: what nobody wants any
# more it need not begin.
LOOK_SECONDS = 0.001


class LineServer:
    """Of one process.

    Args:
        hosting: does what is asked.
        lane: where batches go.
    """

    def __init__(self, hosting: Hosting, lane: WorkerLane) -> None:
        self._hosting = hosting
        self._lane = lane
        self._line: Line | None = None
        self._line_address: local_line.LineAddress | tcp_line.TcpAddress | None = None
        self._copies: Recycled | None = None  # of what can't be sent at once
        self._calls: deque[tuple[Any, ...]] = deque()  # that came over the line, not begun, oldest first
        self._looked = 0.0  # perf_counter(): at what has come
        self._dropped = 0, 0, 0  # after this call and up to that nobody wants the tasks from this one on

    def serve(self, address: local_line.LineAddress | tcp_line.TcpAddress, early: list[Any]) -> Served:
        """Does over a line what `run`, `replay` and `resume` do, until the line ends.

        It also ends, with the line left open for the next `serve`, where an answer has to go through Ray. `early` are
        messages that come before those of the line.
        """
        if self._line is None or self._line_address != address:
            try:
                self._line = self._connected(address)
            except LineError as error:
                return Served(refused=str(error))
            self._line_address = address
        line = self._line
        self._take_in(early)
        while self._calls or not line.ended:
            self._attend(line)
            if not self._calls:
                continue
            kind, worker_id, call, *arguments = self._calls.popleft()
            line.keep()  # see NOTE [final] in protocol.py
            if kind == Down.RESUME:
                state = self._hosting.resume(worker_id, Resumed(*arguments))
                self._send(line, (Up.BEGUN, worker_id, call, tuple(state)))
                continue
            answer = self._do(kind, worker_id, call, *arguments)
            if answer is None:
                continue
            wire = None if answer.result is None else answer.result.wire
            fields = (None if answer.result is None else answer.result.fields, *answer.fields[1:])
            if wire is not None and wire[2]:  # references to Ray's objects
                line.drain()  # what is older comes first
                self._hosting.is_free()
                return Served(answer=pack((worker_id, call, fields), [wire]))
            self._send(line, (Up.ANSWER, worker_id, call, fields))
            self._hosting.is_free()
        line.drain()
        self.hang_up()
        return Served()

    def _do(self, kind: int, worker_id: int, call: int, *arguments: Any) -> Answer | None:
        """Carries out a call that came over the line; None if nobody wants it any more."""
        if kind == Down.REPLAY:
            (tasks,) = arguments
            return self._hosting.replay(worker_id, call, tasks, self.is_dropped)
        task_id, indices, room = arguments
        arena = self._lane.open(room)  # it brings news of the arena, whatever becomes of the task
        if self.is_dropped(call, task_id):
            return None
        return self._hosting.run(worker_id, Task(call, task_id, indices), arena)

    def _send(self, line: Line, message: tuple[Any, ...]) -> None:
        line.send(packed(message, line.apart))

    def _attend(self, line: Line) -> None:
        """Takes in what has come over the line, and waits for it if there is nothing to do; sends what is unsent."""
        now = time.perf_counter()
        if self._calls:
            if now - self._looked < LOOK_SECONDS and not line.unsent:
                return
            self._take_in(line.receive())
        elif not line.ended:
            if line.unsent:
                line.wait()
            self._take_in(line.receive() if line.unsent else line.receive_next())
            self._hosting.idle += time.perf_counter() - now
        self._looked = now
        if line.unsent:
            line.flush()
        if line.ended and line.hung_up:
            self._calls.clear()

    def _take_in(self, messages: list[Any]) -> None:
        for message in map(unpack, messages):
            if message[0] == Down.DROP:
                self._dropped = message[1:]
            else:
                self._calls.append(message)

    def is_dropped(self, call: int, task_id: int) -> bool:
        """Whether nobody wants this task any more, which came with this call."""
        after_call, up_to_call, from_task = self._dropped
        return (after_call < call <= up_to_call and task_id >= from_task) or (
            self._line is not None and self._line.ended and self._line.hung_up
        )

    def _connected(self, address: local_line.LineAddress | tcp_line.TcpAddress) -> Line:
        """A line in place of the one before, if there was one."""
        self._end_line()
        if isinstance(address, local_line.LineAddress):
            return local_line.connect(address)
        self._copies = Recycled()
        return tcp_line.connect(address, self._copies.room)

    def _end_line(self) -> None:
        line, self._line = self._line, None
        copies, self._copies = self._copies, None
        if line is not None:
            line.close()
        if copies is not None:
            copies.close()

    def hang_up(self) -> None:
        """Ends the line, and forgets what came over it."""
        self._calls.clear()
        self._end_line()
