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
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from typing import Any

import ray
from ray.exceptions import RayError

from rayloader._compat_ray import set_process_title
from rayloader.errors import ReplicaMemoryError
from rayloader.host.hosting import Hosting, exit_without_callbacks, open_files
from rayloader.host.output import WorkerOutput
from rayloader.host.server import Address, LineServer
from rayloader.host.worker import BuildOrder, HostedWorker
from rayloader.inherit.left_behind import end_own, own_what_is_created
from rayloader.inherit.process_state import Baseline
from rayloader.protocol import Answer, Replica, Served, Setup, Source, WorkerAddress, final
from rayloader.random.generators import noting
from rayloader.replica.image import Image, ImageAddress, decode_replica, image_from_contents, open_image
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.start import session
from rayloader.transport import codec
from rayloader.transport.lanes import WorkerLane, pack, unpack
from rayloader.transport.memory_file import FileAddress, MemoryFileError, open_file, this_machine

# A batch that could be sent out of band is copied into the reply up to this size: beyond it, a copy takes longer.
IN_BAND_BYTES = 1 << 16
# Variables that Ray sets in the program and in its workers, to different values.
_OWN_VARIABLES = "CUDA_VISIBLE_DEVICES", "PYTHONBREAKPOINT"

logger = logging.getLogger("rayloader")


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
        self._output.open(source.output, source.process.logging)
        self._context.run(worker.start, functools.partial(self._opened, source, alone=alone), state)
        self._hosting.begins()

    def _opened(self, source: Source, *, alone: bool) -> tuple[Replica, list[Any]]:
        """The replica and the generators in it, in a process that has become what a fork of the driver is.

        If no other worker of the process has one, what exists before it is frozen: the collection when it is dropped
        need not look at that, least of all at what its modules hold, which may take longer than an epoch.
        """
        baseline = self._baseline
        baseline.adopt(source.process, alone=alone)
        # As after a fork: the program has already imported these modules and created these objects.
        with noting() as noted, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if alone:
                gc.freeze()
            skeleton, buffers = _open_replica(source, here=source.process.node_id == session.node_id())
            with baseline.importing(), contextlib.suppress(Exception):  # decoding imports it again, and raises
                codec.import_modules(skeleton)
            if alone:
                gc.freeze()
            with baseline.importing():
                replica: Replica = decode_replica(skeleton, buffers, source.carried)
        self._output.settle()
        return replica, noted

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
        return self._context.run(self._server.connect, address, early)

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
        self._hosting.hurry(worker_id)

    def failure(self, worker_id: int) -> str:
        """Why that worker cannot build what it was told to; an empty text if it can."""
        return self._hosting.failure(worker_id)

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


def _open_replica(source: Source, *, here: bool) -> Any:
    """Opens the replica's bytes: from the driver's image, from this node's own, or a copy if neither can be opened."""
    if source.contents is None or source.hosted is None:
        opened = open_image(source.image, here=here)
    else:
        try:
            opened = open_image(ray.get(source.hosted[0]), here=here)
        except ReplicaMemoryError:
            raise  # there is no room for one image, so there is none for a copy in each worker
        except (RayError, MemoryFileError):  # the host died, or its memory may not be opened
            if source.contents[0] is None:
                raise
            opened = open_image(source.image, here=here, contents=ray.get(source.contents[0]))
    return opened
