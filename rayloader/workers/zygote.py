"""The zygote: a fork of the driver that forks worker processes when it is told to, and does nothing else.

Promise: every fork sees the program as it was when the zygote was made, however late it is asked for. Zygote and forks
end with the driver, and the forks with the zygote. They run one thread, and nothing of Ray; they end by `os._exit`.
Where Ray, CUDA or other threads run in the driver already, they exist in no fork, as in torch's workers.

NOTE [Ends]. The driver's end is noticed by its process descriptor, which is readable then, whoever holds copies of the
control socket: `PR_SET_PDEATHSIG` of the zygote would kill it with the *thread* that called `iter()`. The zygote has
one thread, so the kernel may kill its forks with that. When the driver closes the control socket, the forks have
`END_SECONDS` to end by themselves, as torch's workers have.

NOTE [Reaping]. A fork that has ended stays a zombie of the zygote until the driver asks for its status, or until the
zygote ends: so its number belongs to no other process. Zygotes that have ended are waited for by `reap`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import os
import pickle
import select
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from rayloader._compat import run_as_process
from rayloader.errors import WorkerStartError
from rayloader.transport.line import poll
from rayloader.transport.local_line import LineAddress, flush_streams

# How long forks may continue after the end of their lines: as long as torch waits for a worker.
END_SECONDS = 5.0
# How long the zygote may take to answer, in seconds; it is idle.
ANSWER_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MESSAGE_BYTES = 1 << 16  # much more than what forks are told early

logger = logging.getLogger("rayloader")

_libc = ctypes.CDLL(None)  # loaded before there are forks


class Zygote:
    """The driver's end.

    Args:
        work: what a fork does with the line that it is to serve, and with messages that come before those of the line.

    Attributes:
        forked: processes, by the names of the lines that they are to serve.
        failed: why no process could be forked, by the same.

    Raises:
        WorkerStartError: no process can be forked.
    """

    _control: socket.socket | None = None

    def __init__(self, work: Callable[[LineAddress, list[bytes]], object]) -> None:
        self._driver = os.getpid()
        self._lock = threading.RLock()
        self._statuses: dict[int, int] = {}
        self.forked: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self._pids: list[int] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _live.add(self)
        # A Ctrl-C in the terminal is for the program, from the first moment on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        flush_streams()  # or each fork would print what is in their buffers
        try:
            _fork(self._pids)
            if self._pids == [0]:
                _serve(theirs, self._driver, work, blocked)
        except OSError as error:
            raise WorkerStartError(
                f"this process could not be forked: {error}. Use fewer workers, or raise the limit of processes "
                "(ulimit -u) or of memory (vm.overcommit_memory)"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            if not self.pid:
                self.close()

    @property
    def pid(self) -> int:
        """Of the zygote; 0 if there is none."""
        return self._pids[0] if self._pids else 0

    def fork(self, address: LineAddress, early: list[bytes]) -> None:
        """Lets it fork a process that serves this line, after some messages; the process connects to it."""
        self._tell(("fork", address, early))

    def kill(self, pid: int) -> None:
        """Kills a fork."""
        self._tell(("kill", pid))

    @property
    def lives(self) -> bool:
        """Whether it can fork."""
        with self._lock:
            while self._read():
                pass
            return self._control is not None

    def status(self, pid: int, *, wait: bool = True) -> int | None:
        """How a fork has ended, as `os.waitpid` says; None if nobody knows, or if it lives.

        Args:
            pid: of the fork.
            wait: for a moment, because its line has ended.
        """
        until = time.monotonic() + ANSWER_SECONDS
        with self._lock:
            if self._statuses.get(pid) is None:
                self._statuses.pop(pid, None)
                self._tell(("status", pid, wait))
            while pid not in self._statuses and self._read(until - time.monotonic()):
                pass
            return self._statuses.get(pid)

    def _tell(self, message: tuple[Any, ...]) -> None:
        with self._lock, contextlib.suppress(OSError):  # it is dead: the ends of its forks' lines show that too
            if self._control is not None:
                self._control.sendall(pickle.dumps(message))

    def _read(self, timeout: float = 0.0) -> bool:
        """Takes one message, waiting for it; False if there is none."""
        control = self._control
        if control is None or not poll(control.fileno(), select.POLLIN, max(0, int(timeout * 1000))):
            return False
        message = b""
        with contextlib.suppress(OSError):
            message = control.recv(_MESSAGE_BYTES)
        if not message:
            self.close()
            return False
        match pickle.loads(message):
            case ("status", pid, status):
                self._statuses[pid] = status
            case ("forked", name, pid):
                self.forked[name] = pid
                self._statuses.pop(pid, None)  # of an earlier process of that number
            case ("failed", name, reason):
                self.failed[name] = reason
        return True

    def close(self) -> None:
        """Ends it; its forks have lost their lines, and end. Callable more than once, and by any thread."""
        control, self._control = self._control, None
        if control is not None:
            if os.getpid() == self._driver:
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_RDWR)  # a fork of the driver may have a copy
                _ending.extend([self.pid] if self.pid else [])
            control.close()

    def __del__(self) -> None:
        self.close()


def _fork(pids: list[int]) -> None:
    """Appends what `os.fork` returns, in one call of C: no exception of a signal handler can come in between.

    A program with threads is forked too, as by torch's loader; Python 3.12 and later warn of that.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pids.extend(itertools.starmap(os.fork, [()]))


_live: weakref.WeakSet[Zygote] = weakref.WeakSet()
_ending: list[int] = []  # processes that were zygotes, and have not been waited for


def reap() -> bool:
    """Waits for no zygote, but leaves none behind that has ended; returns whether some are about to end."""
    for pid in list(_ending):
        try:
            lives = os.waitpid(pid, os.WNOHANG)[0] == 0
        except ChildProcessError:  # the program waits for all its children
            lives = False
        if not lives:
            with contextlib.suppress(ValueError):  # another thread has waited for it
                _ending.remove(pid)
    return bool(_ending)


def end_all() -> None:
    """Ends all zygotes and their forks."""
    for zygote in list(_live):
        zygote.close()
    until = time.monotonic() + END_SECONDS + 1.0
    while reap() and time.monotonic() < until:
        time.sleep(0.002)


os.register_at_fork(after_in_child=_ending.clear)  # they are the parent's


# ---- in the zygote


def _serve(
    control: socket.socket,
    driver: int,
    work: Callable[[LineAddress, list[bytes]], object],
    blocked: set[int | signal.Signals],
) -> NoReturn:
    """Serves the control socket until the driver closes it, or ends."""
    forks: list[int] = []
    with contextlib.suppress(BaseException):
        collects = gc.isenabled()
        gc.disable()
        gc.freeze()  # no collection must touch these pages, or finalize the program's objects
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        waits = select.poll()
        waits.register(control, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            waits.register(os.pidfd_open(driver), select.POLLIN)
        while os.getppid() == driver and control.fileno() in [ready for ready, _ in waits.poll()]:
            message = control.recv(_MESSAGE_BYTES)
            if not message:
                break
            match pickle.loads(message):
                case ("fork", address, early):
                    serve = functools.partial(run_as_process, functools.partial(work, address, early))
                    forks += _forked(control, address.name, serve, collects=collects)
                case ("kill", pid):
                    if pid in forks:
                        os.kill(pid, signal.SIGKILL)
                case ("status", pid, wait):
                    status = _status(pid, wait) if pid in forks else None
                    if status is not None:
                        forks.remove(pid)
                    control.sendall(pickle.dumps(("status", pid, status)))
    with contextlib.suppress(BaseException):
        _end(forks)
    os._exit(0)


def _forked(control: socket.socket, name: str, work: Callable[[], int], *, collects: bool) -> list[int]:
    """Forks a process that does this, and nothing else; returns its id. `name`: of the line that it serves, if any."""
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        control.sendall(pickle.dumps(("failed", name, str(error))))
        return []
    if pid:
        control.sendall(pickle.dumps(("forked", name, pid)))
        return [pid]
    code = 1
    with contextlib.suppress(BaseException):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:  # it has died before that
            os._exit(1)
        if name:
            control.close()
        # Not ignored, because what the user's code starts would ignore it too.
        signal.signal(signal.SIGINT, _nothing)
        if hasattr(_libc, "mallopt"):  # of glibc: freed blocks are kept, for fresh pages are a loader's main cost
            _libc.mallopt(_M_MMAP_MAX, 0)
            _libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        if collects:
            gc.enable()
        code = work()
    os._exit(code)


def _nothing(*_: object) -> None:
    pass


def _status(pid: int, wait: bool) -> int | None:
    """How a fork has ended; None: it lives. `wait`: for a moment, because its line has ended."""
    if wait:
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            poll(process, select.POLLIN, 1000)
            os.close(process)
    found, status = os.waitpid(pid, os.WNOHANG)
    return status if found else None


def _end(forks: list[int]) -> None:
    """Waits for the forks, and kills those that are late."""
    until = time.monotonic() + END_SECONDS
    while forks and time.monotonic() < until:
        forks[:] = [pid for pid in forks if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if forks:
            time.sleep(0.002)
    for pid in forks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
