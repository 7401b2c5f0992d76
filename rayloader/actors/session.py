"""The Ray session: joined if there is one, started if there is none.

Promise: a Ray that was started here is ended here; any other is left alone. See NOTE [sessions] for why all code that
is about to call Ray compares sessions first.

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
again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import logging
import os
import random
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rayloader.actors._compat_ray import (
    RAY_START_LOGGERS,
    ask_for_token,
    connection_of,
    give_own_random,
    session_name_of,
    tell_lacks,
)
from rayloader.actors.fork_server import ExitReports, ForkServer, start_ray, with_variables
from rayloader.actors.private_files import keep_token_private, new_folder
from rayloader.actors.signals import SignalHandlers
from rayloader.errors import RaySessionError
from rayloader.interrupts import Bell, DaemonThread, new_lock
from rayloader.transport.line import closers
from rayloader.workers import ray_use
from rayloader.workers.janitor import janitor

# Marks a Ray that rayloader started: workers take no CPU slot there, as torch's processes take none.
OVERSUBSCRIBE_RESOURCE = "rayloader_oversubscribe"
# Set for Ray and its workers when we start it. glibc keeps big blocks instead of returning them, because fresh pages
# are a loader's main cost. Ray runs workers at the niceness of torch's, and reclaims freed objects at once, so that the
# next batch finds warm pages. Its processes may take as many seconds to start: the default of 30 is too few on a busy
# machine.
LOCAL_RAY_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "RAY_worker_niceness": "0",
    "RAY_free_objects_period_milliseconds": "0",
    # Ray would kill the children of a worker, and with them the resource tracker that removes its shared memory: the
    # worker itself does so when it exits, and the raylet ends the process group of one that was killed.
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_process_group_cleanup_enabled": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_port_wait_time_s": "300",
    # Of 60. Ray kills a worker that is late, and if that is one of the first, `ray.init()` never returns.
    "RAY_worker_register_timeout_seconds": "300",
}

# How often the wait for Ray's start checks whether it has missed the end of the start, in seconds.
START_TICK_S = 1.0
# After this many seconds of waiting for Ray, a line in the log says so. On two cores Ray and the first workers take
# five to eight.
START_NOTICE_S = 10.0
# After this many seconds an error: Ray waits for ever for its first workers if they need more than a minute.
START_LIMIT_S = 600.0

# Session and job; unique over time and clusters.
SessionName = tuple[str, str]

_connected: tuple[weakref.ref[Any], SessionName] | None = None  # the last connection, and its session
_started: SessionName | None = None  # the Ray that was started here
_starter: _Starter | None = None  # from the first use of a Ray until that Ray is shut down
logger = logging.getLogger("rayloader")
_ray: ModuleType | None = None  # once it was needed
_importing = new_lock()
_shutdown_lock = new_lock()  # held by `ray.shutdown`, and by the janitor's thread while it may call Ray
_ask_lock = new_lock()  # likewise, by the thread that asks Ray's GCS, which may take its time


def imported() -> ModuleType:
    """Ray, which is imported when it is first needed: a program whose workers are forks never imports it."""
    global _ray
    if _ray is None:
        with _importing:
            import ray
            import ray.util.client

            tell_lacks(ray)
            if _ray is None:
                _wrap(ray)
            _ray = ray
    return _ray


def current() -> SessionName | None:
    """The session that this process is connected to; None if it is not."""
    global _connected
    connection = connection_of(sys.modules.get("ray"))
    if connection is None:
        return None
    connected = _connected
    if connected is not None and connected[0]() is connection:
        return connected[1]  # called for each batch: the rest takes Ray several microseconds
    session = session_name_of(imported(), connection), imported().get_runtime_context().get_job_id()
    _connected = weakref.ref(connection), session
    return session


def ensure(options: dict[str, Any] | None = None, *, ahead: bool = False) -> SessionName:
    """Joins the Ray that runs (initialized, or named by RAY_ADDRESS), or starts one on this machine.

    Args:
        options: of `ray.init`, the user's.
        ahead: whether the program continues meanwhile.

    Raises:
        RaySessionError: Ray can be neither joined nor started; or it is used through Ray Client, or by the parent of
            this forked process.
    """
    if ray_use.is_forked():
        raise RaySessionError(
            "Ray cannot be used in a process that was forked from one that uses it, because Ray's threads do not "
            'survive a fork; use workers="fork" or num_workers=0 here, or start this process with the spawn method'
        )
    global _starter
    if _starter is not None:
        _starter.wait()  # an interrupted use may have left it running
    check_options(options or {})
    client = imported().util.client.ray
    session = current()
    if _starter is not None and _starter.fork_server is not None:
        _starter.fork_server.check()
    if session is None and not client.is_connected():
        _let_starter_go()
        _starter = _Starter(options or {}, ahead)
        _starter.wait()
        if _starter.error is not None:
            raise _starter.error
        session = current()
    if session is None or client.is_connected():
        raise RaySessionError(
            "rayloader needs a driver inside the cluster, but this one is connected through Ray Client (ray://); "
            'run the program on a node of the cluster, for instance with `ray job submit`, or use workers="fork"'
        )
    return session


def check_options(options: dict[str, Any]) -> None:
    """Raises RaySessionError if options of `ray.init` come too late."""
    if options and current() is not None:
        raise RaySessionError(
            f"Ray is running already, so its options {', '.join(options)} would have no effect; call rayloader.init() "
            "before anything else starts Ray, or leave them out"
        )


def check_names(options: dict[str, Any]) -> None:
    """Raises TypeError if `ray.init` has no options of such names."""
    known = inspect.signature(imported().init).parameters
    # All options that Ray hides, except one, begin with an underscore, and only Ray itself knows which exist.
    unknown = [name for name in options if name not in known and name[0] != "_" and name != "object_spilling_directory"]
    if unknown:
        raise TypeError(
            f"init() takes num_workers, ray_remote_args and what ray.init() takes, got {', '.join(unknown)}; choose "
            f"from num_workers, ray_remote_args, {', '.join(name for name in known if name != 'kwargs')}"
        )


class _Starter(DaemonThread):
    """Calls `ray.init`, and lives as long as that Ray; see NOTE [who starts Ray].

    Args:
        options: of `ray.init`.
        ahead: the program continues meanwhile.

    Attributes:
        error: why there is no Ray.
        session: of that Ray.
        fork_server: of that Ray, if it is started here; set before the session.
        reports: of the fork server of a Ray that is started for this process.
        done: whether `error` or `session` is known.
    """

    def __init__(self, options: dict[str, Any], ahead: bool) -> None:
        super().__init__(self._serve, "rayloader-session")
        self._options = options
        self._address = options.get("address") or os.environ.get("RAY_ADDRESS")
        self._joins = self._address not in (None, "", "local")
        self._ahead = ahead
        self.error: BaseException | None = None
        self.session: SessionName | None = None
        self.fork_server: ForkServer | None = None
        self.reports = ExitReports(None)
        self.done = False
        self._bell = Bell()
        self._leave = Bell()
        self._folder: str | None = None  # around that Ray's, which it ends with

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
                if self._joins:
                    text = "rayloader: waiting for the Ray at %s, which has not answered for %.0f s: is it running?"
                    logger.warning(text, self._address, START_NOTICE_S)
                else:
                    logger.warning("rayloader: waiting for Ray, which is still starting after %.0f s", START_NOTICE_S)
            if not self.done and waited >= START_LIMIT_S:
                raise RaySessionError(
                    f"Ray has not started on this machine within {START_LIMIT_S:.0f} s: on a very busy machine it may "
                    "give up its own workers, and wait for them for ever. End this program and start it again, or run "
                    "`ray start --head` before it and set RAY_ADDRESS=auto"
                )

    def leave(self) -> None:
        """Ends this thread, whose Ray has been shut down."""
        self._leave.ring()
        self.join()

    def forget(self) -> None:
        """To be called in a forked child."""
        self.reports.close()
        if self.fork_server is not None:
            self.fork_server.forget()

    def _serve(self) -> None:
        """Starts Ray, then waits for its end."""
        try:
            self._init()
            self.session = current()
        except BaseException as error:  # any error: it is raised where Ray was requested
            self.error = error
        self.done = True
        self._bell.ring()
        if self.error is None:
            self._leave.wait(threading.TIMEOUT_MAX)
        self.reports.close()
        if self.fork_server is not None:
            self.fork_server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _init(self) -> None:
        """Joins or starts Ray."""
        global _started
        options = self._options
        address, joins = self._address, self._joins
        give_own_random(imported())
        state = random.getstate()  # for Ray's modules that are imported only now
        handlers = SignalHandlers()
        try:
            with _quiet(_SIGNAL_LINES if joins else _START_LINES), _standard_streams():
                if joins:
                    imported().init(**{**options, "address": address})
                else:
                    resources = {OVERSUBSCRIBE_RESOURCE: 1, **(options.get("resources") or {})}
                    own = {"include_dashboard": False, **options, "address": "local", "resources": resources}
                    if "_temp_dir" not in own:
                        self._folder = new_folder()
                        own["_temp_dir"] = os.path.join(self._folder, "ray")
                    keep_token_private()
                    ask_for_token(imported())
                    with with_variables(LOCAL_RAY_ENVIRONMENT):
                        self.fork_server = ForkServer()
                        self.reports = self.fork_server.reports
                        start_ray(imported(), self.fork_server, own)
                    _started = current()
        except Exception as error:  # Ray's errors have no common type
            if self._ahead and current() is not None and not options:
                return  # the program has called ray.init() meanwhile: joins that Ray
            if connection_of(sys.modules.get("ray")) is None:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    _shut_down()  # Ray itself does not end what it has started
            if isinstance(error, RaySessionError):
                raise
            named = f"{'address' if options.get('address') else 'RAY_ADDRESS'}={address}"
            remedy = "call iter() again, or run `ray start --head` before the program and set RAY_ADDRESS=auto"
            if options:
                given = ", ".join(options)
                remedy = f"check the options that rayloader.init() was given ({given}); if they are right, {remedy}"
            raise RaySessionError(
                f"the Ray that {named} names could not be joined; set it to the address of a running Ray, or unset it "
                "to have one started on this machine. A running Ray takes no options for its start, and may ask for a "
                f"token (RAY_AUTH_MODE=token). Ray said: {error}"
                if joins
                else f"Ray could not be started on this machine: {remedy}. Ray said: {error}"
            ) from error
        finally:
            handlers.restore()
            if not self._ahead:  # otherwise the program may have drawn from it, or seeded it
                random.setstate(state)


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
    return _started is not None and current() == _started


def end() -> None:
    """Shuts Ray down if it was started here."""
    global _started
    ray_use.asked = False
    if _starter is not None and not _starter.give_up():
        _starter.wait()  # as in `ensure`
    if started_here():
        _shut_down()
    _started = None
    _let_starter_go()


def _shut_down() -> None:
    handlers = SignalHandlers()
    imported().shutdown()
    handlers.restore()


def no_shutdown() -> contextlib.AbstractContextManager[Any]:
    """Makes `ray.shutdown` wait, or waits for its end; see NOTE [our thread and Ray's shutdown]."""
    return _shutdown_lock


def no_shutdown_while_asked() -> contextlib.AbstractContextManager[Any]:
    """The same, for the thread that asks Ray's GCS: the janitor does not wait for it."""
    return _ask_lock


def _wrap(ray: ModuleType) -> None:
    """Makes Ray's shutdown know of our threads: see NOTE [our thread and Ray's shutdown]."""
    shutdown = ray.shutdown

    @functools.wraps(shutdown)
    def waits_for_our_threads(*args: Any, **kwargs: Any) -> Any:
        with no_shutdown(), no_shutdown_while_asked():
            result = shutdown(*args, **kwargs)
        _let_starter_go()  # the fork server ends with its Ray
        return result

    ray.shutdown = waits_for_our_threads  # type: ignore[attr-defined]


def forget() -> None:
    """To be called in a forked child, which must neither end nor use its parent's Ray."""
    global _started, _starter, _shutdown_lock, _ask_lock, _importing
    _shutdown_lock, _ask_lock, _importing = new_lock(), new_lock(), new_lock()  # the parent's may have been held
    if _starter is not None:
        ray_use.forked |= not _starter.done
        _starter.forget()
    _started = _starter = None


os.register_at_fork(after_in_child=forget)
closers.append(forget)
janitor.between_jobs = no_shutdown
ray_use.is_own = started_here


def exit_code(pid: int) -> int | None:
    """Of a worker process of this machine, as `subprocess` counts; None if only Ray has seen its end."""
    status = _starter.reports.exit_status(pid) if _starter is not None else None
    return None if status is None else os.waitstatus_to_exitcode(status)


def node_id() -> str:
    """The node that this process runs on."""
    return str(imported().get_runtime_context().get_node_id())


def node_ip() -> str:
    """This node's address for other nodes."""
    return str(imported().util.get_node_ip_address())


def uses_tls() -> bool:
    """Whether Ray encrypts its connections, according to Ray's own settings."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Lets Ray start where the program has no standard streams, or an object without a descriptor as standard error.

    Ray enables Python's fault handler, which needs one, unless it is enabled: so it is meanwhile, and writes nowhere.
    And C code writes to descriptor 2, which therefore must not become that of a socket or of a file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free: this one
    if faulthandler.is_enabled():
        yield
        return
    with open(os.devnull, "w") as nowhere:
        faulthandler.enable(nowhere, all_threads=False)
        try:
            yield
        finally:
            faulthandler.disable()


# Lines that Ray need not print: that it sets no SIGTERM handler outside the main thread (it must not set one); and
# about a Ray of ours, which no other program is to use, that it runs and how it is protected.
_SIGNAL_LINES = ("SIGTERM handler is not set",)
_START_LINES = (
    *_SIGNAL_LINES,
    "Started a local Ray instance",
    "Token authentication is enabled for this Ray cluster",
)


@contextlib.contextmanager
def _quiet(unsaid: tuple[str, ...]) -> Iterator[None]:
    """Mutes Ray's log lines that contain one of these texts."""

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(text in message for text in unsaid)

    for name in RAY_START_LOGGERS:
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name in RAY_START_LOGGERS:
            logging.getLogger(name).removeFilter(keep)
