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
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rayloader.actors._compat_ray import connection_of, session_name_of, tell_lacks
from rayloader.actors.start import SessionName, Starter, signals_stay
from rayloader.errors import RaySessionError
from rayloader.interrupts import new_lock
from rayloader.transport.line import closers
from rayloader.workers import ray_use
from rayloader.workers.janitor import janitor

_connected: tuple[weakref.ref[Any], SessionName] | None = None  # the last connection, and its session
_starter: Starter | None = None  # from the first use of a Ray until that Ray is shut down
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
    client = imported().util.client.ray
    session = current()
    if options and session is not None:
        raise RaySessionError(
            f"Ray is running already, so its options {', '.join(options)} would have no effect; call rayloader.init() "
            "before anything else starts Ray, or leave them out"
        )
    if session is None and not client.is_connected():
        starter = _start(options)
        if starter.was_slow:
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
    _starter = starter = Starter(imported(), options or {}, current)
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
            imported().shutdown()
    _let_starter_go()


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
        _let_starter_go()
        return result

    ray.shutdown = waits_for_our_threads  # type: ignore[attr-defined]


def forget() -> None:
    """To be called in a forked child, which must neither end nor use its parent's Ray."""
    global _starter, _shutdown_lock, _ask_lock, _importing
    _shutdown_lock, _ask_lock, _importing = new_lock(), new_lock(), new_lock()  # the parent's may have been held
    if _starter is not None:
        ray_use.forked |= not _starter.done
    _starter = None


os.register_at_fork(after_in_child=forget)
closers.append(forget)
janitor.between_jobs = no_shutdown
ray_use.is_own = started_here


def node_id() -> str:
    """The node that this process runs on."""
    return str(imported().get_runtime_context().get_node_id())


def node_ip() -> str:
    """This node's address for other nodes."""
    return str(imported().util.get_node_ip_address())


def uses_tls() -> bool:
    """Whether Ray encrypts its connections, according to Ray's own settings."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
