"""The resource trackers of `multiprocessing` in a worker's process, which must not remove what belongs to others.

NOTE [Resource trackers]. A resource tracker is a process that removes shared memory and semaphores once all processes
that could have told it of them are gone: they hold the pipe on which it is told. In a worker's process the first
segment that user code creates starts one, as in a forked worker of a program that has none. `end_own` ends it, before
Ray ends the process: Ray kills the trackers first.

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
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rayloader._compat import tracker_of

_KIND = "shared_memory"

_created: set[str] = set()  # names of shared memory


def end_own() -> str:
    """Has the trackers of this process remove what is left, and end.

    Returns:
        What is left, because of which the process must end, in words; other child processes are killed.
    """
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
