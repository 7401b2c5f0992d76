"""Starts the fork server of a Ray that this process starts, and ends it with that Ray.

Promise: if the fork server dies, Ray starts worker processes as usual: later, but no differently. Where there
is none, on systems other than Linux, each worker hashes strings with a seed of its own.

NOTE [fork server]
A new worker process has to import Ray and torch, which takes 3 seconds of a core, and memory that it shares with no
other process. Torch's own workers are forks, which have imported everything already. The program itself cannot be
forked, because Ray runs threads in it. So a separate process, the fork server, imports torch while Ray starts, and then
whatever else a worker imports; Ray's worker processes are forks of it. Measured on two cores (docs/decisions.md): with
2 actors it saves a third of the CPU time until the first batch; with 16 it halves the time until all run, and all
processes together take 1.3 GB instead of 3.7.

Ray starts a worker by running a script, whose path the program that starts Ray can choose: `default_worker.py` in this
folder, in place of Ray's script of the same name. It connects to the fork server, and sends what it was started with:
arguments, environment, working directory, standard streams, and everything else that a process inherits. The fork
takes over all of that, and runs Ray's script. The process that Ray has started stays until the fork
has ended, and if it is killed, so is the fork. To Ray the fork is its worker, because it is the one that registers.

Modules that depend on the environment at import would be wrong in a worker with another environment, such as
`ray_remote_args={"runtime_env": ...}` sets. Such workers become what Ray meant them to be: they import
everything themselves. The environment of the first worker counts, because only that worker knows which Ray it belongs
to. That is why the fork server imports Ray only then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from rayloader.actors._compat_ray import can_choose_workers, own_start
from rayloader.actors.default_worker import HASH_SEED, MADE, REPORT, SERVE, VARIABLE, is_hash_seed_chosen
from rayloader.errors import RaySessionError
from rayloader.interrupts import new_lock
from rayloader.transport.line import LineError, LineSocket
from rayloader.transport.local_line import listen

SCRIPT = str(Path(__file__).with_name("default_worker.py"))
# Processes that connect at the same time; others start without the fork server.
BACKLOG = 512
# How many seconds the fork server may take to report an end that Ray has noticed already, and how many reports are read
# at once.
REPORT_PATIENCE_S = 1.0
AT_ONCE = 512

logger = logging.getLogger("rayloader")

# Held while a process is started, and while this one forks. `Popen` waits for the end of a pipe of its own, which a
# fork that another thread makes at that moment would keep open for as long as it lives.
starting = new_lock()
os.register_at_fork(before=starting.acquire, after_in_parent=starting.release, after_in_child=starting.release)


def start_ray(ray: ModuleType, server: ForkServer, options: dict[str, Any]) -> None:
    """Starts a Ray whose worker processes are forks of the server's; `options` are the arguments of `ray.init`.

    Raises:
        RaySessionError: the folder of its object store cannot be written to. Ray would wait for its start for minutes.
    """
    try:
        folder = options.get("_plasma_directory") or "/dev/shm"
        if sys.platform == "linux" and not os.access(folder, os.W_OK | os.X_OK):
            raise RaySessionError(
                f"Ray keeps its objects in {folder}, where this program may not write; mount it so that it may, or "
                'name another folder, at some cost of speed: rayloader.init(_plasma_directory="/tmp")'
            )
        if not can_choose_workers(ray):
            server.give_up()
        with (
            with_variables(server.environment),
            own_start(
                ray,
                server.worker_path,
                starting,
                dashboard=bool(options.get("include_dashboard")),
                local="_node_ip_address" not in options,
            ) as server.ports,
        ):
            ray.init(**options)
    except BaseException:  # any error: no other code would end the fork server
        server.close()
        raise


@contextlib.contextmanager
def with_variables(variables: dict[str, str]) -> Iterator[None]:
    """Adds variables that are not set to this process's environment, for processes started meanwhile."""
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


class ExitReports:
    """What a fork server reports of the ends of its forks.

    Args:
        descriptor: from which to read, owned by this object; None: there is no fork server.
    """

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor = descriptor
        self._reading = new_lock()
        self._reports: dict[int, int] = {}  # the last one on each process

    def exit_status(self, pid: int) -> int | None:
        """How a fork has ended, as `os.waitpid` says; None if it lives, or if this process is no fork of the server's.

        Ray may have noticed the end first, so this waits for a limited time.
        """
        until = time.monotonic() + REPORT_PATIENCE_S
        with self._reading:
            while self._read(0.0) or (self._reports.get(pid) == MADE and self._read(until - time.monotonic())):
                pass
            status = self._reports.get(pid, MADE)
        return None if status == MADE else status

    def _read(self, timeout: float) -> bool:
        """Waits for reports; False if none has come."""
        descriptor = self.descriptor
        if descriptor is None:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, timeout) * 1000):
            return False
        reports = os.read(descriptor, AT_ONCE * REPORT.size)
        self._reports.update(REPORT.iter_unpack(reports))
        return bool(reports)

    def close(self) -> None:
        """Reads nothing more; callable more than once."""
        with self._reading:
            descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class ForkServer:
    """Runs until `close`, or until the thread that created it ends.

    Attributes:
        reports: on its forks.
        environment: for the Ray whose processes are to use it; empty without a fork server.
        worker_path: the script with which that Ray starts its workers; None without a fork server.
        ports: sockets that reserve the ports of that Ray's agents, with or without a fork server.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.worker_path: str | None = None
        self.ports: list[socket.socket] = []
        self.reports = ExitReports(None)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None  # what it has printed
        if sys.platform != "linux":
            return
        # A Ctrl-C in the terminal is for the program, from the first moment on.
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
        with LineSocket() as listener:  # closed here, so that nobody waits for a fork server that has died
            address = listen(listener, "fork-server", BACKLOG)
            alone = {} if is_hash_seed_chosen() else HASH_SEED
            with starting:
                self._process = subprocess.Popen(
                    [sys.executable, SCRIPT, SERVE, str(listener.fileno()), str(os.getpid()), *alone],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,  # its reports
                    stderr=self._errors,
                    env=dict(os.environ) | alone,  # without what C code, readline's, has set: Ray's processes lack it
                    pass_fds=[listener.fileno()],
                )
        assert self._process.stdout is not None
        self.reports = ExitReports(os.dup(self._process.stdout.fileno()))
        self.environment = {VARIABLE: address.name}
        self.worker_path = SCRIPT

    def check(self) -> None:
        """Logs once if it has died."""
        if self._process is not None and self._errors is not None and self._process.poll() is not None:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            _warn(lines[-1] if lines else f"it has died, with exit status {self._process.returncode}")
            self._end()

    def give_up(self) -> None:
        """Ends it before Ray starts, which then starts worker processes by its own script."""
        self._end()
        self.environment, self.worker_path = {}, None

    def close(self) -> None:
        """Ends it, and gives up the ports; its forks live on. Callable more than once."""
        self._end()
        self._give_up_ports()

    def _end(self) -> None:
        self.reports.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):
                process.wait()
            _close_reports(process)
        if self._errors is not None:
            self._errors.close()

    def forget(self) -> None:
        """To be called in a forked child, which is not its parent."""
        self._give_up_ports()
        self.reports.close()
        if self._process is not None:
            self._process.returncode = 0  # so that no wait or warning follows
            _close_reports(self._process)
            self._process = None

    def _give_up_ports(self) -> None:
        for port in self.ports:
            port.close()


def _close_reports(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()


def _warn(why: object) -> None:
    logger.warning("rayloader: there is no fork server, so new worker processes start slowly: %s", why)
