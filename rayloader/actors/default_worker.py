"""The program that Ray starts for each worker process, and the fork server that it asks for a fork instead.

    python rayloader/actors/default_worker.py RAYS_ARGUMENT ...
    python rayloader/actors/default_worker.py --fork-server DESCRIPTOR OWNER [VARIABLE ...]

Run by Ray, it asks the fork server for a fork, or becomes the worker itself. It has the name of Ray's own script, by
which Ray's tools recognize its processes.

As the fork server it imports the workers' modules, and forks a worker for each program that asks. DESCRIPTOR is a
listening local socket, OWNER the process that has started this one, which ends with it. VARIABLEs are environment
variables for this process alone. It runs no thread of its own and keeps nothing but its connections. It reports to its
standard output which forks it has made, and how they have ended.

It is run by path, and needs only the standard library so early. See NOTE [fork server] in fork_server.py.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

SERVE = "--fork-server"
VARIABLE = "RAYLOADER_FORK_SERVER"  # the name of the fork server's local socket
# Strings have the same hash in all worker processes, in each run, so that batches that depend on sets of strings can be
# rebuilt. 0 would show in `sys.flags`.
HASH_SEED = {"PYTHONHASHSEED": "1"}
SEEDED = "RAYLOADER_SEEDED"  # marks a process that has it only for this reason
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
LENGTH = struct.Struct("<Q")
REPORT = struct.Struct("2i")  # pid of a fork, and how it has ended, as `os.waitpid` says; or that it was made:
MADE = -1
PR_SET_PDEATHSIG = 1
ROOT = str(Path(__file__).parents[2])  # what `import rayloader` needs
# These differ from one worker of a Ray to the next, and are read only while a worker runs.
OF_ONE_WORKER = {"RAY_JOB_ID", "SPT_NOENV", "PWD", "OLDPWD", "SHLVL", "_"}


# ---- the program that Ray starts


def is_hash_seed_chosen() -> bool:
    """Whether this process's environment sets the hash seed of strings."""
    return os.environ.get("PYTHONHASHSEED", "") not in ("", "random")


def folder() -> str | None:
    """The working directory; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def ask(name: str) -> bool:
    """Asks the fork server of this name for the worker process, and waits for its end; False if it forks none."""
    started_as = json.dumps(
        {
            "executable": [sys.executable, sys.prefix, list(sys.flags)],
            "arguments": sys.argv[1:],
            "environment": dict(os.environ),
            "folder": folder(),
            "group": os.getpgid(0),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "cpus": list(os.sched_getaffinity(0)),
        }
    ).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(f"\0{name}")
            if credentials(server)[1] != os.getuid():
                return False  # another user has taken a name that was free again
            socket.send_fds(server, [LENGTH.pack(len(started_as))], [0, 1, 2])
            server.sendall(started_as)
            if server.recv(1) != b"f":
                return False
            while server.recv(1):
                pass
        except OSError:
            return False  # there is none, or it has died before it has forked; otherwise the end would have been read
    return True


def start_alone() -> NoReturn:
    """Becomes the worker process; starts again if its hash seed differs from that of the others."""
    if os.environ.pop(SEEDED, None):
        for variable in HASH_SEED:
            del os.environ[variable]
    elif not is_hash_seed_chosen():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **HASH_SEED, SEEDED: "1"})
    path = rays_script()
    sys.path[0] = str(path.parent)
    run_as_main(path)


def rays_script() -> Path:
    """The path of Ray's script for worker processes."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "_private" / "workers" / "default_worker.py"


def run_as_main(path: Path) -> NoReturn:
    """Runs a script, and exits."""
    runpy.run_path(str(path), run_name="__main__")
    sys.exit()


def credentials(connection: socket.socket) -> tuple[int, ...]:
    """Process id, user id and group id of the other end."""
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))


# ---- the fork server


class Request:
    """A process that wants to be replaced by a fork.

    Args:
        connection: to that process.

    Attributes:
        started_as: what the process has sent about itself, once that is complete.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.started_as: dict[str, Any] | None = None
        self.child = 0  # process id, once there is one
        self._streams: list[int] = []
        self._read = b""

    def read(self) -> bool:
        """Reads what has come; False if the other end has gone."""
        try:
            if self._read:
                part = self.connection.recv(1 << 20)
            else:
                part, self._streams, _, _ = socket.recv_fds(self.connection, LENGTH.size, 3)
        except OSError:
            return False
        self._read += part
        if part and len(self._read) >= LENGTH.size:
            length = LENGTH.size + LENGTH.unpack_from(self._read)[0]
            if len(self._read) >= length:
                self.started_as = json.loads(self._read[LENGTH.size : length])
        return bool(part)

    def close_streams(self) -> None:
        """Closes the streams, of which the fork has copies."""
        for descriptor in self._streams:
            os.close(descriptor)
        self._streams = []

    def close(self) -> None:
        """Closes the connection."""
        self.close_streams()
        self.connection.close()

    def become(self) -> NoReturn:
        """In the fork: takes over the role of the process that Ray has started."""
        assert self.started_as is not None
        started_as = self.started_as
        for descriptor, copy in enumerate(self._streams):
            os.dup2(copy, descriptor)
        shim = credentials(self.connection)[0]
        try:
            self.connection.sendall(b"f")  # sent by this process itself: its arrival proves that the fork exists
        except OSError:
            os._exit(0)  # the other process was killed meanwhile
        self.close()
        os.environ.clear()
        os.environ.update(started_as["environment"])
        for adopt in (
            lambda: os.chdir(started_as["folder"]) if started_as["folder"] is not None else None,
            lambda: os.setpgid(0, started_as["group"]),
            lambda: os.setpriority(os.PRIO_PROCESS, 0, started_as["niceness"]),
            lambda: os.sched_setaffinity(0, started_as["cpus"]),
            lambda: Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{shim}/oom_score_adj").read_text()),
        ):
            with contextlib.suppress(OSError):  # it may lack what the other process has
                adopt()
        signal.pthread_sigmask(signal.SIG_SETMASK, started_as["blocked"])
        run(started_as["arguments"])


def run(arguments: list[str]) -> NoReturn:
    """Runs Ray's script for worker processes."""
    import numpy as np
    import torch

    np.random.seed()  # otherwise all workers would draw the same; Python's own generator is reseeded by the fork
    torch.seed()
    script = rays_script()
    sys.argv = [str(script), *arguments]
    run_as_main(script)


class NoContext:
    """Replaces Ray's serialization context, with which Ray's modules would register on the first message."""

    def _register_cloudpickle_serializer(self, *args: Any, **options: Any) -> None:
        pass


class Server:
    """Forks for each process that asks, one after the other.

    Args:
        listener: the socket where they ask.
        reports: the descriptor for the reports.
    """

    def __init__(self, listener: socket.socket, reports: int) -> None:
        self._listener = listener
        self._reports = reports
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._requests: dict[int, Request] = {}  # by descriptor of the connection
        self._children: dict[int, Request] = {}  # by descriptor of the forked process
        self._environment: dict[str, str] | None = None  # of the first worker

    def serve(self) -> Request:
        """Returns in each child, with the request that it must fulfil."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._listener.fileno():
                    self._let_in()
                elif descriptor in self._children:
                    self._ended(descriptor)
                elif descriptor in self._requests:
                    request = self._requests[descriptor]
                    if not request.read():
                        self._gone(descriptor)
                    elif request.started_as is not None and not request.child:
                        if not self._suits(request.started_as):
                            self._gone(descriptor)  # that process starts without us
                        elif self._fork(request):
                            return request

    def _let_in(self) -> None:
        connection, _ = self._listener.accept()
        if credentials(connection)[1] != os.getuid():
            connection.close()  # a stranger who has read the name in /proc/net/unix
            return
        self._requests[connection.fileno()] = Request(connection)
        self._poll.register(connection, select.POLLIN)

    def _suits(self, started_as: dict[str, Any]) -> bool:
        """Whether the modules imported here are those that the process would import."""
        if started_as["executable"] != [sys.executable, sys.prefix, list(sys.flags)]:
            return False
        environment = of_all_workers(started_as["environment"])
        if self._environment is None:
            if without_rays(environment) != without_rays(of_all_workers(os.environ)):
                return False  # variables for Ray itself could not be known
            self._environment = environment
            os.environ.update(started_as["environment"])
            import_the_rest()
        return environment == self._environment

    def _fork(self, request: Request) -> bool:
        """Whether this is the child."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about OpenBLAS' threads, which end before a fork and start again after it
            child = os.fork()
        if not child:
            self._leave(request)
            return True
        self._report(child, MADE)
        request.close_streams()
        process = os.pidfd_open(child)
        request.child = child
        self._children[process] = request
        self._poll.register(process, select.POLLIN)
        return False

    def _gone(self, descriptor: int) -> None:
        """The process that asked has gone, or is told to start by itself. Its fork ends with it."""
        request = self._requests.pop(descriptor)
        self._poll.unregister(descriptor)
        for process, other in self._children.items():
            if other is request:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        request.close()

    def _ended(self, process: int) -> None:
        """A child has ended."""
        request = self._children.pop(process)
        self._poll.unregister(process)
        os.close(process)
        self._report(*os.waitpid(request.child, 0))
        descriptor = request.connection.fileno()
        if descriptor in self._requests:
            self._gone(descriptor)

    def _report(self, child: int, status: int) -> None:
        with contextlib.suppress(OSError):  # of an owner that has gone, or has not read for thousands of reports
            os.write(self._reports, REPORT.pack(child, status))

    def _leave(self, request: Request) -> None:
        """In a child: closes the server's descriptors."""
        self._listener.close()
        os.close(self._reports)
        for process in self._children:
            os.close(process)
        for other in self._requests.values():
            if other is not request:
                other.close()


def of_all_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that are the same for all workers of a Ray, unless the program gives one its own environment."""
    return {key: value for key, value in environment.items() if key not in OF_ONE_WORKER}


def without_rays(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that are set for Ray, or by it."""
    return {key: value for key, value in environment.items() if not key.startswith("RAY")}


def import_the_rest() -> None:
    """Imports the rest of the workers' modules: those that depend on which Ray they belong to."""
    importlib.import_module("rayloader.actors.process")  # which imports this file too, elsewhere
    with contextlib.suppress(Exception):  # Ray's private code, which may change
        serialization_addons = importlib.import_module("ray.util.serialization_addons")
        serialization_addons.apply(NoContext())
    # As if Ray's script had been run. Ray has inserted a folder of its own before it.
    sys.path[sys.path.index(ROOT)] = str(rays_script().parent)
    gc.collect()
    gc.freeze()  # a garbage collection in a worker would write to all of these pages


def serve() -> Request:
    """Runs the server; returns in each child."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for variable in sys.argv[4:]:
        del os.environ[variable]
    if os.getppid() != int(sys.argv[3]):
        sys.exit("the program ended before this process started to watch it")
    os.close(os.pidfd_open(os.getpid()))  # raises now, before any process relies on it, if the kernel has no such call
    listener = socket.socket(fileno=int(sys.argv[2]))
    listener.set_inheritable(False)
    reports = os.dup(1)
    os.set_blocking(reports, False)
    os.dup2(0, 1)  # what is imported may print
    sys.path[0] = ROOT  # instead of this folder: rayloader is found even if it is not installed
    import torch  # noqa: F401

    return Server(listener, reports).serve()


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve().become()
    if os.environ.get(SEEDED) or not ask(os.environ.get(VARIABLE, "")):
        start_alone()
