"""The actors of this process: started, lent to fleets, ended. The driver's side of Ray.

Promise: every actor of this process belongs to the one `Pool` of the current Ray session, where every change of its
state is made. Nothing here calls Ray once the session that the actors came from is gone (NOTE [sessions] in
session.py).

    LENT --> IDLE --> LENT again, or ENDING; any --> GONE

An actor is LENT from its creation on, to the lease of one fleet, whether it has found its place yet or not. A lease
ends by `end`, or with the last reference to it: its actors come back even if an exception or Ctrl-C interrupts its
holder at any line. IDLE ones were told to stop, and are warm: what user code has left in their process is still there.
They may be lent to any loader with the same options, though they have not answered `stop` yet. They end `GRACE_S` after
they came back, with `shutdown()`, with the driver, or at once when something else in the cluster waits for what they
hold (placement.py); those that are ENDING finalize what user code has left, for a limited time. Actors that
`rayloader.init` has created in advance are IDLE without a deadline until they are lent.

NOTE [Slow is not dead]
A process that gets no time on a busy machine does not answer for a while, and starting another one there takes much
longer. So `iter()` waits for a warm actor that is late, and for nothing else: it is given up when Ray says that it has
ended. Only code of the user's could keep it for ever. Where no batch was under way when it was told to stop, none runs,
and it is given up after `GIVE_UP_S`; otherwise it may be at a batch that nobody wants, and `UNWANTED_S` are enough.

Threads: the users' threads lend and create, and any may ask. Everything else is done by the thread of the `Janitor`,
which ends what finalizers leave behind, and keeps deadlines: finalizers (a lease's, a loader's, an iterator's) only
enqueue jobs for it. `_lock` guards the steps from IDLE.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
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
from rayloader.actors.actor import Actor, ActorState, Lease, RayAnswer, wait_for
from rayloader.actors.placement import INTERVAL_S, Placement, wanted
from rayloader.actors.process import WorkerProcess
from rayloader.actors.session import SessionName
from rayloader.errors import RaySessionError, add_note
from rayloader.interrupts import new_lock
from rayloader.protocol import NONE_YET
from rayloader.transport.memory_file import MemoryFile, MemoryFileError
from rayloader.workers import ray_use
from rayloader.workers.connection import NeverStarts
from rayloader.workers.janitor import ends_with_program, janitor

# How long actors are kept after their work: between two epochs lie a checkpoint, a validation, a notebook's cell.
GRACE_S = 60.0
# How long an actor that ends may finalize: its work is of no use any more. As long as torch waits for a worker.
STOP_TIMEOUT_S = 5.0
# See NOTE [Slow is not dead].
GIVE_UP_S = 300.0
UNWANTED_S = 30.0
# After how many seconds of waiting for a late actor a line in the log says so.
LATE_NOTICE_S = 5.0

logger = logging.getLogger("rayloader")
_remote_worker: Any = ray.remote(WorkerProcess)


class Pool:
    """The actors of this process in one Ray session.

    Attributes:
        closed: whether `shutdown` was called, so that actors that come back are killed.
        placement: of the actors.
        without_lines: locations that no worker can connect to this process from.
    """

    def __init__(self, session_name: SessionName) -> None:
        self.session_name = session_name
        self.closed = False
        self.later = janitor.later  # passes a job to the janitor; for finalizers too, even at the interpreter's end
        self._lock = new_lock(reentrant=False)
        self._actors: list[Actor] = []  # except those that are gone
        self.placement = Placement(self.session_alive, heard=self._tidy_soon)
        self._namespace = f"rayloader-{uuid.uuid4().hex}"  # of actors' names: another process may use the same names
        self._made: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # numbers of actors, by loader name
        self.without_lines: set[tuple[str, str]] = set()
        self._probe: MemoryFile | None = None  # tells whether a worker can open the files of this process
        with contextlib.suppress(MemoryFileError):
            self._probe = MemoryFile("probe", 1)

    @property
    def actors(self) -> list[Actor]:
        """All that live, lent or not."""
        return list(self._actors)

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
        return sum(actor.key == key and actor.state is ActorState.IDLE for actor in self.actors) >= count

    def lend(self, lease: Lease, remote_args: dict[str, Any], count: int, *, fresh: bool) -> list[Actor]:
        """Lends `count` actors until the lease ends: those that others have left first, and new ones beside them.

        Waits for those that are late, but not until new ones run.
        """
        self.check()
        key = _key(remote_args)
        taken = [] if fresh else self._take(lease, key, count)
        others = [a for a in self.actors if a.key == key and a.state is ActorState.LENT and a.lease is not lease.ref]
        if len(taken) < count and not fresh and others:
            gc.collect()  # they may be lent to garbage: to a loader with persistent workers that refers to itself
            janitor.do(self.tidy)
            taken += self._take(lease, key, count - len(taken))
        created = self._create(lease, remote_args, count - len(taken), key)
        proved = self._proved(taken)
        if len(proved) < len(taken):
            self.check()  # again after the wait: in an ended session a Ray call starts another one
            created += self._create(lease, remote_args, len(taken) - len(proved), key)
        return proved + created

    def _take(self, lease: Lease, key: bytes, count: int) -> list[Actor]:
        """Lends up to `count` idle actors, which may not be alive any more: see `_proved`."""
        with self._lock:
            idle = [actor for actor in self._actors if actor.state is ActorState.IDLE and actor.key == key]
            # First those that run and are free.
            idle.sort(key=lambda a: (a.address is None, a.was_busy and not (a.stopped and a.stopped.succeeded)))
            for actor in idle[:count]:
                actor.lease = lease.ref
                actor.state = ActorState.LENT
                if actor.stopped is None:  # it may not run yet, and its loader has waited no longer
                    actor.created_at = time.monotonic()
            return idle[:count]

    def _proved(self, taken: list[Actor]) -> list[Actor]:
        """Those of the actors just taken that answer: they have finished `stop`, are as new, and have not died since.

        Waits for those that are late, see NOTE [Slow is not dead]; the others are killed.
        """
        if not self.session_alive():
            return []
        asked = [actor for actor in taken if actor.stopped is not None]  # in others no user code has run
        calls = [actor.handle.hello.remote() for actor in asked]  # which comes after `stop`
        limits = [UNWANTED_S if actor.was_busy else GIVE_UP_S for actor in asked]
        began, until_notice = time.monotonic(), min([LATE_NOTICE_S, *limits])
        answers = wait_for(calls, until_notice)
        if late := answers.count(NONE_YET):
            logger.warning(
                "rayloader: waiting for %d warm worker processes, which have not answered for %g s: the machine is "
                "busy, or they are still at batches that nobody wants",
                late,
                until_notice,
            )
        proved = [actor for actor in taken if actor.stopped is None]
        for actor, call, answer, limit in zip(asked, calls, answers, limits, strict=True):
            if answer is NONE_YET:
                (answer,) = wait_for([call], began + limit - time.monotonic())
            if answer is NONE_YET:
                logger.warning(
                    "rayloader: a warm worker process is ended, which has not answered for %g s; a new one takes its "
                    "place",
                    limit,
                )
            if answer is NONE_YET or isinstance(answer, RayError):
                self.kill(actor)
            else:
                actor.lane.abandon()  # all its calls are answered
                actor.lane.rest(False)
                proved.append(actor)
        return proved

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

        def take_back() -> None:
            for actor in self.actors:
                if actor.lease is lease.ref:
                    self._give_back(actor, busy=busy, reuse=reuse)

        janitor.do(take_back)

    def kill(self, actor: Actor) -> None:
        """Ends an actor soon."""
        self.later(functools.partial(self._kill, actor))

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

    # ---- in the janitor's thread

    def _give_back(self, actor: Actor, *, busy: bool = True, reuse: bool = True) -> None:
        """Tells an actor to stop, and takes it back."""
        try:
            if self.closed or not self.session_alive():
                self._kill(actor)
                return
            if actor.has_started():
                actor.stopped = RayAnswer(actor.handle.stop.remote())
        except Exception:  # whatever Ray raises; without this call it could be neither reused nor waited for
            self._kill(actor)
            return
        actor.lane.rest(True)
        actor.lease, actor.was_busy, actor.keep_until = None, busy, time.monotonic() + GRACE_S
        actor.state = ActorState.IDLE if reuse else ActorState.ENDING
        if not reuse:
            self._finalize(actor)

    def _end_idle(self, actor: Actor) -> None:
        """Ends an actor, unless it was lent meanwhile."""
        with self._lock:
            if actor.state is not ActorState.IDLE:
                return
            actor.state = ActorState.ENDING
        self._finalize(actor)

    def _finalize(self, actor: Actor) -> None:
        """Lets an actor finalize what torch's workers finalize at their end, for a limited time, and kills it then."""
        actor.keep_until = time.monotonic() + STOP_TIMEOUT_S
        if actor.stopped is None or not self.session_alive():  # no user code has run there
            self._kill(actor)
            return
        actor.stopped = RayAnswer(actor.handle.end.remote(), functools.partial(self.kill, actor))

    def _kill(self, actor: Actor) -> None:
        with self._lock:
            if actor.state is ActorState.GONE:
                return
            actor.state = ActorState.GONE
            self._actors.remove(actor)
        actor.lane.close()
        if self.session_alive():
            with contextlib.suppress(RayError, ValueError):  # it may be gone already
                ray.kill(actor.handle)

    def _end_all(self) -> None:
        for actor in self.actors:
            self._end_idle(actor)
        if self.session_alive():
            wait_for([a.stopped.ref for a in self.actors if a.state is ActorState.ENDING and a.stopped], STOP_TIMEOUT_S)
        for actor in self.actors:
            self._kill(actor)

    def tidy(self) -> float | None:
        """Takes back the actors of lost leases, and ends those whose time has come.

        Returns:
            The seconds until the next deadline; None if there is none.
        """
        for actor in self.actors:
            if actor.state is ActorState.LENT and (actor.lease is None or actor.lease() is None):
                self._give_back(actor)
        now, alive, ended = time.monotonic(), self.session_alive(), 0
        for actor in self.actors:
            state = actor.state
            if state is ActorState.LENT or (alive and now < actor.keep_until):
                continue
            if state is ActorState.IDLE:
                ended += 1
                self._end_idle(actor)
            else:
                self._kill(actor)
        if ended:
            logger.info("rayloader: %d worker processes end, which have been idle for %g s", ended, GRACE_S)
        looks = alive and self._make_room()
        deadline = min((a.keep_until for a in self.actors if a.state is not ActorState.LENT), default=math.inf)
        deadline = min(deadline, now + INTERVAL_S) if looks else deadline
        return max(0.0, deadline - now) if deadline < math.inf else None

    def _make_room(self) -> bool:
        """Ends idle actors that are in the way of what else waits for room; whether there are any that hold something.

        While there are, Ray is asked what waits.
        """
        idle = [a for a in self.actors if a.state is ActorState.IDLE and a.address and wanted(a.options).amounts]
        if idle:
            pending = [a for a in self.actors if a.state is ActorState.LENT and a.address is None]
            for actor in self.placement.in_the_way(idle, pending):
                self._end_idle(actor)
        return bool(idle)

    # ----

    def shutdown(self) -> None:
        """Kills every actor; callable more than once."""
        self.closed = True
        janitor.do(self._end_all)
        if self._probe is not None:
            self._probe.close()

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
        if lease is None:
            actor.state = ActorState.IDLE
        else:
            actor.lease = lease.ref
        self._actors.append(actor)
        return actor


def _key(remote_args: dict[str, Any]) -> bytes:
    """A key that is equal for loaders that can share actors."""
    key: bytes = cloudpickle.dumps(sorted(remote_args.items(), key=lambda item: item[0]))
    return key


_pool: Pool | None = None
_pool_lock = new_lock()
_abandoned: Any = None  # what the parent of this forked process owns


def _tidy() -> float | None:
    return _pool.tidy() if _pool is not None else None


def get_pool(ray_options: dict[str, Any] | None = None) -> Pool:
    """The pool of the current Ray session; joins or starts Ray, with these options, if there is none.

    Raises:
        RaySessionError: Ray cannot be used from here.
    """
    global _pool
    with _pool_lock:
        session_name = session.ensure(ray_options)
        janitor.start()
        if _pool is None or _pool.closed or _pool.session_name != session_name:
            if _pool is not None:
                _pool.shutdown()  # of an ended session: it makes no call to Ray
            _pool = Pool(session_name)
        return _pool


def init(num_workers: int, remote_args: dict[str, Any], ray_options: dict[str, Any]) -> None:
    """Starts Ray, or joins the one that runs, and creates actors in advance; does not wait until these run."""
    with _pool_lock:
        pool = get_pool(ray_options)
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
    _pool, _pool_lock = None, new_lock()


os.register_at_fork(after_in_child=_forget_after_fork)
janitor.tidies.append(_tidy)
ends_with_program("actors", shutdown)
