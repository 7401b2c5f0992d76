"""The actors: start, place, lend, replace and stop them. The driver's side of Ray.

Promise: every actor of this process belongs to the one `Pool` of the current Ray session, and is busy (lent to one
iterator), stopping, or idle. It dies with the last loader that could use it, with `shutdown()`, or with the driver.
Nothing here calls Ray once the session that the actors came from is gone (NOTE [sessions] in session.py).

Threads: any thread may call; `_lock` guards the state. Finalizers (`Crew.release`, a loader's end) may run in the
middle of anything, this file's critical sections included: they post to the inbox, and handle it at once only if the
lock is free; whoever holds the lock handles what came meanwhile. A timer, `rayloader-pool`, exists only while actors
that were told to stop have not answered (NOTE [no thread beside Ray's shutdown]).

NOTE [no thread beside Ray's shutdown]
While `ray.shutdown()` runs on one thread, another that calls Ray, or drops an ObjectRef, may end the process: the core
worker exits it (measured, with a thread that polled). So the actors are told to stop, and killed, on the threads that
use loaders, which are not in `ray.shutdown()` at that moment; and nothing here polls. The timer is the one exception,
once, `STOP_TIMEOUT_S` after an epoch was abandoned.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError

from rayloader import session
from rayloader.crew import Actor, ActorState, Crew, Returned
from rayloader.errors import RaySessionError, WorkerStartError
from rayloader.transport.codec import Encoded
from rayloader.transport.mapped import Mappings
from rayloader.transport.memory_file import MemoryFile, MemoryFileError
from rayloader.transport.replica import Image
from rayloader.worker import Worker

# How long an actor that was told to stop may work on: what it does is of no use any more.
STOP_TIMEOUT_S = 5.0
# How long a new epoch waits for actors that are stopping: about what a new actor would take to start.
REUSE_WAIT_S = 1.0
# How long an actor may wait for its place. Node managers add machines within minutes; without one nothing will come.
START_TIMEOUT_S = 60.0
AUTOSCALING_START_TIMEOUT_S = 600.0
# How long new actors may wait until idle ones of other loaders, which may hold what they need, have to go for them.
ROOM_PATIENCE_S = 5.0
START_TIMEOUT_VARIABLE = "RAYLOADER_START_TIMEOUT"

_remote_worker: Any = ray.remote(Worker)

_LOADER_GONE = object()


@dataclass(eq=False, slots=True)
class _LoaderEntry:
    """A loader that has iterated in this session."""

    ref: weakref.ref[object]  # its end posts a message
    key: bytes  # of the options that its actors are made with
    image: Image | None = None  # of its replica, as last shipped: the next is compared with it
    remembered: dict[str, Any] = field(default_factory=dict)


class Pool:
    """The actors of this process in one Ray session."""

    def __init__(self, session_name: session.SessionName) -> None:
        self.session_name = session_name
        self.closed = False
        self._actors: list[Actor] = []
        self._loaders: list[_LoaderEntry] = []
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # put() is safe in finalizers
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._autoscaling = False
        self._probe: MemoryFile | None = None  # tells whether a worker can open the files of this process
        with contextlib.suppress(MemoryFileError):
            self._probe = MemoryFile("probe", 1)

    def session_alive(self) -> bool:
        """Whether Ray is still the one that these actors live in."""
        return session.current() == self.session_name

    def acquire(self, loader: object, count: int, remote_args: dict[str, Any], *, fresh: bool) -> Crew:
        """Lends `count` actors to an iterator of `loader`: warm ones first, the rest started side by side.

        Does not wait until new ones run. With `fresh` none is reused.
        """
        key = cloudpickle.dumps(sorted(remote_args.items(), key=lambda item: item[0]))
        with self._locked():
            if self.closed:
                raise RaySessionError("the workers were shut down while iter() asked for them; call iter() again")
            self._register(loader, key)
            actors = [] if fresh else self._take_warm(count, key)
            try:
                actors += self._create(remote_args, count - len(actors), key)
            except BaseException:  # what Ray says of the options, a warning made an error, Ctrl-C: nobody has them
                for actor in actors:
                    self._take_back(actor, busy=False)
                raise
        return Crew(self, actors, remote_args, fresh=fresh)

    def more(self, remote_args: dict[str, Any], count: int, *, fresh: bool) -> list[Actor]:
        """More actors for a crew whose others were made with the same options; does not wait until new ones run."""
        key = cloudpickle.dumps(sorted(remote_args.items(), key=lambda item: item[0]))
        with self._locked():
            if self.closed:
                raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
            actors = [] if fresh else self._take_warm(count, key)
            return actors + self._create(remote_args, count - len(actors), key)

    def image(self, loader: object, encoded: Encoded, mappings: Mappings) -> Image:
        """The image of a loader's replica; what it has in common with the loader's last one is not written again.

        It is kept until the loader's end, or `shutdown`.
        """
        with self._locked():
            last = next((entry.image for entry in self._loaders if entry.ref() is loader), None)
        image = Image.write(encoded, mappings) if last is None else last.updated(encoded, mappings)
        with self._locked():
            for entry in self._loaders:
                if entry.ref() is loader:
                    entry.image = image
        return image

    def remembered(self, loader: object) -> dict[str, Any]:
        """What a loader's iterators leave to the next one; gone with the loader."""
        with self._locked():
            return next((entry.remembered for entry in self._loaders if entry.ref() is loader), {})

    def post(self, message: Any) -> None:
        """Takes a message and handles it if nobody else is at work here; safe in a finalizer."""
        self._inbox.put(message)
        self._handle_inbox()

    def live_actor_pids(self) -> set[int]:
        """Process ids of the actors that run, whoever uses them (test support)."""
        with self._locked():
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    actor.has_started()
            return {actor.address.pid for actor in self._actors if actor.address is not None}

    def live_memory_files(self) -> set[str]:
        """Names of the probe, the actors' arenas and pages and the loaders' images (test support)."""
        with self._locked():
            names = {name for actor in self._actors for name in actor.lane.arena_names}
            names |= {actor.page.file_name for actor in self._actors if actor.page is not None}
            if self._probe is not None:
                names.add(self._probe.address.name)
            images = [entry.image for entry in self._loaders if entry.image is not None]
            return names | {file.name for image in images for file in image.address.files}

    def check_start_limit(self, waited: float, pending: int, wanted: int, options: dict[str, Any]) -> None:
        """Makes room for actors that have not started for `waited` seconds, and gives up when that is too long.

        Raises:
            WorkerStartError: says what was asked for and what there is.
        """
        if waited > ROOM_PATIENCE_S:
            with self._locked():
                self._kill_spare()
        default = AUTOSCALING_START_TIMEOUT_S if self._autoscaling else START_TIMEOUT_S
        limit = _start_timeout(default)
        if waited < limit:
            return
        total, free = ray.cluster_resources(), ray.available_resources()
        interesting = [name for name in total if not name.startswith(("node:", "object_store"))]
        free_text = ", ".join(f"{name} {free.get(name, 0.0):g} of {total[name]:g}" for name in sorted(interesting))
        raise WorkerStartError(
            f"{pending} of {wanted} DataLoader workers found no place in the Ray cluster within {limit:g} s. "
            f"Each asks for {_in_words(options)}; free now: {free_text}. "
            f"Lower num_workers, leave CPUs to the workers (training may hold them all), ask for less with "
            f'ray_remote_args={{"num_cpus": 0}}, or raise {START_TIMEOUT_VARIABLE} (seconds) if nodes are still to come'
        )

    def shutdown(self) -> None:
        """Kills every actor; callable more than once."""
        with self._locked():
            self.closed = True
            for actor in list(self._actors):
                self._kill(actor)
            self._loaders.clear()  # and their images
            self._set_timer()
        if self._probe is not None:
            self._probe.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock, with the inbox handled before and after."""
        try:
            with self._lock:
                self._read_inbox()
                yield
        finally:
            self._handle_inbox()

    def _handle_inbox(self) -> None:
        """Handles what is in the inbox unless somebody else holds the lock, who will look when he is done."""
        while not self._inbox.empty() and self._lock.acquire(blocking=False):
            try:
                self._read_inbox()
            finally:
                self._lock.release()

    # ---- under the lock

    def _register(self, loader: object, key: bytes) -> None:
        for entry in self._loaders:
            if entry.ref() is loader:
                entry.key = key
                return
        self._loaders.append(_LoaderEntry(weakref.ref(loader, lambda _: self.post(_LOADER_GONE)), key))

    def _read_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, Returned):
                    for actor in message.gone:
                        self._kill(actor)
                    for actor in message.actors:
                        self._take_back(actor, busy=message.busy)
                self._loaders = [entry for entry in self._loaders if entry.ref() is not None]
                self._drop_unusable()
                self._set_timer()

    def _take_back(self, actor: Actor, *, busy: bool) -> None:
        if self.closed or actor not in self._actors or not self.session_alive():
            return
        try:
            actor.stopped = actor.handle.stop.remote()
        except Exception:  # Ray's reasons are many; without this call it could be neither reused nor waited for
            self._kill(actor)
            return
        actor.stop_by = time.monotonic() + STOP_TIMEOUT_S
        actor.state = ActorState.STOPPING if busy else ActorState.IDLE
        actor.lane.rest(True)

    def _drop_unusable(self) -> None:
        usable = {entry.key for entry in self._loaders}
        for actor in list(self._actors):
            if actor.state is not ActorState.BUSY and actor.key not in usable:
                self._kill(actor)

    def _take_warm(self, count: int, key: bytes) -> list[Actor]:
        """Idle actors that prove to be alive; waits a little for those that are stopping."""
        give_up = time.monotonic() + REUSE_WAIT_S
        self._settle(timeout=0)
        while True:
            idle = [actor for actor in self._actors if actor.state is ActorState.IDLE and actor.key == key]
            stopping = [a for a in self._actors if a.state is ActorState.STOPPING and a.key == key]
            remaining = give_up - time.monotonic()
            if len(idle) >= count or not stopping or remaining <= 0:
                break
            self._settle(timeout=remaining)
        return self._alive(idle[:count])

    def _alive(self, idle: list[Actor]) -> list[Actor]:
        """Takes those that answer: they have finished `stop`, and have not died since."""
        probes = [actor.handle.hello.remote() for actor in idle]
        if probes:
            ray.wait(probes, num_returns=len(probes), timeout=STOP_TIMEOUT_S)
        taken = []
        for actor, probe in zip(idle, probes, strict=True):
            try:
                ray.get([actor.stopped, probe], timeout=0)
            except RayError:  # GetTimeoutError included: it neither answers nor ends
                self._kill(actor)
            else:
                actor.lane.abandon()  # all its calls are answered
                actor.lane.rest(False)
                actor.state = ActorState.BUSY
                taken.append(actor)
        return taken

    def _settle(self, timeout: float) -> None:
        """Moves stopping actors on: to idle once they answered, to the grave once they are late."""
        stopping = [actor for actor in self._actors if actor.state is ActorState.STOPPING]
        if not stopping or not self.session_alive():
            return
        done, _ = ray.wait([actor.stopped for actor in stopping], timeout=timeout)
        if done and timeout > 0:  # one was waited for: take the others that came with it
            done, _ = ray.wait([actor.stopped for actor in stopping], num_returns=len(stopping), timeout=0)
        for actor in stopping:
            if actor.stopped in done:
                try:
                    ray.get(actor.stopped)
                    actor.state = ActorState.IDLE
                except RayError:
                    self._kill(actor)
            elif time.monotonic() >= actor.stop_by:
                self._kill(actor)

    def _kill(self, actor: Actor) -> None:
        if actor in self._actors:
            self._actors.remove(actor)
        actor.let_go()
        if self.session_alive():
            with contextlib.suppress(RayError, ValueError):  # it may be gone already
                ray.kill(actor.handle)

    def _create(self, remote_args: dict[str, Any], count: int, key: bytes) -> list[Actor]:
        if not count:
            return []
        self._make_room(remote_args, count, key)
        options = self._options(remote_args, count, key)
        probe = self._probe.address if self._probe is not None else None
        actors = []
        for _ in range(count):
            handle = _remote_worker.options(**options).remote()
            actor = Actor(handle, key, options, handle.hello.remote(probe), time.monotonic())
            self._actors.append(actor)
            actors.append(actor)
        return actors

    def _options(self, remote_args: dict[str, Any], count: int, key: bytes) -> dict[str, Any]:
        """Actor options; "DEFAULT" keeps the actors out of a placement group that Ray Tune would put them into."""
        # The one question to Ray without a public answer: would more nodes come if they were asked for?
        self._autoscaling = ray._private.state.state.get_max_resources_from_cluster_config() is not None
        options: dict[str, Any] = {"scheduling_strategy": "DEFAULT", "enable_task_events": False, **remote_args}
        if "num_cpus" not in options:
            options["num_cpus"] = self._cpus_per_worker(count, key)
        return options

    def _cpus_per_worker(self, count: int, key: bytes) -> float:
        """One where the cluster has, or can get, as many CPUs as this process has workers; else none, as torch."""
        total = ray.cluster_resources()
        if session.OVERSUBSCRIBE_RESOURCE in total:
            return 0
        cpus = total.get("CPU", 0)
        wanted = count + sum(actor.state is ActorState.BUSY or actor.key == key for actor in self._actors)
        if wanted <= cpus or self._autoscaling:
            return 1
        warnings.warn(
            f"This DataLoader will create {count} worker processes, {wanted} with those that live already. Our "
            f"suggested max number of worker in current system is {cpus:g} (the CPUs of the Ray cluster), which is "
            "smaller than what this DataLoader is going to create. The workers share CPUs now; lower the worker number "
            'to avoid potential slowness if necessary, or let them wait for CPUs with ray_remote_args={"num_cpus": 1}.',
            stacklevel=2,
        )
        return 0

    def _make_room(self, remote_args: dict[str, Any], count: int, key: bytes) -> None:
        """Kills the idle actors that `key`'s loaders cannot use if they may hold what new actors need."""
        if ray.available_resources().get("CPU", 0) < count * (remote_args.get("num_cpus", 1) or 0):
            self._kill_spare(but=key)

    def _kill_spare(self, *, but: bytes | None = None) -> None:
        for actor in list(self._actors):
            if actor.state is not ActorState.BUSY and actor.key != but:
                self._kill(actor)

    def _set_timer(self) -> None:
        """Has late actors killed even if nobody iterates again."""
        deadlines = [actor.stop_by for actor in self._actors if actor.state is ActorState.STOPPING]
        if self._timer is not None and not deadlines:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadlines and not _exiting:
            self._timer = threading.Timer(max(0.0, min(deadlines) - time.monotonic()), self._time_is_up)
            self._timer.name, self._timer.daemon = "rayloader-pool", True
            self._timer.start()

    def _time_is_up(self) -> None:
        with self._locked():
            if self._timer is threading.current_thread():
                self._timer = None
                self._settle(timeout=0)
                self._set_timer()


_pool: Pool | None = None
_pool_lock = threading.Lock()
_abandoned: Pool | None = None  # of the process that this one was forked from
_exiting = False


def exit_begins() -> None:
    """No more threads: Python does not start any at exit."""
    global _exiting
    _exiting = True


def _start_timeout(default: float) -> float:
    text = os.environ.get(START_TIMEOUT_VARIABLE, str(default))
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ValueError(f"{START_TIMEOUT_VARIABLE} must be a number of seconds >= 0, got {text!r}")
    return limit


def _in_words(options: dict[str, Any]) -> str:
    amounts = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    amounts.update(options.get("resources") or {})
    words = [f"{name} {amount:g}" for name, amount in amounts.items() if amount]
    places = {name: options.get(name) for name in ("accelerator_type", "label_selector", "scheduling_strategy")}
    words += [f"{name} {place}" for name, place in places.items() if place not in (None, "DEFAULT")]
    return ", ".join(words) or "no resources"


def get_pool() -> Pool:
    """The pool of the current Ray session; joins or starts Ray where there is none.

    Raises:
        RaySessionError: Ray cannot be used from here.
    """
    global _pool
    with _pool_lock:
        session_name = session.ensure()
        if _pool is None or _pool.closed or _pool.session_name != session_name:
            if _pool is not None:
                _pool.shutdown()  # of an ended session: no call reaches Ray
            _pool = Pool(session_name)
        return _pool


def shutdown() -> None:
    """Stops every worker of this process, and Ray if it was started for them. Live iterators raise afterwards."""
    global _pool
    with _pool_lock:
        if _pool is not None:
            _pool.shutdown()
            _pool = None
        session.end()


def live_actor_pids() -> set[int]:
    """Process ids of this process's actors that run (test support)."""
    return _pool.live_actor_pids() if _pool is not None else set()


def live_memory_files() -> set[str]:
    """Names of the memory files that this process's actors use (test support)."""
    return _pool.live_memory_files() if _pool is not None else set()


def _forget_after_fork() -> None:
    """A forked child has neither our threads nor Ray's: it must not touch the parent's actors."""
    global _pool, _pool_lock, _abandoned
    _abandoned = _pool  # kept: to drop its references would call Ray
    _pool, _pool_lock = None, threading.Lock()
    session.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
# Registered after Ray's own exit handler (imported above), so it runs before it, while the actors can still be reached.
atexit.register(shutdown)
