"""The zygote: a fork of the driver that forks worker processes when it is told to, and does nothing else.

Promise: every fork sees the program as it was when the zygote was made, however late it is asked for. Zygote and forks
end with the driver, and the forks with the zygote. They run one thread, and nothing of Ray; they end by `os._exit`.
Where Ray, CUDA or other threads run in the driver already, they exist in no fork, as in torch's workers.

NOTE [Ends]. The driver's end is noticed by its process descriptor, which is readable then, whoever holds copies of the
control socket: `PR_SET_PDEATHSIG` of the zygote would kill it with the *thread* that called `iter()`. The zygote has
one thread, so the kernel may kill its forks with that. When the driver closes the control socket, the forks have
`END_SECONDS` to end by themselves, as torch's workers have.

NOTE [Reaping]. A fork that has ended stays a zombie of the zygote until the driver asks for its status, or until the
zygote ends: so its process id belongs to no other process. Zygotes that have ended are waited for by `reap`.

NOTE [Hooks]. What `os.register_at_fork` was given runs as if the trainer had forked the worker itself: `before` and
`after_in_parent` in the trainer, though once for all workers of a zygote, and `after_in_child` in each worker, once.
The zygote runs none of it: it serves within the first of all callbacks in the child, from which only its forks return.
These are made by a plain `fork()`, which is safe in a process of one thread whose interpreter was just made ready for
that.

NOTE [Answers]. The zygote may be slow, or stopped (`SIGSTOP`, a debugger), while its forks work on. So the driver never
waits for it: questions are sent, and answers are read when they have come. It is killed only when it is closed and
late, because its forks are killed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import itertools
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
from typing import Any, NamedTuple, NoReturn

from rayloader._compat import Identity, keep_freed_memory, new_identity, run_as_process
from rayloader.errors import WorkerStartError, warning_at_the_users_line
from rayloader.interrupts import new_lock
from rayloader.transport.line import SENDING, LineSocket, closers, flush_streams, poll

# Where the system refuses a process or a descriptor.
REMEDY = (
    "Use fewer workers, or raise the limit of processes (ulimit -u), of open files (ulimit -n) or of memory "
    "(vm.overcommit_memory)"
)
# How long forks may continue after the end of their lines: as long as torch waits for a worker.
END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 12  # more than any message has
_CLOSED_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

_libc = ctypes.CDLL(None)  # loaded before there are forks
_python = ctypes.PyDLL(None, use_errno=True)  # the same, but its functions keep Python's lock


class Zygote:
    """The driver's end. Nothing here waits for answers; see NOTE [Answers].

    Args:
        work: what a fork does with the descriptor of its end of a line.

    Attributes:
        answers: by what they say, and the number of the fork: "forked", its process id; "failed", why there is none;
            "status", how it has ended, as `os.waitpid` says, or None if the zygote does not know.

    Raises:
        WorkerStartError: no process can be forked.
    """

    _control: LineSocket | None = None

    def __init__(self, work: Callable[[int], object]) -> None:
        self._lock = new_lock()
        self._numbers = itertools.count(1)
        self.answers: dict[tuple[str, int], Any] = {}
        self._pids: list[int] = []
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise WorkerStartError(f"this process could not be forked: {error}. {REMEDY}") from error
        self._control = LineSocket(fileno=ours.detach())
        _live.add(self)
        # A Ctrl-C in the terminal is for the program, from the first moment on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        flush_streams()  # or each fork would print what is in their buffers
        me, driver = threading.get_ident(), os.getpid()
        born: list[Born] = []
        _serving[me] = lambda: born.append(_serve(theirs, driver, blocked))
        try:
            _fork(self._pids)
            if born:
                _work(work, *born)
        except OSError as error:
            raise WorkerStartError(f"this process could not be forked: {error}. {REMEDY}") from error
        finally:
            _serving.pop(me, None)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            if not self.pid:
                self.close()

    @property
    def pid(self) -> int:
        """Of the zygote; 0 if there is none."""
        return self._pids[0] if self._pids else 0

    def fork(self, end: socket.socket) -> int:
        """Lets it fork a process, which gets this end of a line; returns the number of that process.

        If there will be no such process, the line ends, or the zygote does not live.
        """
        number = next(self._numbers)
        self._tell(("fork", number, *new_identity()), end)
        return number

    def kill(self, number: int) -> None:
        """Kills a fork."""
        self._tell(("kill", number))

    def ask_status(self, number: int) -> None:
        """Asks how a fork has ended, whose line has."""
        self._tell(("status", number))

    @property
    def lives(self) -> bool:
        """Whether it may answer what it was asked, and can fork."""
        self.read()
        return self._control is not None

    def read(self) -> None:
        """Takes the answers that have come."""
        with self._lock:
            while self._read():
                pass

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """What to wait for until it has answered, with the events of `select.poll`."""
        control = self._control
        return [] if control is None else [(control.fileno(), select.POLLIN)]

    def _tell(self, message: tuple[Any, ...], *files: socket.socket) -> None:
        with self._lock:
            if not self.lives or (control := self._control) is None:
                return
            try:
                poll(control.fileno(), select.POLLOUT)  # there is room, unless it has been told hundreds of things
                socket.send_fds(control, [pickle.dumps(message)], [file.fileno() for file in files], SENDING)
            except OSError:  # it is dead, or would never hear of this
                self.close()

    def _read(self) -> bool:
        """Takes one message; False if there is none."""
        control = self._control
        if control is None or not poll(control.fileno(), select.POLLIN, 0):
            return False
        message = b""
        with contextlib.suppress(OSError):
            message = control.recv(_MESSAGE_BYTES)
        if not message:
            self.close()
            return False
        kind, number, answer = pickle.loads(message)
        self.answers[kind, number] = answer
        return True

    def close(self) -> None:
        """Ends it; its forks have lost their lines, and end. Callable more than once, and by any thread."""
        control, self._control = self._control, None
        if control is not None:
            if control.is_ours and self.pid:
                _ending[self.pid] = time.monotonic() + END_SECONDS + 1.0
            control.end()

    def __del__(self) -> None:
        self.close()


def _fork(pids: list[int]) -> None:
    """Appends what `os.fork` returns, in one call of C: no exception of a signal handler can come in between.

    A program with threads is forked too, as by torch's loader; Python 3.12 and later warn of that. Where the program
    takes warnings for errors, one of these is dropped: Python too ignores errors of whoever is told of a fork.
    """
    with contextlib.suppress(Warning), warning_at_the_users_line():  # those of libraries that are told of forks
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pids.extend(itertools.starmap(os.fork, [()]))


_live: weakref.WeakSet[Zygote] = weakref.WeakSet()
# Processes that were zygotes, and have not been waited for: when they are late, time.monotonic().
_ending: dict[int, float] = {}


def reap() -> bool:
    """Waits for no zygote, but leaves none behind that has ended; returns whether some are about to end.

    One that is late is killed, and the kernel kills its forks: it was stopped.
    """
    for pid, late in list(_ending.items()):
        try:
            lives = os.waitpid(pid, os.WNOHANG)[0] == 0
        except ChildProcessError:  # the program waits for all its children
            lives = False
        if not lives:
            _ending.pop(pid, None)
        elif time.monotonic() > late:
            with contextlib.suppress(ProcessLookupError):  # another thread has waited for it
                os.kill(pid, signal.SIGKILL)
    return bool(_ending)


def end_all() -> None:
    """Ends all zygotes and their forks."""
    for zygote in list(_live):
        zygote.close()
    until = time.monotonic() + END_SECONDS + 2.0
    while reap() and time.monotonic() < until:
        time.sleep(0.002)


def _forget() -> None:
    """In a forked child: they are the parent's."""
    _ending.clear()
    for zygote in list(_live):
        zygote.close()


os.register_at_fork(after_in_child=_forget)
closers.append(_forget)


# ---- in the zygote

_serving: dict[int, Callable[[], None]] = {}  # what a child does that a thread is about to fork, by the thread


def _begin() -> None:
    """In a forked child, the first callback of all: a zygote serves, and only its forks return; see NOTE [Hooks]."""
    serve = _serving.get(threading.get_ident())
    _serving.clear()
    if serve is not None:
        serve()


def _run_first(callback: Callable[[], None]) -> None:
    """Registers a callback for forked children that runs before all others; Python itself only appends."""
    os.register_at_fork(after_in_child=callback)
    if frozen := gc.get_freeze_count():
        gc.unfreeze()
    for callbacks in gc.get_objects():
        if type(callbacks) is list and callbacks and callbacks[-1] is callback:
            callbacks.insert(0, callbacks.pop())
            break
    if frozen:
        gc.freeze()


_run_first(_begin)


class Born(NamedTuple):
    """What a new fork of the zygote knows."""

    end: int  # the descriptor of its end of a line
    identity: Identity
    driver: int


def _serve(control: socket.socket, driver: int, blocked: set[int | signal.Signals]) -> Born:
    """Serves the control socket until the driver closes it, or ends; returns in each fork."""
    forks: dict[int, int] = {}  # process ids, by number
    with contextlib.suppress(BaseException):
        collects = gc.isenabled()
        gc.disable()
        gc.freeze()  # no collection must touch these pages, or finalize the program's objects
        signal.set_wakeup_fd(-1)
        ignores_interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN) is signal.SIG_IGN
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for close in closers:
            close()
        waits = select.poll()
        waits.register(control, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            waits.register(os.pidfd_open(driver), select.POLLIN)
        while os.getppid() == driver and control.fileno() in [ready for ready, _ in waits.poll()]:
            message, ends, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1, _CLOSED_ON_EXEC)
            if not message:
                break
            kind, number, *told = pickle.loads(message)
            answer: int | str | None = None
            if kind == "kill":
                if number in forks:
                    os.kill(forks[number], signal.SIGKILL)
                continue
            if kind == "status":
                if number in forks and (answer := _status(forks[number])) is not None:
                    del forks[number]
            else:
                try:
                    answer = _forked(control, ends, collects=collects, ignores_interrupts=ignores_interrupts)
                    if not answer:
                        return Born(ends[0], Identity(*told), driver)
                    forks[number], kind = answer, "forked"
                except OSError as error:
                    kind, answer = "failed", str(error)
            control.sendall(pickle.dumps((kind, number, answer)))
            for end in ends:  # now only the fork has it, and the line ends with that
                os.close(end)
    with contextlib.suppress(BaseException):
        _end(list(forks.values()))
    os._exit(0)


def _forked(control: socket.socket, ends: list[int], *, collects: bool, ignores_interrupts: bool) -> int:
    """Forks a process; returns its id, and 0 in that process, which then has nothing of the zygote's.

    Raises:
        OSError: there is no such process.
    """
    if not ends:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the system has closed the end of the line
    zygote = os.getpid()
    pid = int(_python.fork())
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if pid:
        return pid
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:  # it has died before that
            os._exit(1)
        control.close()
        # What the user's code starts ignores it if this process does, and must only where the program does.
        if not ignores_interrupts:
            signal.signal(signal.SIGINT, _nothing)
        keep_freed_memory()
        if collects:
            gc.enable()
    except BaseException:  # it must not go on as a zygote
        os._exit(1)
    return 0


def _work(work: Callable[[int], object], born: Born) -> NoReturn:
    """What a fork does, from when all callbacks of the fork have run."""
    code = 1
    with contextlib.suppress(BaseException):
        parent = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel: only `parent_process().is_alive()` needs it
            parent = os.pidfd_open(born.driver)
        code = run_as_process(functools.partial(work, born.end), born.identity, born.driver, parent)
    os._exit(code)


def _nothing(*_: object) -> None:
    pass


def _status(pid: int) -> int | None:
    """How a fork has ended whose line has; None: it lives, a second later."""
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
