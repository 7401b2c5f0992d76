"""The Ray session: joined if there is one, started if there is none.

Promise: a Ray that was started here is ended here; any other is left alone. Afterwards the program's signal handlers,
random state and environment are as they were. See NOTE [sessions] for why all code that is about to call Ray compares
sessions first.

NOTE [sessions]
After `ray.shutdown()` the next call of Ray's API would quietly start a cluster, even at interpreter exit, and a new
session refuses the handles of the old one, or worse. So each use of a handle is preceded by a comparison of the names
of the session and the job (1 us); if they differ, Ray is not called at all.

NOTE [our thread and Ray's shutdown]
While one thread runs `ray.shutdown()`, another that calls Ray, or drops the last reference to one of Ray's objects, may
end the process or start a new cluster: the session may end between the comparison and the call (measured: in one of ten
shutdowns that immediately followed a finalizer). So `ray.shutdown` is wrapped here: it waits until the janitor's
thread, and the one that asks Ray's GCS, are between two jobs, and these threads wait until the shutdown is over. At
interpreter exit Ray calls its own function, not the wrapper; by then both have ended.

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
import functools
import logging
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import ray.util.client

from rayloader._compat import libc
from rayloader.actors._compat_ray import RAY_START_LOGGERS, connection_of, session_name_of, tell_lacks
from rayloader.errors import RaySessionError
from rayloader.interrupts import Bell, DaemonThread, new_lock
from rayloader.transport.line import closers
from rayloader.workers import ray_use
from rayloader.workers.janitor import Janitor, janitor

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


_connected: tuple[weakref.ref[Any], SessionName] | None = None  # the last connection, and its session
_starter: Starter | None = None  # from the first use of a Ray until that Ray is shut down
# See NOTE [our thread and Ray's shutdown]. Two, because the janitor does not wait for the thread that asks Ray's GCS.
_shutdown_lock = new_lock()  # held by `ray.shutdown`, and by the janitor's thread while it may call Ray
_ask_lock = new_lock()  # likewise, by the thread that asks


def current() -> SessionName | None:
    """The session that this process is connected to; None if it is not."""
    global _connected
    connection = connection_of(ray)
    if connection is None:
        return None
    connected = _connected
    if connected is not None and connected[0]() is connection:
        return connected[1]  # called for each batch: the rest takes Ray several microseconds
    session = session_name_of(ray, connection), ray.get_runtime_context().get_job_id()
    _connected = weakref.ref(connection), session
    return session


def ensure(options: Mapping[str, Any] | None = None) -> SessionName:
    """Joins the Ray that runs (initialized, or named by RAY_ADDRESS), or starts one on this machine.

    Args:
        options: of `ray.init`, the user's.

    Raises:
        RaySessionError: Ray can be neither joined nor started; or it is used through Ray Client, or by the parent of
            this forked process; or it runs, so that options come too late.
    """
    if ray_use.is_forked():
        raise RaySessionError(
            "Ray cannot be used in a process that was forked from one that uses it, because Ray's threads do not "
            'survive a fork; use workers="fork" or num_workers=0 here, or start this process with the spawn method'
        )
    if _starter is not None:
        _starter.wait()  # an interrupted use may have left it running
    client = ray.util.client.ray
    session = current()
    if options and session is not None:
        raise RaySessionError(
            f"Ray is running already, so its options {', '.join(options)} would have no effect; call rayloader.init() "
            "before anything else starts Ray, or leave them out"
        )
    if session is None and not client.is_connected():
        starter = _start(options)
        if _TOO_SLOW in str(starter.error):
            starter = _start(options)
        if starter.error is not None:
            raise starter.error
        session = current()
    if session is None or client.is_connected():
        raise RaySessionError(
            "rayloader needs a driver inside the cluster, but this one is connected through Ray Client (ray://); "
            'run the program on a node of the cluster, for instance with `ray job submit`, or use workers="fork"'
        )
    return session


def _start(options: Mapping[str, Any] | None) -> Starter:
    """Joins or starts Ray, by another thread than before: the daemons of a Ray that failed end with theirs."""
    global _starter
    _let_starter_go()
    _starter = starter = Starter(options or {})
    starter.wait()
    return starter


def _let_starter_go() -> None:
    """Ends the thread if its Ray is gone."""
    global _starter
    starter = _starter
    if starter is None or starter is threading.current_thread():
        return
    if starter.spent or starter.session != current():
        starter.leave()
        _starter = None


def started_here() -> bool:
    """Whether this process started the Ray that it is connected to."""
    starter = _starter
    return starter is not None and not starter.joins and starter.session is not None and current() == starter.session


def end() -> None:
    """Shuts Ray down if it was started here."""
    ray_use.asked = False
    if _starter is not None and not _starter.give_up():
        _starter.wait()  # as in `ensure`
    if started_here():
        with signals_stay():
            ray.shutdown()
    _let_starter_go()


def _wrap() -> None:
    """Makes Ray's shutdown know of our threads: see NOTE [our thread and Ray's shutdown]."""
    shutdown = ray.shutdown

    @functools.wraps(shutdown)
    def waits_for_our_threads(*args: Any, **kwargs: Any) -> Any:
        with _shutdown_lock, _ask_lock:
            result = shutdown(*args, **kwargs)
        _let_starter_go()
        return result

    ray.shutdown = waits_for_our_threads


def forget() -> None:
    """To be called in a forked child, which must neither end nor use its parent's Ray."""
    global _starter, _shutdown_lock, _ask_lock
    _shutdown_lock, _ask_lock = new_lock(), new_lock()  # the parent's may have been held
    if _starter is not None:
        ray_use.forked |= not _starter.done
    _starter = None


tell_lacks(ray)
_wrap()
os.register_at_fork(after_in_child=forget)
closers.append(forget)
# The thread that asks Ray's GCS; see placement.py.
asks = Janitor(name="rayloader-asks")
os.register_at_fork(after_in_child=asks.forget)
asks.between_jobs = lambda: _ask_lock
janitor.between_jobs = lambda: _shutdown_lock
ray_use.is_own = started_here


def node_id() -> str:
    """The node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def uses_tls() -> bool:
    """Whether Ray encrypts its connections, according to Ray's own settings."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


# ---- the start of Ray


class Starter(DaemonThread):
    """Calls `ray.init`, and lives as long as that Ray; see NOTE [who starts Ray].

    Args:
        options: of `ray.init`.

    Attributes:
        joins: whether that Ray runs already, and is to be joined.
        error: why there is no Ray.
        session: of that Ray.
        done: whether `error` or `session` is known.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(self._serve, "rayloader-session")
        self._options = options
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
                what = f"the Ray at {self._address}: is it running?" if self.joins else "Ray, which is still starting"
                logger.warning("rayloader: after %.0f s still waiting for %s", START_NOTICE_S, what)
            if not self.done and waited >= START_LIMIT_S:
                raise RaySessionError(
                    f"Ray has not started on this machine within {START_LIMIT_S:.0f} s; start the program again, or "
                    "run `ray start --head` before it and set RAY_ADDRESS=auto"
                )

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
            self.session = current()
        except BaseException as error:  # any error: it is raised where Ray was requested
            self.error = error
        random.setstate(state)
        self.done = True
        self._bell.ring()
        if self.error is None:
            self._leave.wait(threading.TIMEOUT_MAX)

    def _init(self) -> None:
        """Joins or starts Ray."""
        options = self._options
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
            given = f", or check the options {', '.join(options)}" if options else ""
            raise RaySessionError(
                f"the Ray that {named} names could not be joined; name a running one, or unset it. Ray said: {error}"
                if self.joins
                else "Ray could not be started on this machine: run `ray start --head` first and set RAY_ADDRESS=auto"
                f"{given}. Ray said: {error}"
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


def _is_said(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _UNSAID)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes Ray's log lines that contain one of these texts."""
    loggers = [logging.getLogger(name) for name in RAY_START_LOGGERS]
    for ray_logger in loggers:
        ray_logger.addFilter(_is_said)
    try:
        yield
    finally:
        for ray_logger in loggers:
            ray_logger.removeFilter(_is_said)
