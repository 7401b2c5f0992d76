"""A Ray that is started in the background: in a process of its own, which the program can leave at any moment.

    python rayloader/start/background.py DESCRIPTOR DRIVER

DESCRIPTOR is a socket to the program, whose process id is DRIVER. First come the arguments of `ray.init`, pickled; the
answer is Ray's address, or why there is none, and the descriptor of the fork server's reports.

NOTE [a Ray in the background]. `ray.init` keeps the interpreter busy for seconds while the program loads, and cannot be
interrupted: a program that ends meanwhile would wait for it, or crash. So another process starts that Ray, at low
priority, and keeps it until the socket is closed, or the program has ended; the program only connects to it. Workers
are forks of the fork server, which has the program's own priority.

It is run by path, and must not import torch, which would take more memory than all the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

NICENESS = 5
_MOST_BYTES = 1 << 16


class BackgroundRay:
    """The program's end.

    Args:
        options: of `ray.init`.
        starting: to be entered around the start of a process.
    """

    def __init__(self, options: dict[str, Any], starting: contextlib.AbstractContextManager[Any]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._socket.sendall(pickle.dumps(options))
            with starting:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal is for the program
                )
            self._process.wait()  # it has forked the one that stays, which the program need not wait for

    def address(self) -> tuple[str, int | None]:
        """Waits for Ray's address, and a descriptor of the reports of its fork server.

        Raises:
            RuntimeError: there is none.
        """
        answer, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            answer, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 1)
        address, error = pickle.loads(answer) if answer else ("", "the process that was to start it has ended")
        if not address:
            raise RuntimeError(error)
        return address, (descriptors[0] if descriptors else None)

    def wait(self) -> None:
        """Waits until it has ended, or `end` is called."""
        with contextlib.suppress(OSError):
            self._socket.recv(1)  # nothing more is ever sent

    def end(self, *, at_once: bool = False) -> None:
        """Lets it end Ray; ends the waits of other threads. Callable more than once.

        Args:
            at_once: nobody uses that Ray yet.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if at_once:
            kill_session(self._process.pid)

    def close(self) -> None:
        """Closes the socket, after the waits have ended; in a forked child at once."""
        self._socket.close()


def kill_session(session: int) -> None:
    """Kills the processes of a session: this one, Ray's, and those that Ray has started in process groups of their own.

    The caller last, if it is one of them.
    """
    for pid in {*map(int, filter(str.isdigit, os.listdir("/proc")))} - {os.getpid()}:
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
    if os.getsid(0) == session:
        os.kill(os.getpid(), signal.SIGKILL)


def keep(program: socket.socket, driver: int) -> None:
    """Starts Ray, and keeps it for the program."""
    options = pickle.loads(program.recv(_MOST_BYTES))
    started = threading.Event()
    threading.Thread(target=_end_with_program, args=(program, driver, started), daemon=True).start()
    with contextlib.suppress(ValueError):  # run by path, Ray must not import what lies beside this file
        sys.path.remove(str(Path(__file__).parent))
    try:
        package = sys.modules["rayloader"] = ModuleType("rayloader")  # without what the package itself imports
        package.__path__ = [str(Path(__file__).parents[1])]
        from rayloader._compat_ray import RAY_START_LOGGERS
        from rayloader.start import fork_server

        for name in RAY_START_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        server = fork_server.ForkServer()
        os.nice(NICENESS)
        import ray

        fork_server.start_ray(ray, server, options)
    except Exception as error:  # any error: it is raised in the program
        with contextlib.suppress(OSError):
            program.sendall(pickle.dumps(("", str(error))))
        return
    descriptor = server.reports.descriptor
    with contextlib.suppress(OSError):
        answer = pickle.dumps((ray.get_runtime_context().gcs_address, ""))
        socket.send_fds(program, [answer], [] if descriptor is None else [descriptor])
    started.set()
    _wait_for_end(program, driver)
    ray.shutdown()
    server.close()


def _wait_for_end(program: socket.socket, driver: int) -> None:
    """Waits until the program closes the socket, or ends."""
    waits = select.poll()
    waits.register(program, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):
        waits.register(os.pidfd_open(driver), select.POLLIN)
    waits.poll()


def _end_with_program(program: socket.socket, driver: int, started: threading.Event) -> None:
    """In a thread: a program that ends while Ray starts leaves no process of that behind."""
    _wait_for_end(program, driver)
    if not started.is_set():
        kill_session(os.getsid(0))


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    keep(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
