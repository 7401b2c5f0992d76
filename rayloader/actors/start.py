"""How Ray is started, or joined: by `ray.init`, in a thread that lives as long as that Ray.

Promise: the program's signal handlers, random state and environment are afterwards as they were.

NOTE [who starts Ray]
The kernel kills Ray's daemons when the *thread* that forked them ends (`PR_SET_PDEATHSIG`), and an interrupt in the
middle of `ray.init` leaves a Ray that is neither started nor ended. So a dedicated thread calls `ray.init`, whichever
thread iterates, and lives until that Ray is shut down. An interrupt ends the wait for it; the next use of Ray waits
again. Signal handlers and the state of `random` are the program's: what Ray has changed of them is restored. Below
Python, Ray takes SIGTERM and the signals of a crash, so it is the kernel's table that counts; Python's own is changed
by the main thread alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rayloader._compat import libc
from rayloader.actors._compat_ray import RAY_START_LOGGERS, connection_of
from rayloader.errors import RaySessionError
from rayloader.interrupts import Bell, DaemonThread

# Session and job; unique over time and clusters.
SessionName = tuple[str, str]

# Marks a Ray that rayloader started: workers take no CPU slot there, as torch's processes take none.
OVERSUBSCRIBE_RESOURCE = "rayloader_oversubscribe"
# Set while we start Ray, whose processes inherit it. Workers run at the niceness of torch's, and hash strings alike, in
# each run. Ray reclaims freed objects at once, so that the next batch finds warm pages. On a busy machine its processes
# may take long to start: it kills a worker that is late, and if that is one of the first, `ray.init()` never returns.
LOCAL_RAY_ENVIRONMENT = {
    "PYTHONHASHSEED": "1",  # 0 would show in `sys.flags`
    "RAY_worker_niceness": "0",
    "RAY_free_objects_period_milliseconds": "0",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
}

# What Ray says of its own daemon that it has waited for in vain: for 30 s, whatever the environment says.
_TOO_SLOW = "timed out during startup"
# How often the wait for Ray's start checks whether it has missed the end of the start, in seconds.
START_TICK_S = 1.0
# After this many seconds of waiting for Ray, a line in the log says so. On two idle cores Ray takes three to five.
START_NOTICE_S = 10.0
# After this many seconds an error: Ray waits for ever for its first workers if they need too long.
START_LIMIT_S = 600.0

logger = logging.getLogger("rayloader")

libc.sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_ACTION_BYTES = 512  # more than any system's `struct sigaction`, which is restored unread


class Starter(DaemonThread):
    """Calls `ray.init`, and lives as long as that Ray; see NOTE [who starts Ray].

    Args:
        ray: the module.
        options: of `ray.init`.
        current: the session that this process is connected to.

    Attributes:
        joins: whether that Ray runs already, and is to be joined.
        error: why there is no Ray.
        session: of that Ray.
        done: whether `error` or `session` is known.
    """

    def __init__(self, ray: ModuleType, options: Mapping[str, Any], current: Callable[[], SessionName | None]) -> None:
        super().__init__(self._serve, "rayloader-session")
        self._ray = ray
        self._options = options
        self._current = current
        self._address = options.get("address") or os.environ.get("RAY_ADDRESS")
        self.joins = self._address not in (None, "", "local")
        self.error: BaseException | None = None
        self.session: SessionName | None = None
        self.done = False
        self._bell = Bell()
        self._leave = Bell()

    def wait(self) -> None:
        """Starts the thread if needed, and waits until Ray runs or has failed to start."""
        if self.spent:
            return
        self.start()
        began, said = time.monotonic(), False
        while not self.done:
            self._bell.wait(START_TICK_S)
            waited = time.monotonic() - began
            if not self.done and not said and waited >= START_NOTICE_S:
                said = True
                if self.joins:
                    text = "rayloader: waiting for the Ray at %s, which has not answered for %.0f s: is it running?"
                    logger.warning(text, self._address, START_NOTICE_S)
                else:
                    logger.warning("rayloader: waiting for Ray, which is still starting after %.0f s", START_NOTICE_S)
            if not self.done and waited >= START_LIMIT_S:
                raise RaySessionError(
                    f"Ray has not started on this machine within {START_LIMIT_S:.0f} s; start the program again, or "
                    "run `ray start --head` before it and set RAY_ADDRESS=auto"
                )

    @property
    def was_slow(self) -> bool:
        """Whether Ray gave up its own daemon, which took too long to start, as on a busy machine."""
        return _TOO_SLOW in str(self.error)

    def leave(self) -> None:
        """Ends this thread, whose Ray has been shut down."""
        self._leave.ring()
        self.join()

    def _serve(self) -> None:
        """Starts Ray, then waits for its end."""
        state = random.getstate()  # Ray draws from it
        try:
            with signals_stay(), _quiet():
                self._init()
            self.session = self._current()
        except BaseException as error:  # any error: it is raised where Ray was requested
            self.error = error
        random.setstate(state)
        self.done = True
        self._bell.ring()
        if self.error is None:
            self._leave.wait(threading.TIMEOUT_MAX)

    def _init(self) -> None:
        """Joins or starts Ray."""
        ray, options = self._ray, self._options
        try:
            if self.joins:
                ray.init(**{**options, "address": self._address})
            else:
                resources = {OVERSUBSCRIBE_RESOURCE: 1, **(options.get("resources") or {})}
                own = {"include_dashboard": False, **options, "address": "local", "resources": resources}
                with _with_variables(LOCAL_RAY_ENVIRONMENT):
                    ray.init(**own)
        except Exception as error:  # Ray's errors have no common type
            if connection_of(ray) is None:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    ray.shutdown()  # Ray itself does not end what it has started
            named = f"{'address' if options.get('address') else 'RAY_ADDRESS'}={self._address}"
            given = f"check the options {', '.join(options)}, or " if options else ""
            raise RaySessionError(
                f"the Ray that {named} names could not be joined; set it to the address of a running Ray, or unset it. "
                f"Ray said: {error}"
                if self.joins
                else f"Ray could not be started on this machine: {given}run `ray start --head` before the program and "
                f"set RAY_ADDRESS=auto. Ray said: {error}"
            ) from error


@contextlib.contextmanager
def _with_variables(variables: dict[str, str]) -> Iterator[None]:
    """Adds variables that are not set to this process's environment, for processes started meanwhile."""
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


@contextlib.contextmanager
def signals_stay() -> Iterator[None]:
    """The kernel does at each signal afterwards what it did before; see NOTE [who starts Ray]."""
    before = {number: ctypes.create_string_buffer(_ACTION_BYTES) for number in signal.valid_signals()}
    for number, action in before.items():
        libc.sigaction(number, None, action)
    try:
        yield
    finally:
        for number, action in before.items():
            libc.sigaction(number, action, None)


# Lines that Ray need not print: that it sets no SIGTERM handler outside the main thread, as it should; and about a Ray
# of ours, that it runs, and how it is protected.
_UNSAID = "SIGTERM handler is not set", "Started a local Ray instance", "Token authentication is enabled"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes Ray's log lines that contain one of these texts."""

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(text in message for text in _UNSAID)

    for name in RAY_START_LOGGERS:
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name in RAY_START_LOGGERS:
            logging.getLogger(name).removeFilter(keep)
