"""The Ray session: joined where there is one, started where there is none.

Promise: a Ray that was started here is ended here; any other is left as it is. See NOTE [sessions] for why everybody
who is about to call Ray compares sessions first.

NOTE [sessions]
After `ray.shutdown()` the next call of Ray's API would quietly start a cluster, also at interpreter exit, and in a
new session the handles of the old one are refused or worse. So each use of a handle is preceded by a comparison of
the session's and the job's name (1 us), and where they differ Ray is not called at all.

NOTE [our thread and Ray's shutdown]
While one thread runs `ray.shutdown()`, another that calls Ray, or drops the last reference to an object of Ray's, may
end the process or start a new cluster: the session may end between the comparison and the call (measured: one of ten
shutdowns that followed a finalizer at once). So `ray.shutdown` is wrapped here: it waits until the janitor's thread is
between two jobs, and that thread waits until the shutdown is over. At interpreter exit Ray calls its own function, not
the wrapper; by then the janitor has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import ray
import ray.util.client

from rayloader.errors import RaySessionError

# Marks a Ray that rayloader started: workers take no CPU slot there, as torch's processes take none.
OVERSUBSCRIBE_RESOURCE = "rayloader_oversubscribe"
# For Ray and its workers when we start it. glibc: keep big blocks instead of handing them back, for fresh pages are
# what a loader pays for. Ray: workers at the niceness of torch's; freed objects reclaimed at once, so that the next
# batch finds warm pages.
LOCAL_RAY_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "RAY_worker_niceness": "0",
    "RAY_free_objects_period_milliseconds": "0",
}

# Session and job; unique over time and clusters.
SessionName = tuple[str, str]

_started: SessionName | None = None  # of the Ray that was started here
_forked = False  # from a process that was connected to Ray
_shutdown_lock = threading.RLock()  # held by `ray.shutdown`, and by our thread while it may call Ray


def current() -> SessionName | None:
    """The session that this process is connected to; None if it is not."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_session_name(), context.get_job_id()


def ensure() -> SessionName:
    """Joins the Ray that runs (initialized, or named by RAY_ADDRESS), or starts one on this machine.

    Raises:
        RaySessionError: Ray is used through Ray Client, or by the parent of this forked process.
    """
    global _started
    if _forked:
        raise RaySessionError(
            "Ray cannot be used in a process that was forked from one that uses it: Ray's threads did not come along; "
            "use num_workers=0 here, or start this process with the spawn method"
        )
    session = current()
    if session is None:
        address = os.environ.get("RAY_ADDRESS")
        state = random.getstate()  # Ray draws from the program's generator
        try:
            if address and address != "local":
                ray.init(address=address)
            else:
                with _environment(LOCAL_RAY_ENVIRONMENT):
                    ray.init(address="local", include_dashboard=False, resources={OVERSUBSCRIBE_RESOURCE: 1})
                _started = current()
        finally:
            random.setstate(state)
        session = current()
    if session is None or ray.util.client.ray.is_connected():
        raise RaySessionError(
            "rayloader needs a driver inside the cluster, and this one is connected through Ray Client (ray://); "
            "run it on a node of the cluster, for instance with `ray job submit`"
        )
    return session


def started_here() -> bool:
    """Whether this process started the Ray that it is connected to."""
    return _started is not None and current() == _started


def end() -> None:
    """Shuts Ray down if it was started here."""
    global _started
    if started_here():
        ray.shutdown()
    _started = None


def no_shutdown() -> contextlib.AbstractContextManager[Any]:
    """Keeps `ray.shutdown` waiting, or waits for its end; see NOTE [our thread and Ray's shutdown]."""
    return _shutdown_lock


def _wrap_shutdown() -> None:
    shutdown = ray.shutdown

    @functools.wraps(shutdown)
    def waits_for_our_thread(*args: Any, **kwargs: Any) -> Any:
        with no_shutdown():
            return shutdown(*args, **kwargs)

    ray.shutdown = waits_for_our_thread


_wrap_shutdown()


def forget() -> None:
    """In a forked child: the parent's Ray is not ours to end, nor to use."""
    global _started, _forked, _shutdown_lock
    _shutdown_lock = threading.RLock()  # the parent's may have been held
    _started = None
    _forked = ray.is_initialized()


def node_id() -> str:
    """The node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def cpus_of_this_process() -> float:
    """What Ray has assigned to the task or actor that this process runs; none in a driver."""
    try:
        return float(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
    except AssertionError:  # how Ray says that this process is a driver
        return 0.0


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Adds what is not set already to this process's environment, for the processes started meanwhile."""
    added = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
