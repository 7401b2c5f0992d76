"""A forked worker: what a fork of the driver does to serve its line, from its first moment to its last.

Promise: the fork has the replica, the modules and all settings as they were when it was forked, and uses nothing of
the driver's besides: no line, no thread, no Ray. As torch's forked worker it ends by `os._exit`, after what
`multiprocessing` finalizes at the end of a process, and without any `__del__` or `atexit` callback.
"""

from __future__ import annotations

from rayloader.host.hosting import Hosting
from rayloader.host.server import LineServer
from rayloader.host.worker import HostedWorker
from rayloader.protocol import Replica, Setup
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.lanes import WorkerLane
from rayloader.transport.local_line import LineAddress


class ForkedProcess:
    """The process of a fork.

    Args:
        replica: the driver's own objects, as they were when it forked.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        lane = WorkerLane()
        self._hosting = Hosting(lane)
        self._server = LineServer(self._hosting, lane, self._start)

    def serve(self, address: LineAddress, early: list[bytes]) -> None:
        """Serves the line until it ends; `early` are messages that come before those of the line."""
        self._server.serve(address, early)
        self._hosting.end()

    def _start(self, setup: Setup, state: WorkerState | None) -> None:
        """Becomes a worker, besides those that it is already."""
        worker = HostedWorker(setup)
        self._hosting.add(setup.worker_id, worker)
        worker.start(self._opened, state)
        self._hosting.begins()

    def _opened(self) -> tuple[Replica, None]:
        return self._replica, None
