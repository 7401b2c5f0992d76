"""The resource tracker of `multiprocessing` in a worker's process: the trainer's, as in a forked one.

NOTE [Resource trackers]. A resource tracker is a process that removes shared memory and semaphores once all processes
that could have told it of them are gone: they hold the pipe on which it is told. A forked worker has the trainer's
tracker, if one runs when it is forked; what it creates then lives as long as the trainer. If none runs, its first
segment starts one, which ends with the worker. Processes of ours do the same: `adopt` opens the pipe of the trainer's
tracker, and `end_own` ends those that user code has started here. It must come before Ray ends the process, because Ray
kills the trackers first.

`SharedMemory` tells the tracker of segments that it only attaches too, as if it had created them. A tracker that ends
with the worker would then remove what belongs to others. So in a worker's process only those that it creates are told.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.shared_memory
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rayloader._compat import pipe_of_tracker, set_pipe_of_tracker, tracker_of

_KIND = "shared_memory"

_created: set[str] = set()  # names of shared memory
_adopted: int | None = None  # the pipe of the trainer's tracker


@dataclass(frozen=True, slots=True)
class TrackerAddress:
    """How another process of this machine reaches this one's tracker."""

    pid: int  # of a process that holds the pipe
    fd: int
    pipe: str  # as `/proc` shows it: unique on a machine

    @classmethod
    def here(cls) -> TrackerAddress | None:
        """That of this process; None if no tracker runs."""
        fd = pipe_of_tracker()
        with contextlib.suppress(OSError):  # no /proc
            return None if fd is None else cls(os.getpid(), fd, os.readlink(f"/proc/self/fd/{fd}"))
        return None


def adopt(address: TrackerAddress | None) -> None:
    """This process tells that tracker from now on, unless it has a tracker already, or cannot reach that one."""
    global _adopted
    if address is None or pipe_of_tracker() is not None:
        return
    path = f"/proc/{address.pid}/fd/{address.fd}"
    with contextlib.suppress(OSError):
        if os.readlink(path) != address.pipe:
            return
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for a tracker that has gone
        if os.readlink(f"/proc/self/fd/{fd}") != address.pipe:  # the number was another file's in between
            os.close(fd)
            return
        os.set_blocking(fd, True)
        set_pipe_of_tracker(fd)
        _adopted = fd


def end_own() -> str:
    """Gives up the trainer's tracker, and has those of this process remove what is left, and end.

    Returns:
        What is left, because of which the process must end, in words; other child processes are killed.
    """
    global _adopted
    if _adopted is not None and pipe_of_tracker() == _adopted:  # otherwise it was closed, because that tracker had died
        set_pipe_of_tracker(None)
        os.close(_adopted)
    _adopted = None
    trackers = list(filter(None, map(tracker_of, list(sys.modules.items()))))
    others = _children() - {pid for pid, _ in trackers}
    for pid in others:  # they hold the pipe too
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for _, end in trackers:
        end()
    left = [name for name in _created if os.path.exists(f"/dev/shm{name}")]  # names may contain the process's number
    _created.clear()
    return "a child process" if others else "shared memory" if left else ""


def _children() -> set[int]:
    multiprocessing.active_children()  # reaps those that have ended
    pids: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended
            pids.update(map(int, file.read_text().split()))
    return pids


_attaching = threading.local()


def own_what_is_created() -> None:
    """From now on the tracker of this process is told of shared memory only by its creator."""
    module: Any = resource_tracker
    register, unregister = module.register, module.unregister
    memory: Any = multiprocessing.shared_memory.SharedMemory
    begin = memory.__init__

    @functools.wraps(begin)
    def __init__(self: Any, name: Any = None, create: Any = False, *args: Any, **options: Any) -> None:
        _attaching.now = not create
        try:
            begin(self, name, create, *args, **options)
        finally:
            _attaching.now = False

    def tell(name: str, kind: str) -> None:
        if kind == _KIND:
            if getattr(_attaching, "now", False):
                return
            _created.add(name)
        register(name, kind)

    def untell(name: str, kind: str) -> None:
        if kind == _KIND:
            register(name, kind)  # a tracker complains about what it does not know
        unregister(name, kind)

    memory.__init__ = __init__
    module.register, module.unregister = tell, untell
