"""The worker process: an actor that hosts one worker, or several.

Promise: user code runs in the actor's one main thread. Exceptions of user code never leave through Ray: they travel as
a `Result`. The process is warm: `stop` restores what the user's code may have changed (see `process_state.py`),
so that another epoch, or another loader, finds it as new, or says why none may have it. The actor starts no thread and
owns nothing but its process.

It gets its tasks by calls of `run`, one per task, or over a line, by a call of `serve` that lasts as long as the line
does.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

import ray

from rayloader._compat_ray import set_process_title
from rayloader.host.hosting import Hosting, exit_without_callbacks, open_files
from rayloader.host.output import WorkerOutput
from rayloader.host.worker import BuildOrder, HostedWorker
from rayloader.inherit.left_behind import end_own, own_what_is_created
from rayloader.inherit.process_state import Baseline
from rayloader.protocol import Answer, Down, Served, Setup, Source, Up, WorkerAddress, final
from rayloader.replica.image import Image, ImageAddress, image_from_contents
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.start import session
from rayloader.transport import local_line, tcp_line
from rayloader.transport.lanes import Recycled, WorkerLane, pack, unpack
from rayloader.transport.line import Line, LineError, packed
from rayloader.transport.memory_file import FileAddress, MemoryFileError, open_file, this_machine

# A batch that could be sent out of band is copied into the reply up to this size: beyond it, a copy takes longer.
IN_BAND_BYTES = 1 << 16
# Variables that Ray sets in the program and in its workers, to different values.
_OWN_VARIABLES = "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT"

logger = logging.getLogger("rayloader")

# How often a busy process checks for new messages on its line, in seconds: it need not begin calls that were
# cancelled.
LOOK_SECONDS = 0.001

Address = local_line.LineAddress | tcp_line.TcpAddress  # of a line


class WorkerProcess:
    """One actor process. Ray calls its methods one after the other, on the main thread."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in torch's worker
        exit_without_callbacks()
        own_what_is_created()
        runtime_env = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        own = {key for key in os.environ if key.startswith("RAY_") or key in _OWN_VARIABLES}
        self._baseline = Baseline(session.node_id(), own | set(runtime_env))
        lane = WorkerLane()
        self._hosting = Hosting(lane)
        self._server = LineServer(self._hosting, lane)
        self._output = WorkerOutput()
        self._context = contextvars.copy_context()  # in which user code runs; another one after `stop`
        # The image this process holds for its node, with the name of the driver's image it was copied from.
        self._image: tuple[str, Image] | None = None
        self._files: int | None = None  # how many were open after the last `stop`
        sys.breakpointhook = functools.partial(self._breakpoint, sys.breakpointhook)

    def hello(self, probe: FileAddress | None = None) -> WorkerAddress:
        """Reports where this worker runs, which also proves that it does. `probe` is a memory file of the driver's."""
        machine, reaches = "", False
        with contextlib.suppress(MemoryFileError):
            machine = this_machine()
            if probe is not None:
                os.close(open_file(probe, writable=False))
                reaches = True
        return WorkerAddress(os.getpid(), session.node_id(), socket.gethostname(), reaches, machine)

    def host(self, name: str, image: ImageAddress, contents: list[Any]) -> ImageAddress:
        """Makes an image from contents that came through Ray, for all workers of this node.

        It stays until this worker is started on another image than `name`, and longer while it is open anywhere.
        """
        self._image = None  # first: there may not be room for two
        self._image = name, image_from_contents(image, contents)
        return self._image[1].address

    def start(self, setup: Setup, source: Source, state: WorkerState | None) -> None:
        """Makes this process worker `setup.worker_id`, besides others: newly started, or as in `state`."""
        alone = not self._hosting
        if self._image is not None and self._image[0] != source.image.name:
            self._image = None
        worker = HostedWorker(setup)
        self._hosting.add(setup.worker_id, worker)
        self._output.open(setup.output, setup.process.logging)
        self._context.run(worker.start, self._baseline, self._output, source, state, alone=alone)
        self._hosting.begins()

    def resume(self, worker_id: int, *resumed: Any) -> WorkerState:
        """Begins a new epoch with the same dataset object; `resumed` are the fields of a `Resumed`."""
        return self._context.run(self._hosting.resume, worker_id, Resumed(*resumed))

    def run(self, message: Any) -> Any:
        """Builds a task's batch.

        Args:
            message: packed (worker_id, call, task_id, indices, room): `call` counts the calls of this actor, `indices`
                came from the sampler; `room`, which only a line brings, says where in this actor's arena the batch
                may lie.

        Returns:
            A packed `Answer`.
        """
        self._hosting.was_idle()
        worker_id, call, task_id, indices, _ = unpack(message)
        return self._packed(self._context.run(self._hosting.run, worker_id, BuildOrder(call, task_id, indices), None))

    def replay(self, message: Any) -> Any:
        """Rebuilds batches for their effect on the worker, in order, for a limited time; they are not sent.

        Args:
            message: packed (worker_id, call, tasks), with task_id, indices and digest of each task: its batch must have
                that digest, if one is known. Without tasks it continues with those that are left over.

        Returns:
            A packed `Answer`, which reports the progress.
        """
        worker_id, call, tasks = unpack(message)
        answer = self._context.run(self._hosting.replay, worker_id, call, tasks, self._server.is_dropped)
        return self._packed(answer)

    def _packed(self, answer: Answer) -> Any:
        result, wires = answer.result, []
        if result is not None:
            travels = final(result, IN_BAND_BYTES)
            wires = [] if result.wire is None or isinstance(travels, bytes) else [result.wire.fields]
            answer = answer._replace(result=travels)
        packed = pack(answer, wires)
        self._hosting.is_free()
        return packed

    def serve(self, address: Address, early: list[Any]) -> Served:
        """Carries out `run`, `replay` and `resume` over a line, until the line ends; see `LineServer.serve`."""
        set_process_title(ray, f"ray::rayloader:{','.join(worker.label for worker in self._hosting)}")
        return self._context.run(self._server.serve, address, early)

    def _breakpoint(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """For `breakpoint()` in user code: the terminal belongs to the program."""
        logger.warning(
            "rayloader: breakpoint() in a worker process, which has no terminal. Debug with num_workers=0, which loads "
            "in the program itself; or install debugpy and attach Ray's distributed debugger to process %d",
            os.getpid(),
        )
        sys.breakpointhook = hook  # this is logged once
        return hook(*args, **kwargs)

    def hurry(self, worker_id: int) -> None:
        """Another process will soon be that worker."""
        if (worker := self._hosting.get(worker_id)) is not None:
            worker.hurry()

    def leave(self, worker_id: int) -> None:
        """This process is no longer that worker; another one is."""
        self._hosting.remove(worker_id)

    def stop(self) -> str:
        """Drops the dataset and restores the process.

        Returns:
            Why it must end instead of working for another epoch, in words; empty if it may.
        """
        self._server.hang_up()
        left_out = self._hosting.clear()
        left_behind = [*left_out, end_own(), self._baseline.restore()]
        self._context = contextvars.copy_context()
        self._output.close()
        files = open_files()
        if self._files is not None and files > self._files:
            left_behind.append("files that it keeps open")
        self._files = files
        return next(filter(None, left_behind), "")


class LineServer:
    """The process's end of a line: carries out the calls that come over it, in order, and answers.

    Not the actor's class, because Ray wraps each method of that in a function of its own, and these run for each batch.
    It owns the line and the memory for queued answers.

    Args:
        hosting: carries out the calls.
        lane: takes batches.
    """

    def __init__(self, hosting: Hosting, lane: WorkerLane) -> None:
        self._hosting = hosting
        self._lane = lane
        self._line: Line | None = None
        self._line_address: Address | None = None
        self._copies: Recycled | None = None  # of data that cannot be sent at once
        self._calls: deque[tuple[Any, ...]] = deque()  # received over the line and not begun, oldest first
        self._looked = 0.0  # perf_counter(): when the line was checked last
        # Of the calls after the first number and up to the second, the tasks from the third on are cancelled.
        self._dropped = 0, 0, 0

    def serve(self, address: Address, early: list[Any]) -> Served:
        """Carries out over a line what `run`, `replay` and `resume` do, until the line ends.

        It also ends, with the line left open for the next `serve`, if an answer has to go through Ray. `early` are
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
        return Served()

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
        """Whether this task, which came with this call, was cancelled."""
        after_call, up_to_call, from_task = self._dropped
        return (after_call < call <= up_to_call and task_id >= from_task) or (
            self._line is not None and self._line.ended and self._line.hung_up
        )

    def _connected(self, address: Address) -> Line:
        """A line that replaces the previous one, if there was one."""
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
        """Ends the line, and drops the calls that came over it."""
        self._calls.clear()
        self._end_line()
