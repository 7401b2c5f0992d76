"""What user code may leave behind in a process, other than the settings that it has taken over from the driver.

Promise: after `undo` and `end_own`, either the process is as it was, or something is named that cannot be put back
exactly. What a module sets as it is imported belongs to the program: the driver has imported it too, and it is not
imported again. What the program binds anew in installed modules is not looked for.

NOTE [Resource trackers]. A resource tracker is a process that removes shared memory and semaphores once all processes
that could have told it of them are gone: they hold the pipe on which it is told. In a worker's process the first
segment that user code creates starts one, as in a forked worker of a program that has none. `end_own` ends it, before
Ray ends the process: Ray kills the trackers first.

`SharedMemory` tells the tracker of segments that it only attaches too, as if it had created them. A tracker that ends
with the worker would then remove what belongs to others. So in a worker's process only those that it creates are told.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import locale
import multiprocessing
import multiprocessing.shared_memory
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rayloader._compat import tracker_of
from rayloader.namespaces import is_a, is_own_name, is_own_namespace


class LeftBehind:
    """Of this process, as it is when this object is made."""

    def __init__(self) -> None:
        self._values = read_all(_TRACES)

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Around code that imports the program's modules."""
        before, number = read_all(_TRACES), len(sys.modules)
        try:
            yield
        finally:
            if len(sys.modules) != number:
                now = read_all(_TRACES)
                self._values.update({name: value for name, value in now.items() if value != before[name]})

    def undo(self) -> str:
        """Puts back what one assignment puts back exactly; the thread is the main one.

        Returns:
            The name of something else; empty if there is nothing.
        """
        for name, value in self._values.items():
            trace = _TRACES[name]
            if trace.read() != value:
                with contextlib.suppress(Exception):  # a hard limit that was lowered
                    trace.write(value)
            if trace.read() != value:
                return name
        return ""


class Setting(NamedTuple):
    """Something of the process or the calling thread: how to read it, and how to set it; by default nothing does."""

    read: Callable[[], Any]
    write: Callable[[Any], object] = lambda value: None


def read_all(settings: dict[str, Setting]) -> dict[str, Any]:
    """The current values, by name."""
    return {name: setting.read() for name, setting in settings.items()}


def _priority() -> tuple[int, int]:
    scheduler = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    return os.getpriority(os.PRIO_PROCESS, 0), scheduler


def _attributes(*places: tuple[Any, str]) -> Setting:
    """Attributes of objects that are there for as long as the process is."""

    def write(values: list[Any]) -> None:
        for (owner, name), value in zip(places, values, strict=True):
            setattr(owner, name, value)

    return Setting(lambda: [getattr(owner, name) for owner, name in places], write)


def _collector() -> tuple[bool, tuple[int, int, int], int]:
    return gc.isenabled(), gc.get_threshold(), gc.get_debug()


def _set_collector(state: tuple[bool, tuple[int, int, int], int]) -> None:
    enabled, thresholds, debug = state
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*thresholds)
    gc.set_debug(debug)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_handlers(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF


def _tracers() -> tuple[Any, ...]:
    return sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace()


def _monitors() -> list[Any]:
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]


_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _set_limits(limits: list[tuple[int, int]]) -> None:
    for which, limit in zip(_LIMITS, limits, strict=True):
        if resource.getrlimit(which) != limit:
            resource.setrlimit(which, limit)


def _hooks() -> list[Any]:
    """Those of the program. Libraries add theirs when they are imported, and go on needing them."""
    return [hook for hook in (*sys.meta_path, *sys.path_hooks, *gc.callbacks) if _is_programs(hook)]


def _is_programs(hook: Any) -> bool:
    """Whether the program has written it. A class whose module is not imported here has been pickled by value."""
    if is_a(hook, types.FunctionType):
        return is_own_namespace(hook.__globals__)
    module = (hook if is_a(hook, type) else type(hook)).__module__
    return module == "__main__" or module not in sys.modules or is_own_name(module)


def _threads() -> set[int]:
    """Threads in which code of the program's runs, with which the process must not be shared. Libraries keep theirs."""
    own = set()
    for ident, frame in sys._current_frames().items():
        while ident != threading.get_ident() and frame is not None:
            if is_own_namespace(frame.f_globals):
                own.add(ident)
                break
            frame = frame.f_back  # type: ignore[assignment]
    return own


_TRACES = {
    # Threads that were started meanwhile keep it, and without privileges it can only be raised.
    "the niceness": Setting(_priority),
    "profile and trace functions": Setting(_tracers),
    "monitoring tools": Setting(_monitors),
    "timers": Setting(lambda: [signal.getitimer(which) for which in _TIMERS]),
    "signal handlers": Setting(_handlers, _set_handlers),
    "blocked signals": Setting(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    "the garbage collector": Setting(_collector, _set_collector),
    "torch's number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "torch's number of interop threads": Setting(torch.get_num_interop_threads),  # it can be set only once
    "torch's anomaly detection": Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the timeout of sockets": Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the name of the thread": _attributes((threading.main_thread(), "name")),
    "the switch interval": Setting(sys.getswitchinterval, sys.setswitchinterval),
    "hooks for errors and output": _attributes(
        (sys, "displayhook"), (sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")
    ),
    "the folder of `tempfile`": _attributes((tempfile, "tempdir")),
    "resource limits": Setting(lambda: [resource.getrlimit(which) for which in _LIMITS], _set_limits),
    "the locale": Setting(lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    "the start method of `multiprocessing`": Setting(
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    ),
    "builtins": Setting(lambda: dict(vars(builtins))),
    "import hooks or callbacks of the garbage collector": Setting(_hooks),
    "a thread that still runs": Setting(_threads),
}


# ---- resource trackers

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
