"""What user code may leave behind in a process, other than the settings that it has taken over from the driver.

Promise: after `undo`, either the process is as it was, or something is named that cannot be put back exactly. What a
module sets as it is imported belongs to the program: the driver has imported it too, and it is not imported again.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import locale
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from rayloader.inherit.patches import Patches, is_programs
from rayloader.namespaces import is_own_namespace


class LeftBehind:
    """Of this process, as it is when this object is made."""

    def __init__(self) -> None:
        self._values = _read()
        self._patches = Patches()

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Around code that imports the program's modules."""
        before, number = _read(), len(sys.modules)
        try:
            yield
        finally:
            imported = len(sys.modules) != number
            if imported:
                self._values.update({name: value for name, value in _read().items() if value != before[name]})
            self._patches.note(anew=imported)

    def undo(self) -> str:
        """Puts back what one assignment puts back exactly; the thread is the main one.

        Returns:
            The name of something else; empty if there is nothing.
        """
        for name, value in self._values.items():
            trace = _TRACES[name]
            if trace.read() != value and trace.write is not None:
                with contextlib.suppress(Exception):  # a hard limit that was lowered
                    trace.write(value)
            if trace.read() != value:
                return name
        return self._patches.undo()  # last: some of the above are attributes of modules


class _Trace(NamedTuple):
    """Something of the process or its main thread: how to read it, and how to put it back, if that is possible."""

    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


def _read() -> dict[str, Any]:
    return {name: trace.read() for name, trace in _TRACES.items()}


def _priority() -> tuple[int, int]:
    scheduler = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else 0
    return os.getpriority(os.PRIO_PROCESS, 0), scheduler


def _rename_thread(name: str) -> None:
    threading.current_thread().name = name


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


def _set_timers(timers: list[tuple[float, float]]) -> None:
    for which, timer in zip(_TIMERS, timers, strict=True):
        signal.setitimer(which, *timer)


def _error_hooks() -> tuple[Any, ...]:
    return sys.displayhook, sys.excepthook, sys.unraisablehook, threading.excepthook


def _set_error_hooks(hooks: tuple[Any, ...]) -> None:
    sys.displayhook, sys.excepthook, sys.unraisablehook, threading.excepthook = hooks


def _tracers() -> tuple[Any, ...]:
    return sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace()


def _set_tracers(tracers: tuple[Any, ...]) -> None:
    kept = _tracers()  # until others are set: a profiler of C code must not end meanwhile
    setters = sys.setprofile, sys.settrace, threading.setprofile, threading.settrace
    for put, tracer in zip(setters, tracers, strict=True):
        put(tracer)
    del kept


def _monitors() -> list[Any]:
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    return [] if monitoring is None else [monitoring.get_tool(number) for number in range(6)]


def _set_tempdir(folder: str | None) -> None:
    tempfile.tempdir = folder


_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _set_limits(limits: list[tuple[int, int]]) -> None:
    for which, limit in zip(_LIMITS, limits, strict=True):
        if resource.getrlimit(which) != limit:
            resource.setrlimit(which, limit)


def _hooks() -> list[Any]:
    """Those of the program. Libraries add theirs when they are imported, and go on needing them."""
    return [hook for hook in (*sys.meta_path, *sys.path_hooks, *gc.callbacks) if is_programs(hook)]


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
    "the niceness": _Trace(_priority),
    "profile and trace functions": _Trace(_tracers, _set_tracers),
    "monitoring tools": _Trace(_monitors),
    "timers": _Trace(lambda: [signal.getitimer(which) for which in _TIMERS], _set_timers),
    "signal handlers": _Trace(_handlers, _set_handlers),
    "blocked signals": _Trace(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    "the garbage collector": _Trace(_collector, _set_collector),
    "torch's number of threads": _Trace(torch.get_num_threads, torch.set_num_threads),
    "torch's number of interop threads": _Trace(torch.get_num_interop_threads),  # it can be set only once
    "torch's anomaly detection": _Trace(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the timeout of sockets": _Trace(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the name of the thread": _Trace(lambda: threading.current_thread().name, _rename_thread),
    "the switch interval": _Trace(sys.getswitchinterval, sys.setswitchinterval),
    "hooks for errors and output": _Trace(_error_hooks, _set_error_hooks),
    "the folder of `tempfile`": _Trace(lambda: tempfile.tempdir, _set_tempdir),
    "resource limits": _Trace(lambda: [resource.getrlimit(which) for which in _LIMITS], _set_limits),
    "the locale": _Trace(lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
    "the start method of `multiprocessing`": _Trace(
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    ),
    "builtins": _Trace(lambda: dict(vars(builtins))),
    "import hooks or callbacks of the garbage collector": _Trace(_hooks),
    "a thread that still runs": _Trace(_threads),
}
