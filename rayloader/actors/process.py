"""The worker process: an actor that is one worker at a time.

Promise: user code runs in the actor's one main thread. Exceptions of user code never leave through Ray: they travel as
an `Answer`. The process is warm: `stop` drops the dataset, without its `__del__`, and another epoch or another loader
goes on in the process as user code has left it, with the modules that it has imported. The actor starts no thread and
owns nothing but its process.

Of the trainer's process it has what Ray sends: the replica, what that names in `__main__` by value, and the folders in
which the trainer finds modules. It imports these itself, as a worker does that `multiprocessing` spawns.

It gets its tasks by calls of `run`, one per task, or over a line, by a call of `serve` that lasts as long as the line
does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import sys
from typing import Any

import ray
from ray.exceptions import RayError
from typing_extensions import override

from rayloader._compat import (
    Identity,
    end_tracker,
    keep_freed_memory,
    run_finalizers,
    take_identity,
)
from rayloader.actors import session, tcp_line
from rayloader.actors.image import Image, ImageAddress, Source, decode_replica, image_from_content, open_image
from rayloader.errors import ReplicaMemoryError
from rayloader.host.server import Hosting, exit_without_callbacks
from rayloader.host.worker import BuildOrder
from rayloader.protocol import Answer, Replica, Served, Setup, WorkerAddress, final
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.lanes import Recycled, unpack
from rayloader.transport.line import LineAddress, LineError
from rayloader.transport.line import connect as connect_here
from rayloader.transport.memory_file import FileAddress, MemoryFileError, open_file, this_machine

# A batch that could be sent out of band is copied into the reply up to this size: beyond it, a copy takes longer.
IN_BAND_BYTES = 1 << 16

Address = LineAddress | tcp_line.TcpAddress  # of a line


class ActorHosting(Hosting):
    """The worker of an actor, and its end of a line, to which it connects; with the memory for queued answers."""

    _address: Address | None = None
    _copies: Recycled | None = None  # of data that cannot be sent at once

    def connect(self, address: Address, early: list[Any]) -> Served:
        """Connects to a line and serves it until it ends, or continues to serve the one that is still open.

        `early` are messages that come before those of the line.
        """
        line = self._line
        if line is None or self._address != address:
            self.hang_up()
            try:
                if isinstance(address, LineAddress):
                    line = connect_here(address)
                else:
                    self._copies = Recycled()
                    line = tcp_line.connect(address, self._copies.room)
            except LineError as error:
                return Served(refused=str(error))
            self._address = address
        self.take_in(early)
        return self.serve(line)

    @override
    def hang_up(self) -> None:
        super().hang_up()
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()


class WorkerProcess:
    """One actor process. Ray calls its methods one after the other, on the main thread."""

    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in torch's worker
        # A Ctrl-C in the terminal is for the program. It is not ignored, nor blocked as Ray does it: what user code
        # starts would have that from here, and could not be ended by it.
        signal.signal(signal.SIGINT, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # Out of the process group that Ray has given this process: if that is killed, Ray kills the group, and with it
        # the resource tracker, before this has removed the shared memory that user code has created.
        with contextlib.suppress(OSError):
            os.setpgid(0, os.getpgid(os.getppid()))
        keep_freed_memory()
        exit_without_callbacks()
        self._hosting = ActorHosting()
        # The image this process holds for its node, with the name of the driver's image it was copied from.
        self._image: tuple[str, Image] | None = None

    def hello(self, probe: FileAddress | None = None) -> WorkerAddress:
        """Reports where this worker runs, which also proves that it does. `probe` is a memory file of the driver's."""
        machine, reaches = "", False
        with contextlib.suppress(MemoryFileError):
            machine = this_machine()
            if probe is not None:
                os.close(open_file(probe, writable=False))
                reaches = True
        return WorkerAddress(os.getpid(), session.node_id(), socket.gethostname(), reaches, machine)

    def host(self, name: str, image: ImageAddress, content: Any) -> ImageAddress:
        """Makes an image from content that came through Ray, for all workers of this node.

        It stays until this worker is started on another image than `name`, and longer while it is open anywhere.
        """
        self._image = None  # first: there may not be room for two
        self._image = name, image_from_content(image, content)
        return self._image[1].address

    def start(self, setup: Setup, source: Source, state: WorkerState | None, identity: Identity) -> None:
        """Makes this process worker `setup.worker_id`: newly started, or as in `state`.

        For user code it is a new process, with an identity of its own, whatever it was before.
        """
        take_identity(identity)
        if self._image is not None and self._image[0] != source.image.name:
            self._image = None
        self._hosting.start(setup, functools.partial(_opened, source), state)

    def resume(self, *resumed: Any) -> WorkerState:
        """Begins a new epoch with the same dataset object; `resumed` are the fields of a `Resumed`."""
        return self._hosting.resume(Resumed(*resumed))

    def run(self, message: Any) -> Any:
        """Builds a task's batch.

        Args:
            message: packed (call, task_id, indices, room): `call` counts the calls of this actor, `indices`
                came from the sampler; `room`, which only a line brings, says where in this actor's arena the batch
                may lie.

        Returns:
            An `Answer`, see `final`.
        """
        self._hosting.was_idle()
        _, task_id, indices, _ = unpack(message)
        return self._packed(self._hosting.run(BuildOrder(task_id, indices), None))

    def rebuild(self, message: Any) -> Any:
        """Rebuilds batches for their effect on the worker, in order, for a limited time; they are not sent.

        Args:
            message: packed (call, tasks), with task_id, indices and digest of each task: its batch must have
                that digest, if one is known. Without tasks it continues with those that are left over.

        Returns:
            An `Answer`, see `final`, which reports the progress.
        """
        _, tasks = unpack(message)
        return self._packed(self._hosting.rebuild(tasks))

    def _packed(self, answer: Answer) -> Any:
        packed = final(answer, IN_BAND_BYTES)
        self._hosting.is_free()
        return packed

    def serve(self, address: Address, early: list[Any]) -> Served:
        """Carries out `run`, `rebuild` and `resume` over a line; see `ActorHosting.connect`."""
        return self._hosting.connect(address, early)

    def stop(self) -> None:
        """Drops the dataset."""
        self._hosting.hang_up()
        self._hosting.clear()

    def end(self) -> None:
        """Finalizes what user code has left to the end of the process, which is killed then, with its children."""
        run_finalizers()
        end_tracker()


def _nothing(*_: object) -> None:
    pass


def _opened(source: Source) -> Replica:
    """The replica.

    What exists before it is frozen: the collection when it is dropped need not look at that, least of all at what its
    modules hold, which may take longer than an epoch.
    """
    sys.path[:] = [*source.sys_path, *(entry for entry in sys.path if entry not in source.sys_path)]
    gc.freeze()
    skeleton, buffers = _open_replica(source)
    replica: Replica = decode_replica(skeleton, buffers, source.carried)
    return replica


def _open_replica(source: Source) -> Any:
    """Opens the replica's bytes: from the driver's image, from this node's own, or a copy if neither can be opened."""
    here = source.node_id == session.node_id()
    if source.content is None or source.hosted is None:
        return open_image(source.image, here=here)
    try:
        return open_image(ray.get(source.hosted[0]), here=here)
    except ReplicaMemoryError:
        raise  # there is no room for one image, so there is none for a copy in each worker
    except (RayError, MemoryFileError):  # the host died, or its memory may not be opened
        if source.content[0] is None:
            raise
        return open_image(source.image, here=here, content=ray.get(source.content[0]))
