"""The actors of this process: started, lent to fleets, ended. The driver's side of Ray.

Promise: every actor of this process belongs to the one `Pool` of the current Ray session. It is lent to a fleet, or
warm for the next one; see lifetimes.py. It ends some time after its work, with `shutdown()`, or with the driver.
Nothing here calls Ray once the session that the actors came from is gone (NOTE [sessions] in session.py).

Threads: any thread may call. Finalizers (a lease's, a loader's, an iterator's) only enqueue
jobs for the janitor.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import cloudpickle
import ray
from ray.exceptions import RayError

from rayloader.actors import session
from rayloader.actors.actor import Actor, ActorState, Lease, RayAnswer
from rayloader.actors.cluster import INTERVAL_S, Cluster
from rayloader.actors.lifetimes import Lifetimes
from rayloader.actors.placement import Placement
from rayloader.actors.process import WorkerProcess
from rayloader.actors.session import SessionName
from rayloader.errors import RaySessionError, add_note
from rayloader.interrupts import new_lock
from rayloader.transport.memory_file import MemoryFile, MemoryFileError
from rayloader.workers import ray_use
from rayloader.workers.connection import NeverStarts
from rayloader.workers.janitor import ends_with_program, janitor

_remote_worker: Any = ray.remote(WorkerProcess)


class Pool:
    """The actors of this process in one Ray session."""

    def __init__(self, session_name: SessionName) -> None:
        self.session_name = session_name
        self.later = janitor.later  # passes a job to the janitor; for finalizers too, even at the interpreter's end
        self._lifetimes = Lifetimes(self.session_alive)
        self.placement = Placement(Cluster(self.session_alive, heard=self._tidy_soon))
        self._namespace = f"rayloader-{uuid.uuid4().hex}"  # of actors' names: another process may use the same names
        self._made: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # numbers of actors, by loader name
        self.without_lines: set[tuple[str, str]] = set()  # locations that no worker can connect to this process from
        self._probe: MemoryFile | None = None  # tells whether a worker can open the files of this process
        with contextlib.suppress(MemoryFileError):
            self._probe = MemoryFile("probe", 1)

    @property
    def closed(self) -> bool:
        """Whether `shutdown` was called."""
        return self._lifetimes.closed

    @property
    def actors(self) -> list[Actor]:
        """All that live, lent or not."""
        return list(self._lifetimes.actors)

    def session_alive(self) -> bool:
        """Whether the Ray session of these actors still lives."""
        return session.current() == self.session_name

    # ---- for fleets

    def begin_lease(self, name: str = "") -> Lease:
        """A lease for the fleet of an iterator; the actors lent to it come back with it.

        Args:
            name: of the loader, for the names of actors.
        """
        self.wait()  # after this, actors that finalizers have left are warm
        return Lease(self._tidy_soon, name)

    def has_warm(self, remote_args: dict[str, Any], count: int) -> bool:
        """Whether so many actors are warm, or becoming warm, for loaders with these options."""
        key = _key(remote_args)
        return sum(actor.key == key and actor.state is not ActorState.LENT for actor in self.actors) >= count

    def lend(self, lease: Lease, remote_args: dict[str, Any], count: int, *, fresh: bool) -> list[Actor]:
        """Lends `count` actors until the lease ends: those that others have left first, and new ones beside them.

        Waits for those that are late, but not until new ones run.
        """
        self.check()
        key = _key(remote_args)
        taken = [] if fresh else self._lifetimes.take(lease, key, count)
        if len(taken) < count and not fresh and self._is_garbage_lent(lease, key):
            taken += self._lifetimes.take(lease, key, count - len(taken))
        created = self._create(lease, remote_args, count - len(taken), key)
        proved = self._lifetimes.proved(taken)
        if len(proved) < len(taken):
            self.check()  # again after the wait: in an ended session a Ray call starts another one
            created += self._create(lease, remote_args, len(taken) - len(proved), key)
        return proved + created

    def _is_garbage_lent(self, lease: Lease, key: bytes) -> bool:
        """Whether actors were lent to garbage, and come back now, which saves the start of others.

        Such as a loader whose `collate_fn` is a method of its own, with persistent workers.
        """
        others = [actor for actor in list(self.actors) if actor.key == key and actor.lease not in (None, lease.ref)]
        if not others:
            return False
        gc.collect()
        if all(actor.lease is not None and actor.lease() is not None for actor in others):
            return False
        janitor.do(self.tidy)
        return True

    def check(self) -> None:
        """Raises RaySessionError unless the actors can be used."""
        if self.closed or not self.session_alive():
            raise RaySessionError("the workers, or their Ray, were shut down; call iter() on the loader again")

    def prepare(self, remote_args: dict[str, Any], count: int) -> None:
        """Creates actors in advance, for the next loaders that need them; does not wait until they run."""
        self._create(None, remote_args, count, _key(remote_args))

    def end(self, lease: Lease, *, busy: bool, reuse: bool) -> None:
        """Ends a lease. Not for finalizers, nor under a lock.

        Args:
            lease: the caller's.
            busy: calls may be unanswered.
            reuse: whether others may have the processes.
        """
        janitor.do(functools.partial(self._lifetimes.end, lease, busy=busy, reuse=reuse))

    def kill(self, actor: Actor) -> None:
        """Ends an actor soon."""
        self.later(functools.partial(self._lifetimes.kill, actor))

    def wait(self) -> None:
        """Waits until all jobs of the janitor are done. Not for finalizers, nor under a lock."""
        janitor.wait()

    def check_pending(self, pending: list[Actor], of: int) -> None:
        """Raises WorkerStartError if these actors have not started for too long."""
        for actor in self.actors:  # those of other fleets too: where many start at once, each has to wait for its turn
            with contextlib.suppress(RayError, NeverStarts):
                actor.has_started()
        news = [actor.started_at for actor in self.actors if actor.started_at is not None]
        waited = time.monotonic() - max([min(actor.created_at for actor in pending), *news])
        self.placement.check(pending, of, waited)

    # ---- ends

    def tidy(self) -> float | None:
        """Ends unused actors; returns the seconds until the next deadline. In the janitor's thread."""
        deadlines = [self._lifetimes.tidy()]
        if self.session_alive():
            deadlines.append(self._look_for_demand())
        return min((seconds for seconds in deadlines if seconds is not None), default=None)

    def shutdown(self) -> None:
        """Kills every actor; callable more than once."""
        self._lifetimes.closed = True
        janitor.do(self._lifetimes.kill_all)
        if self._probe is not None:
            self._probe.close()

    # ----

    def _look_for_demand(self) -> float | None:
        """Ends idle actors that are in the way of what else waits for room, which Ray is asked while there are any."""
        actors = self.actors
        idle = [actor for actor in actors if actor.state is ActorState.IDLE and not actor.ends and actor.holds]
        if not idle:
            return None
        pending = [actor for actor in actors if actor.state is ActorState.LENT and actor.address is None]
        for actor in self.placement.in_the_way(idle, pending):
            self._lifetimes.end_idle(actor)
        return INTERVAL_S

    def _tidy_soon(self, _: object = None) -> None:
        self.later(self.tidy)

    def _create(self, lease: Lease | None, remote_args: dict[str, Any], count: int, key: bytes) -> list[Actor]:
        if not count:
            return []
        options = self.placement.options(remote_args)
        places = self.placement.where(options, count, sum(actor.started_at is None for actor in self.actors))
        try:
            actors = [self._make(lease, key, options, *place) for place in places]
        except Exception as error:  # whatever Ray says of the user's options
            add_note(error, f"Ray refuses the workers' options; look at ray_remote_args={remote_args!r}")
            raise
        self.check()
        return actors

    def _make(
        self, lease: Lease | None, key: bytes, options: dict[str, Any], where: dict[str, Any], had_room: bool | None
    ) -> Actor:
        label = lease.name if lease is not None and lease.name else "worker"
        # Ray shows the name. It stays the actor's when another loader has it.
        named = {"name": f"rayloader:{label}:{next(self._made[label])}", "namespace": self._namespace}
        # Ray ends it if an interrupt comes before it is noted below.
        handle = _remote_worker.options(**options, **where, **named).remote()
        probe = self._probe.address if self._probe is not None else None
        actor = Actor(handle, key, options, RayAnswer(handle.hello.remote(probe)), had_room)
        self._lifetimes.begin(actor, lease)
        return actor


def _key(remote_args: dict[str, Any]) -> bytes:
    """A key that is equal for loaders that can share actors."""
    key: bytes = cloudpickle.dumps(sorted(remote_args.items(), key=lambda item: item[0]))
    return key


_pool: Pool | None = None
_pool_lock = new_lock(reentrant=False)
_abandoned: Any = None  # what the parent of this forked process owns


def _tidy() -> float | None:
    return _pool.tidy() if _pool is not None else None


def get_pool() -> Pool:
    """The pool of the current Ray session; joins or starts Ray if there is none.

    Raises:
        RaySessionError: Ray cannot be used from here.
    """
    with _pool_lock:
        return _get_pool(session.ensure())


def _get_pool(session_name: SessionName) -> Pool:
    """Does the work of `get_pool`, under the lock."""
    global _pool
    janitor.start()
    if _pool is None or _pool.closed or _pool.session_name != session_name:
        if _pool is not None:
            _pool.shutdown()  # of an ended session: it makes no call to Ray
        _pool = Pool(session_name)
    return _pool


def init(num_workers: int, remote_args: dict[str, Any], ray_options: dict[str, Any]) -> None:
    """Starts Ray, or joins the one that runs, and creates actors in advance; does not wait until these run."""
    with _pool_lock:
        pool = _get_pool(session.ensure(ray_options))
        ray_use.asked = True
        pool.prepare(remote_args, num_workers)


def shutdown() -> None:
    """Stops every actor of this process, and Ray if it was started for them. Live iterators raise afterwards."""
    global _pool
    with _pool_lock:
        if _pool is not None:
            _pool.shutdown()
            _pool = None
        janitor.end()
        session.asks.end()
        session.end()


def _forget_after_fork() -> None:
    """A forked child has neither our threads nor Ray's: it must not touch the parent's actors."""
    global _pool, _pool_lock, _abandoned
    _abandoned = _pool  # kept: dropping its references would call Ray
    _pool, _pool_lock = None, new_lock(reentrant=False)


os.register_at_fork(after_in_child=_forget_after_fork)
janitor.tidies.append(_tidy)
ends_with_program("actors", shutdown)
