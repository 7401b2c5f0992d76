"""The actors: start, place, lend, replace and stop them. The driver's side of Ray.

Promise: every actor of this process belongs to the one `Pool` of the current Ray session, and is busy (lent to one
iterator), stopping, or idle. It dies with the last loader that could use it, with `shutdown()`, or with the driver.
Nothing here calls Ray once the session that the actors came from is gone (see
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import cloudpickle
import ray
from ray.exceptions import GetTimeoutError, RayError

from rayloader import session
from rayloader.errors import RaySessionError, WorkerStartError
from rayloader.transport.codec import Encoded
from rayloader.worker import Result, Setup, Worker, WorkerAddress, to_wire

# How long an actor that was told to stop may work on: what it does is of no use any more.
STOP_TIMEOUT_S = 5.0
# How long a new epoch waits for actors that are stopping: about what a new actor would take to start.
REUSE_WAIT_S = 1.0
# How long an actor may wait for its place. Node managers add machines within minutes; without one nothing will come.
START_TIMEOUT_S = 60.0
AUTOSCALING_START_TIMEOUT_S = 600.0
START_TIMEOUT_VARIABLE = "RAYLOADER_START_TIMEOUT"
# How often the pool's thread looks at stopping actors, in seconds; it sleeps for good when there are none.
STOP_POLL_S = 0.1

_remote_worker: Any = ray.remote(Worker)

Ref = Any  # an ObjectRef; Ray's own type is generic over what nobody can check


class ActorState(Enum):
    """Who an actor works for."""

    BUSY = "busy"  # lent to an iterator
    STOPPING = "stopping"  # told to stop, not answered
    IDLE = "idle"  # warm, free for any loader with the same options


@dataclass(eq=False, slots=True)
class Actor:
    """One actor process; methods that take or give a `Ref` return at once."""

    handle: Any
    key: bytes  # of the options it was made with
    hello: Ref  # answered with its address once it runs
    created_at: float  # time.monotonic()
    state: ActorState = ActorState.BUSY
    address: WorkerAddress | None = None
    started_at: float | None = None  # time.monotonic() when it was first seen to run
    stopped: Ref = None  # answer to `stop`
    stop_by: float = 0.0  # time.monotonic()

    def has_started(self) -> bool:
        """Whether it runs by now; notes where. Raises RayError if it never will."""
        if self.address is None:
            try:
                address: Any = ray.get(self.hello, timeout=0)
            except GetTimeoutError:
                return False
            self.address, self.started_at = address, time.monotonic()
        return True

    def start(self, setup: Setup, replica: Ref) -> Ref:
        """`Worker.start`."""
        return self.handle.start.remote(setup, replica)

    def resume(self, shared_seed: int | None) -> Ref:
        """`Worker.resume`."""
        return self.handle.resume.remote(shared_seed)

    def run(self, task_ids: tuple[int, ...], indices: Encoded) -> Ref:
        """`Worker.run`, with the list of each task's indices."""
        return self.handle.run.remote(task_ids, to_wire(indices))


class ActorLost(Exception):
    """A worker's answer will not come: its actor, its node or the object is gone."""

    def __init__(self, worker_id: int, error: RayError) -> None:
        super().__init__(str(error).strip())
        self.worker_id = worker_id


class Crew:
    """The actors that one iterator owns, one a worker, until `release`."""

    def __init__(self, pool: Pool, actors: list[Actor]) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._released = False
        self.actors = actors

    @property
    def usable(self) -> bool:
        """Whether the actors are still this crew's and can be talked to."""
        return not self._released and not self._pool.closed and self._pool.session_alive()

    def check_session(self) -> None:
        """Raises RaySessionError unless the crew is usable."""
        if os.getpid() != self._pid:
            raise RaySessionError(
                "an iterator works in the process that made it, and this one was forked from it; "
                "call iter() on the loader again here"
            )
        if self._released or self._pool.closed:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        if not self._pool.session_alive():
            raise RaySessionError(
                "Ray was shut down while this iterator was live; its workers are gone: "
                "call iter() on the loader again, which starts anew"
            )

    def fetch(self, worker_id: int, ref: Ref, timeout: float) -> list[Result] | None:
        """What a worker's call returned; None if it has not within `timeout` seconds.

        Raises:
            ActorLost: it never will.
        """
        self.check_session()
        try:
            return ray.get(ref, timeout=timeout)
        except GetTimeoutError:
            return None
        except RayError as error:
            raise ActorLost(worker_id, error) from error

    def ready(self, refs: Sequence[Ref], *, count: int, timeout: float) -> list[Ref]:
        """Those of `refs` that are answered (or lost), once `count` of them are or after `timeout` seconds."""
        self.check_session()
        return ray.wait(list(refs), num_returns=min(count, len(refs)), timeout=timeout)[0]

    def put(self, replica: Encoded) -> Ref:
        """Ships once what all workers will open."""
        self.check_session()
        return ray.put(to_wire(replica))

    def check_started(self) -> None:
        """Notes which actors run by now.

        Raises:
            WorkerStartError: one has waited for its place for too long.
            ActorLost: one could not be started.
        """
        self.check_session()
        pending = []
        for worker_id, actor in enumerate(self.actors):
            try:
                if not actor.has_started():
                    pending.append(actor)
            except RayError as error:
                raise ActorLost(worker_id, error) from error
        if pending:
            oldest = min(actor.created_at for actor in pending)
            self._pool.check_start_limit(time.monotonic() - oldest, len(pending), len(self.actors))

    def address(self, worker_id: int) -> WorkerAddress | None:
        """Where a worker runs; None if it does not, or nobody can say any more."""
        actor = self.actors[worker_id]
        if self.usable:
            with contextlib.suppress(RayError):
                actor.has_started()
        return actor.address

    def release(self, *, busy: bool, lost: Sequence[int] = ()) -> None:
        """Gives the actors back; callable from a finalizer and more than once.

        Args:
            busy: calls may be unanswered.
            lost: workers whose actors are gone or must go.
        """
        if self._released or os.getpid() != self._pid:
            return
        self._released = True
        gone = [actor for worker_id, actor in enumerate(self.actors) if worker_id in lost]
        self._pool.post(_Returned([actor for actor in self.actors if actor not in gone], gone, busy=busy))


@dataclass(frozen=True, slots=True)
class _Returned:
    actors: list[Actor]
    gone: list[Actor]
    busy: bool


@dataclass(frozen=True, slots=True)
class _LoaderGone:
    loader_id: int


_END = object()


@dataclass(eq=False)
class Pool:
    """The actors of this process in one Ray session."""

    session_name: session.SessionName
    closed: bool = False
    _actors: list[Actor] = field(default_factory=list)
    _loaders: dict[int, bytes] = field(default_factory=dict)  # key of each live loader's options, by id()
    _inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)  # put() is safe in finalizers
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _autoscaling: bool = False
    _asked: str = ""  # resources that a new actor asks for, in words

    def session_alive(self) -> bool:
        """Whether Ray is still the one that these actors live in."""
        return session.current() == self.session_name

    def acquire(self, loader: object, count: int, remote_args: dict[str, Any], *, fresh: bool) -> Crew:
        """Lends `count` actors to an iterator of `loader`: warm ones first, the rest started side by side.

        Does not wait until new ones run. With `fresh` none is reused.
        """
        key = cloudpickle.dumps(sorted(remote_args.items(), key=lambda item: item[0]))
        with self._lock:
            self._register(loader, key)
            self._read_inbox()
            actors = [] if fresh else self._take_warm(count, key)
            missing = count - len(actors)
            if missing:
                options = self._options(remote_args, missing)
                self._make_room(options, missing, key)
                actors += [self._create(options, key) for _ in range(missing)]
            self._ensure_thread()
        return Crew(self, actors)

    def post(self, message: Any) -> None:
        """Hands work to the pool's thread; safe in a finalizer."""
        self._inbox.put(message)

    def live_actor_pids(self) -> set[int]:
        """Process ids of the actors that run, whoever uses them (test support)."""
        with self._lock:
            self._read_inbox()
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    actor.has_started()
            return {actor.address.pid for actor in self._actors if actor.address is not None}

    def check_start_limit(self, waited: float, pending: int, wanted: int) -> None:
        """Raises WorkerStartError, with what was asked for and what there is, if `waited` seconds are too long."""
        default = AUTOSCALING_START_TIMEOUT_S if self._autoscaling else START_TIMEOUT_S
        limit = float(os.environ.get(START_TIMEOUT_VARIABLE, default))
        if waited < limit:
            return
        total, free = ray.cluster_resources(), ray.available_resources()
        interesting = [name for name in total if not name.startswith(("node:", "object_store"))]
        free_text = ", ".join(f"{name} {free.get(name, 0.0):g} of {total[name]:g}" for name in sorted(interesting))
        raise WorkerStartError(
            f"{pending} of {wanted} DataLoader workers found no place in the Ray cluster within {limit:g} s. "
            f"Each asks for {self._asked or 'no resources'}; free now: {free_text}. "
            f"Lower num_workers, leave CPUs to the workers (training may hold them all), ask for less with "
            f'ray_remote_args={{"num_cpus": 0}}, or raise {START_TIMEOUT_VARIABLE} (seconds) if nodes are still to come'
        )

    def shutdown(self) -> None:
        """Kills every actor and ends the thread; callable more than once."""
        with self._lock:
            self.closed = True
            for actor in list(self._actors):
                self._kill(actor)
            self._loaders.clear()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._inbox.put(_END)
            thread.join()

    # ---- under the lock

    def _register(self, loader: object, key: bytes) -> None:
        if id(loader) not in self._loaders:
            finalizer = weakref.finalize(loader, self._inbox.put, _LoaderGone(id(loader)))
            finalizer.atexit = False  # at exit everything goes
        self._loaders[id(loader)] = key

    def _read_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._inbox.get_nowait())

    def _handle(self, message: Any) -> None:
        match message:
            case _LoaderGone(loader_id):
                self._loaders.pop(loader_id, None)
            case _Returned(actors, gone, busy):
                for actor in gone:
                    self._kill(actor)
                for actor in actors:
                    self._take_back(actor, busy=busy)
        self._drop_unusable()

    def _take_back(self, actor: Actor, *, busy: bool) -> None:
        if self.closed or actor not in self._actors or not self.session_alive():
            return
        actor.stopped = actor.handle.stop.remote()
        actor.stop_by = time.monotonic() + STOP_TIMEOUT_S
        actor.state = ActorState.STOPPING if busy else ActorState.IDLE

    def _drop_unusable(self) -> None:
        usable = set(self._loaders.values())
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
        taken = [actor for actor in idle if self._answers(actor)][:count]
        for actor in taken:
            actor.state = ActorState.BUSY
        return taken

    def _answers(self, actor: Actor) -> bool:
        """Whether an idle actor is alive: it has answered `stop`, and does not say otherwise now."""
        try:
            ray.get([actor.stopped, actor.handle.hello.remote()], timeout=REUSE_WAIT_S)
        except RayError:
            self._kill(actor)
            return False
        return True

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
            elif time.monotonic() > actor.stop_by:
                self._kill(actor)

    def _kill(self, actor: Actor) -> None:
        if actor in self._actors:
            self._actors.remove(actor)
        if self.session_alive():
            with contextlib.suppress(RayError, ValueError):  # it may be gone already
                ray.kill(actor.handle)

    def _create(self, options: dict[str, Any], key: bytes) -> Actor:
        handle = _remote_worker.options(**options).remote()
        actor = Actor(handle, key, handle.hello.remote(), time.monotonic())
        self._actors.append(actor)
        return actor

    def _options(self, remote_args: dict[str, Any], count: int) -> dict[str, Any]:
        """Actor options; "DEFAULT" keeps the actors out of a placement group that Ray Tune would put them into."""
        options: dict[str, Any] = {"scheduling_strategy": "DEFAULT", "enable_task_events": False, **remote_args}
        if "num_cpus" not in options:
            options["num_cpus"] = self._cpus_per_worker(count)
        asked = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus"), **options.get("resources", {})}
        self._asked = ", ".join(f"{name} {amount:g}" for name, amount in asked.items() if amount)
        return options

    def _cpus_per_worker(self, count: int) -> float:
        """One where the cluster has, or can get, as many CPUs as this process has workers; else none, as torch."""
        total = ray.cluster_resources()
        if session.OVERSUBSCRIBE_RESOURCE in total:
            return 0
        # The one question to Ray without a public answer: would more nodes come if they were asked for?
        self._autoscaling = ray._private.state.state.get_max_resources_from_cluster_config() is not None
        cpus = total.get("CPU", 0)
        wanted = len(self._actors) + count
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

    def _make_room(self, options: dict[str, Any], count: int, key: bytes) -> None:
        """Kills the idle actors that `key`'s loaders cannot use if they may hold the CPUs that new actors need."""
        if options["num_cpus"] and ray.available_resources().get("CPU", 0) < count * options["num_cpus"]:
            for actor in list(self._actors):
                if actor.state is not ActorState.BUSY and actor.key != key:
                    self._kill(actor)

    # ---- the thread

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="rayloader-pool", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        """Ends with `shutdown`, or by itself when there is nothing left to look after."""
        while True:
            with self._lock:
                stopping = any(actor.state is ActorState.STOPPING for actor in self._actors)
            try:
                message = self._inbox.get(timeout=STOP_POLL_S if stopping else None)
            except queue.Empty:
                message = None
            if message is _END:
                return
            with self._lock:
                if message is not None:
                    self._handle(message)
                self._settle(timeout=0)
                if not self._actors and not self._loaders:
                    self._thread = None
                    return


_pool: Pool | None = None
_pool_lock = threading.Lock()


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


def _forget_after_fork() -> None:
    """A forked child has neither our threads nor Ray's: it must not touch the parent's actors."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()
    session.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
# Registered after Ray's own exit handler (imported above), so it runs before it, while the actors can still be reached.
atexit.register(shutdown)
