"""Starts the fork server of a Ray that is started here, and ends it with that Ray.

Promise: where the fork server dies, worker processes start as Ray starts them: later, and no differently. Where there
can be none, on other systems than Linux, each hashes strings with a seed of its own.

NOTE [fork server]
A new worker process has to import Ray and torch, which takes 3 seconds of a core, and some 250 MB that no other process
shares. Torch's own workers are forks, which have imported everything already. The program itself cannot be forked: Ray
runs threads in it. So a process of its own, the fork server, imports torch while Ray starts, and then whatever else a
worker imports; Ray's worker processes are forks of it.

Ray starts a worker by running a script, whose path the program that starts Ray can choose: `default_worker.py` in this
folder, in place of Ray's script of that name. It connects to the fork server, and tells it what it was started with:
arguments, environment, working directory, standard streams, and what else a process inherits. The child that the fork
server then makes takes over all of that, and runs Ray's script. The process that Ray has started stays until the child
has ended, and where it is killed the child is too. Ray takes the child for its worker: that is who registers there.

What depends on the environment when it is imported would be wrong in a worker that is to have another environment, as
`ray_remote_args={"runtime_env": ...}` gives it one. Such workers become what Ray meant them to be: they import
everything themselves. The environment of the first worker counts, for it is the first that knows which Ray it belongs
to. Hence the fork server imports Ray only then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from rayloader._compat_ray import own_start
from rayloader.forkserver.default_worker import HASH_SEED, VARIABLE, is_hash_seed_chosen
from rayloader.transport.line import LineError
from rayloader.transport.local_line import LocalSocket, listen

HERE = Path(__file__).parent
# Processes that ask at the same time; others start without it.
BACKLOG = 512

logger = logging.getLogger("rayloader")

# Held while a process is started, and taken to fork this one. `Popen` waits for the end of a pipe of its own, which a
# fork that another thread makes at that moment would keep open for as long as it lives.
_starting = threading.RLock()
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def start_ray(ray: ModuleType, server: ForkServer, options: dict[str, Any]) -> None:
    """Starts a Ray whose worker processes are forks of the server's; `options` are the arguments of `ray.init`."""
    try:
        with (
            with_variables(server.environment),
            own_start(
                ray, server.worker_path, _starting, dashboard=bool(options.get("include_dashboard"))
            ) as server.ports,
        ):
            ray.init(**options)
    except BaseException:  # whatever it is, nobody else would end the fork server
        server.close()
        raise


@contextlib.contextmanager
def with_variables(variables: dict[str, str]) -> Iterator[None]:
    """Adds variables that are not yet set to this process's environment, for processes that are started meanwhile."""
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


class ForkServer:
    """Runs until `close`, or until the thread ends that has made it.

    Attributes:
        environment: for the Ray whose processes are to use it; empty without a fork server.
        worker_path: the script with which that Ray is to start its workers; None without a fork server.
        ports: sockets that keep the ports of that Ray's agents, whether there is a fork server or not.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.worker_path: str | None = None
        self.ports: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # what it has printed
        if sys.platform != "linux":
            return
        # A Ctrl-C of the terminal is the program's, from the first moment on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._start()
        except (LineError, OSError) as error:
            self.close()
            _warn(error)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # until `close`
        with LocalSocket() as listener:  # the fork server has the other copy: nobody is to wait for one that has died
            address = listen(listener, "fork-server", BACKLOG)
            alone = {} if is_hash_seed_chosen() else HASH_SEED
            with _starting:
                self._process = subprocess.Popen(
                    [sys.executable, str(HERE / "server.py"), str(listener.fileno()), str(os.getpid()), *alone],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=dict(os.environ) | alone,  # not what C code, readline's, has set: Ray's processes lack it
                    pass_fds=[listener.fileno()],
                )
        self.environment = {VARIABLE: address.name}
        self.worker_path = str(HERE / "default_worker.py")

    def check(self) -> None:
        """Says so, once, if it has died."""
        if self._process is not None and self._errors is not None and self._process.poll() is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            _warn(lines[-1] if lines else f"it has died, with exit status {self._process.returncode}")
            self._end()

    def close(self) -> None:
        """Ends it, and gives up the ports; the processes that it has made live on. Callable more than once."""
        self._end()
        self._give_up_ports()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.wait()
        if self._errors is not None:
            self._errors.close()

    def forget(self) -> None:
        """To be called in a forked child, whose child it is not."""
        self._give_up_ports()
        if self._process is not None:
            self._process.returncode = 0  # so that nobody waits for it, or warns of it
            self._process = None

    def _give_up_ports(self) -> None:
        for port in self.ports:
            port.close()


def _warn(why: object) -> None:
    logger.warning("rayloader: there is no fork server, so new worker processes start slowly: %s", why)
