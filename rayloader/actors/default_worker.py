"""The program that Ray starts for each worker process: asks the fork server for a fork, or becomes the worker itself.

It has the name of Ray's own script, by which Ray's tools recognize its processes. It is run by path and needs only the
standard library. See NOTE [fork server] in fork_server.py.
"""

import json
import os
import runpy
import signal
import socket
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "RAYLOADER_FORK_SERVER"  # the name of the fork server's local socket
# Strings have the same hash in all worker processes, in each run, so that batches that depend on sets of strings can be
# rebuilt. 0 would show in `sys.flags`.
HASH_SEED = {"PYTHONHASHSEED": "1"}
SEEDED = "RAYLOADER_SEEDED"  # marks a process that has it only for this reason
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
LENGTH = struct.Struct("<Q")


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
            credentials = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(credentials)[1] != os.getuid():
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


def run() -> None:
    """Runs the worker process; starts again if its hash seed differs from that of the others."""
    if os.environ.pop(SEEDED, None):
        for variable in HASH_SEED:
            del os.environ[variable]
    elif not is_hash_seed_chosen():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **HASH_SEED, SEEDED: "1"})
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "_private" / "workers" / "default_worker.py"
    sys.path[0] = str(path.parent)
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    if os.environ.get(SEEDED) or not ask(os.environ.get(VARIABLE, "")):
        run()
