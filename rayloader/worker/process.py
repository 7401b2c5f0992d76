"""The worker process: an actor that hosts one worker, or several.

Promise: user code runs in the actor's one main thread. Nothing that user code raises leaves through Ray: it travels as
a `Result`. The process is warm: `stop` puts back what the user's code may have changed of it (see `process_state.py`),
so that another epoch, or another loader, finds it as new. The actor starts no thread and owns nothing but its process.

It is told its tasks by calls of `run`, one a task, or over a line by a call of `serve` that lasts as long as the line
does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import socket
import sys
import time
from collections import deque
from typing import Any

import ray

from rayloader import session
from rayloader._compat import set_worker_info
from rayloader._compat_ray import set_process_title
from rayloader.protocol import (
    Answer,
    Down,
    Result,
    Served,
    Setup,
    Source,
    Up,
    WorkerAddress,
    final,
)
from rayloader.replica.image import Image, image_from_contents
from rayloader.replica.opening import ImageAddress
from rayloader.shard_info import nobody_reads
from rayloader.state.journal import Resumed
from rayloader.state.living_generators import freeze, note_modules
from rayloader.state.process_state import Baseline
from rayloader.state.snapshot import WorkerState
from rayloader.transport import local_line, sqlite_handle, tcp_line
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.lanes import Wire, WorkerLane, pack, unpack
from rayloader.transport.line import Line, LineError, packed
from rayloader.transport.memory_file import FileAddress, MemoryFileError, open_file, this_machine
from rayloader.transport.recycled import Recycled
from rayloader.worker.output import Output
from rayloader.worker.worker import Task, Worker

# How often a process that has something to do looks what else has come over its line, in seconds: what nobody wants any
# more it need not begin.
LOOK_SECONDS = 0.001
# What is copied into the reply at most of a batch that could be sent out of band: that takes Ray longer than a copy.
IN_BAND_BYTES = 1 << 16
# Variables that Ray sets in the program and in its workers, to different values.
_OWN_VARIABLES = "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT"

logger = logging.getLogger("rayloader")


class WorkerProcess:
    """One actor process. Ray calls its methods one after the other, on the main thread."""

    def __init__(self) -> None:
        runtime_env = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        own = {key for key in os.environ if key.startswith("RAY_") or key in _OWN_VARIABLES}
        self._baseline = Baseline(session.node_id(), own | set(runtime_env))
        self._hosted: dict[int, Worker] = {}  # by worker
        self._at_work: Worker | None = None  # whose generators are the process's
        self._lane = WorkerLane()
        self._output = Output()
        self._line: Line | None = None
        self._line_address: local_line.LineAddress | tcp_line.TcpAddress | None = None
        self._copies: Recycled | None = None  # of what can't be sent at once
        self._calls: deque[tuple[Any, ...]] = deque()  # that came over the line, not begun, oldest first
        self._looked = 0.0  # perf_counter(): at what has come
        self._dropped = 0, 0, 0  # after this call and up to that nobody wants the tasks from this one on
        # For `Answer.spent`, in seconds.
        self._free_since = 0.0  # perf_counter(): it has done all that it was told
        self._idle = 0.0  # since the last answer
        self._answered = 0.0  # perf_counter(): the last answer was ready
        self._sending = 0.0  # it, and what had to be done before the next task
        self._image: tuple[str, Image] | None = None  # that this worker hosts for its node; of what image
        note_modules()
        sys.breakpointhook = functools.partial(self._breakpoint, sys.breakpointhook)

    def hello(self, probe: FileAddress | None = None) -> WorkerAddress:
        """Where this worker runs; also the proof that it does. `probe` is a memory file of the driver's."""
        machine, reaches = "", False
        with contextlib.suppress(MemoryFileError):
            machine = this_machine()
            if probe is not None:
                os.close(open_file(probe, writable=False))
                reaches = True
        return WorkerAddress(os.getpid(), session.node_id(), socket.gethostname(), reaches, machine)

    def host(self, name: str, image: ImageAddress, contents: list[Any]) -> ImageAddress:
        """Makes an image of what came through Ray, for all workers of this node.

        It stays until this worker is started on another image than `name`, and longer where it is open.
        """
        self._image = None  # first: for two there may be no room
        self._image = name, image_from_contents(image, contents)
        return self._image[1].address

    def start(self, setup: Setup, source: Source, state: WorkerState | None) -> None:
        """Makes this process worker `setup.worker_id`, beside those that it is; at its start, or as it was."""
        alone = not self._hosted
        if alone:
            freeze()  # neither `stop` nor the search for generators looks at what is here by now
        if self._image is not None and self._image[0] != source.image.name:
            self._image = None
        self._switch_to(None)
        hosted = self._at_work = self._hosted[setup.worker_id] = Worker(setup)
        self._output.open(setup.output, setup.process.logging)
        hosted.start(self._baseline, self._output, source, state, alone=alone)
        self._begins()

    def resume(self, worker_id: int, *resumed: Any) -> WorkerState:
        """Begins a new epoch with the same dataset object; `resumed` are the fields of a `Resumed`."""
        self._switch_to(worker_id)
        state = self._hosted[worker_id].resume(Resumed(*resumed))
        self._begins()
        return state

    def run(self, message: Any) -> Any:
        """Builds a task's batch.

        Args:
            message: packed (worker_id, call, task_id, indices, room): `call` counts the calls of this actor, `indices`
                is what the sampler gave; `room`, which only a line brings, says where in this actor's arena the batch
                may lie.

        Returns:
            A packed `Answer`.
        """
        self._idle += time.perf_counter() - self._free_since
        worker_id, call, task_id, indices, _ = unpack(message)
        return self._packed(self._run(worker_id, Task(call, task_id, indices), None))

    def replay(self, message: Any) -> Any:
        """Builds batches for what that changes in the worker, in order, for a while; they are not sent.

        Args:
            message: packed (worker_id, call, tasks), with task_id, indices and digest of each task: it must be the
                batch of that digest, if one is known. Without tasks it goes on with those that are left over.

        Returns:
            A packed `Answer`, which says how far it is.
        """
        worker_id, call, tasks = unpack(message)
        return self._packed(self._replay(worker_id, call, tasks))

    def _packed(self, answer: Answer) -> Any:
        result, wires = answer.result, []
        if result is not None:
            travels = final(result, IN_BAND_BYTES)
            wires = [] if result.wire is None or isinstance(travels, bytes) else [result.wire]
            answer = answer._replace(result=travels)
        packed = pack(answer, wires)
        self._is_free()
        return packed

    def _run(self, worker_id: int, task: Task, arena: ArenaWriter | None) -> Answer:
        self._switch_to(worker_id)
        hosted = self._hosted[worker_id]
        began = time.perf_counter()
        result = hosted.run(task, arena)
        return self._answer(hosted, result, began)

    def _replay(self, worker_id: int, call: int, tasks: list[tuple[int, Wire, int | None]]) -> Answer:
        self._switch_to(worker_id)
        hosted = self._hosted[worker_id]
        began = time.perf_counter()
        again = [Task(call, task_id, indices, again=True, digest=digest) for task_id, indices, digest in tasks]
        result = hosted.replay(again, self._is_dropped)
        return self._answer(hosted, result, began)

    def _answer(self, hosted: Worker, result: Result | None, began: float) -> Answer:
        self._answered = ended = time.perf_counter()
        seconds, lane = ended - began, self._lane
        progress, doubt, state = hosted.progress, hosted.take_doubt(), hosted.snapshot_if_due(seconds)
        spent = hosted.spent(ended, self._idle, self._sending)
        self._idle = self._sending = 0.0
        return Answer(result, seconds, spent, progress, doubt, state, lane.take_full(), lane.error)

    def _begins(self) -> None:
        """An epoch, for one of the workers."""
        self._free_since = time.perf_counter()
        self._idle = self._sending = 0.0

    def _is_free(self) -> None:
        """The last answer is on its way."""
        self._free_since = time.perf_counter()
        self._sending = self._free_since - self._answered

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
        set_process_title(ray, f"ray::rayloader:{','.join(worker.label for worker in self._hosted.values())}")
        self._take_in(early)
        while self._calls or not line.ended:
            self._attend(line)
            if not self._calls:
                continue
            kind, worker_id, call, *arguments = self._calls.popleft()
            line.keep()  # see NOTE [final] in protocol.py
            if kind == Down.RESUME:
                self._send(line, (Up.BEGUN, worker_id, call, tuple(self.resume(worker_id, *arguments))))
                continue
            answer = self._do(kind, worker_id, call, *arguments)
            if answer is None:
                continue
            wire = None if answer.result is None else answer.result.wire
            fields = (None if answer.result is None else answer.result.fields, *answer.fields[1:])
            if wire is not None and wire[2]:  # references to Ray's objects
                line.drain()  # what is older comes first
                self._is_free()
                return Served(answer=pack((worker_id, call, fields), [wire]))
            self._send(line, (Up.ANSWER, worker_id, call, fields))
            self._is_free()
        line.drain()
        self._hang_up()
        return Served()

    def _do(self, kind: int, worker_id: int, call: int, *arguments: Any) -> Answer | None:
        """Carries out a call that came over the line; None if nobody wants it any more."""
        if kind == Down.REPLAY:
            return self._replay(worker_id, call, *arguments)
        task_id, indices, room = arguments
        arena = self._lane.open(room)  # it brings news of the arena, whatever becomes of the task
        if self._is_dropped(call, task_id):
            return None
        return self._run(worker_id, Task(call, task_id, indices), arena)

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
            self._idle += time.perf_counter() - now
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

    def _is_dropped(self, call: int, task_id: int) -> bool:
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

    def _hang_up(self) -> None:
        self._calls.clear()
        self._end_line()

    def _breakpoint(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """For `breakpoint()` in user code: the terminal is the program's."""
        logger.warning(
            "rayloader: breakpoint() in a worker process, which has no terminal. Debug with num_workers=0, which loads "
            "in the program itself; or install debugpy and attach Ray's distributed debugger to process %d",
            os.getpid(),
        )
        sys.breakpointhook = hook  # this is said once
        return hook(*args, **kwargs)

    def hurry(self, worker_id: int) -> None:
        """Another process will be that worker soon."""
        if (hosted := self._hosted.get(worker_id)) is not None:
            hosted.hurry()

    def leave(self, worker_id: int) -> None:
        """This process is that worker no longer; another one is."""
        if self._at_work is self._hosted.pop(worker_id, None):
            self._at_work = None

    def stop(self) -> None:
        """Lets go of the dataset and puts the process back as it was."""
        self._hang_up()
        self._hosted.clear()
        self._at_work = None
        set_worker_info(None)
        nobody_reads()
        self._baseline.restore()
        sqlite_handle.unregister()
        self._output.close()
        gc.collect()

    def _switch_to(self, worker_id: int | None) -> None:
        """Workers of one process take turns with its generators."""
        hosted = self._hosted[worker_id] if worker_id is not None else None
        if hosted is self._at_work:
            return
        if self._at_work is not None:
            self._at_work.park()
        if hosted is not None:
            hosted.unpark()
        self._at_work = hosted
