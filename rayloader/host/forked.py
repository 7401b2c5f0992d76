"""A forked worker: what a fork of the driver does to serve its line, from its first moment to its last.

Promise: the fork has the replica, the modules and all settings as they were when it was forked, and uses nothing of
the driver's besides: no line, no thread, no Ray. As torch's forked worker it ends by `os._exit`, after what
`multiprocessing` finalizes at the end of a process, and without any `__del__` or `atexit` callback.
"""

from __future__ import annotations

from rayloader.host.server import Hosting, LineServer
from rayloader.host.worker import HostedWorker
from rayloader.protocol import Replica, Setup
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.lanes import WorkerLane
from rayloader.transport.line import Line, LineSocket
from rayloader.transport.pickler import note_fork


def serve(replica: Replica, end: int) -> None:
    """Serves a line until it ends.

    Args:
        replica: the driver's own objects, as they were when it forked.
        end: the descriptor of this process's end of the line.
    """
    note_fork()
    lane = WorkerLane()
    hosting = Hosting(lane)

    def start(setup: Setup, state: WorkerState | None) -> None:
        """Becomes a worker, besides those that the process is already."""
        worker = HostedWorker(setup)
        hosting.add(setup.worker_id, worker)
        worker.start(lambda: (replica, None), state)
        hosting.begins()

    LineServer(hosting, lane, start).serve(Line(LineSocket(fileno=end)))
    hosting.end()
