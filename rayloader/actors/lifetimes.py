"""The lifetimes of actors: which lease holds each of them, and how long it lives.

Promise: every change of an actor's state is made here.

    LENT --> STOPPING --> IDLE --> LENT again; LENT --> IDLE if no call is unanswered; any --> GONE

An actor is LENT from its creation on, to the lease of one fleet, whether it has found its place yet or not. A lease
ends by `end`, or with the last reference to it: its actors come back even if an exception or Ctrl-C interrupts its
holder at any line. Actors that `rayloader.init` has created in advance are IDLE, without a deadline, until they are
lent. STOPPING actors have not answered `stop`; late ones are killed. IDLE ones are warm: what user code has left in
their process is still there. They may be lent to any loader with the same options, and are killed some time after the
last such loader is gone; in a Ray that others use too, those that hold CPUs are killed so soon after their epoch,
because others may wait for these.

Threads: the users' threads lend. Everything else, below the line, is done by the thread of the `Janitor`, which ends
what finalizers leave behind, and keeps deadlines. `_lock` guards the step from IDLE to LENT or GONE; Ray calls under it
only take an instant.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError

from rayloader.actors._compat_ray import on_completed
from rayloader.actors.actor import Actor, ActorState, Lease, RayAnswer, wait_for
from rayloader.interrupts import new_lock
from rayloader.workers.connection import NONE_YET
from rayloader.workers.janitor import janitor

# How long an actor that was told to stop may continue: its work is of no use any more, but user code may have something
# to finalize. As long as torch waits for a worker.
STOP_TIMEOUT_S = 5.0
# How long a new epoch waits for actors that are stopping: about what a new actor would take to start, most of it CPU
# time for the import of torch, so that on a busy machine both take longer.
REUSE_WAIT_S = 2.5

logger = logging.getLogger("rayloader")


class Lifetimes:
    """The actors of one pool.

    Args:
        alive: whether the actors' Ray session still lives.

    Attributes:
        actors: all except those that are gone.
        closed: whether actors that come back are killed.
    """

    def __init__(self, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._lock = new_lock(reentrant=False)
        self.actors: list[Actor] = []
        self.closed = False

    def begin(self, actor: Actor, lease: Lease | None) -> None:
        """A new actor: lent to a lease, or idle where it was made in advance."""
        if lease is None:
            actor.state = ActorState.IDLE
        else:
            actor.lease = lease.ref
        self.actors.append(actor)

    def lend(self, lease: Lease, key: bytes, count: int) -> list[Actor]:
        """Lends up to `count` idle actors that prove to be alive; waits a little for those that are stopping."""
        give_up = time.monotonic() + REUSE_WAIT_S
        taken = self._take_idle(lease, key, count)
        while len(taken) < count:
            spare = [a for a in list(self.actors) if a.state is ActorState.STOPPING and a.key == key]
            stopping = [actor for actor in spare if not actor.ends]
            remaining = give_up - time.monotonic()
            if not stopping or remaining <= 0:
                break
            calls = [actor.stopped.ref for actor in stopping if actor.stopped is not None]
            wait_for(calls, min(len(stopping), count - len(taken)), remaining)
            taken += self._take_idle(lease, key, count - len(taken))
        return self._proved(taken) if self._alive() else []

    def _take_idle(self, lease: Lease, key: bytes, count: int) -> list[Actor]:
        with self._lock:
            self._settle()
            idle = [a for a in self.actors if a.state is ActorState.IDLE and a.key == key and not a.ends]
            # First those with CPUs of their own, which may have come when others of a fleet were at work already.
            idle = sorted(idle, key=lambda actor: -(actor.options.get("num_cpus") or 0))[:count]
            for actor in idle:
                actor.lease = lease.ref
                actor.state = ActorState.LENT
            return idle

    def _proved(self, actors: list[Actor]) -> list[Actor]:
        """Those that answer: they have finished `stop`, are as new, and have not died since. The others are killed."""
        new = [actor for actor in actors if actor.stopped is None]  # created in advance: nothing to prove
        probed = {actor: actor.stopped.ref for actor in actors if actor.stopped is not None}
        calls = [ref for actor, stopped in probed.items() for ref in (stopped, actor.handle.hello.remote())]
        answers = wait_for(calls, len(calls), STOP_TIMEOUT_S)
        alive = new
        for actor, *both in zip(probed, answers[::2], answers[1::2], strict=True):
            lost = any(answer is NONE_YET or isinstance(answer, RayError) for answer in both)
            if lost:  # it neither answers nor ends, or has died
                janitor.later(functools.partial(self.kill, actor))
            else:
                actor.lane.abandon()  # all its calls are answered
                actor.lane.rest(False)
                alive.append(actor)
        return alive

    def _settle(self) -> None:
        """Makes those idle that have answered `stop`, even if only by their death: `lend` will notice that."""
        stopping = [actor for actor in self.actors if actor.state is ActorState.STOPPING]
        if stopping and self._alive():
            for actor in stopping:
                if actor.stopped is not None and actor.stopped.value is not NONE_YET:
                    actor.state = ActorState.IDLE

    # ---- in the janitor's thread

    def end(self, lease: Lease, *, busy: bool, reuse: bool) -> None:
        """Takes back the actors of a lease.

        Args:
            lease: the one that ends.
            busy: calls may be unanswered.
            reuse: whether other fleets may have the processes.
        """
        for actor in list(self.actors):
            if actor.state is ActorState.LENT and actor.lease is lease.ref:
                actor.ends = not reuse
                self.give_back(actor, busy=busy)

    def give_back(self, actor: Actor, *, busy: bool) -> None:
        """Tells an actor to stop, and takes it back."""
        if actor.state is not ActorState.LENT:
            return
        if self.closed or not self._alive():
            self.kill(actor)
            return
        try:
            actor.stopped = RayAnswer(actor.handle.stop.remote())
        except Exception:  # whatever Ray raises; without this call it could be neither reused nor waited for
            self.kill(actor)
            return
        on_completed(actor.stopped.ref, functools.partial(self._stopped, actor))
        actor.lane.rest(True)
        actor.lease, actor.stop_by, actor.keep_until = None, time.monotonic() + STOP_TIMEOUT_S, math.inf
        actor.state = ActorState.STOPPING if busy else ActorState.IDLE

    def _stopped(self, actor: Actor, _: Any) -> None:  # in one of Ray's threads
        if actor.ends:
            janitor.later(functools.partial(self.kill, actor, if_spare=True))

    def kill(self, actor: Actor, *, if_spare: bool = False) -> None:
        """Ends an actor; with `if_spare` only if it is not lent, and after it has finished `stop`, if it does in time.

        Until then it finalizes what torch's workers finalize at their end, which may remove what they have created.
        """
        with self._lock:
            if actor.state is ActorState.GONE or (if_spare and actor.state is ActorState.LENT):
                return
            if if_spare and self._alive() and time.monotonic() < actor.stop_by:
                actor.ends = True
                if actor.stops:  # asked after that was set: from now on `_stopped` sees it
                    return
            if if_spare and self._alive() and self._finalizes(actor):
                return
            actor.state = ActorState.GONE
            self.actors.remove(actor)
        actor.let_go()
        if self._alive():
            with contextlib.suppress(RayError, ValueError):  # it may be gone already
                ray.kill(actor.handle)

    def _finalizes(self, actor: Actor) -> bool:
        """Tells an actor to finalize something, if it has said at its stop that it must; `_stopped` kills it then."""
        if actor.state is ActorState.LENT or actor.stopped is None or actor.stopped.value is not True:
            return False
        actor.stopped = RayAnswer(actor.handle.end.remote())
        actor.ends, actor.state, actor.stop_by = True, ActorState.STOPPING, time.monotonic() + STOP_TIMEOUT_S
        on_completed(actor.stopped.ref, functools.partial(self._stopped, actor))
        return True

    def kill_spare(self, *, but: bytes | None = None) -> None:
        """Ends all actors that are not lent, except for those with certain options."""
        for actor in list(self.actors):
            if actor.key != but:
                self.kill(actor, if_spare=True)

    def kill_all(self) -> None:
        """Ends all actors, those that are stopping after they have finished that, if they do in time."""
        self._wait_for_stops()
        if self._alive() and [actor for actor in self.actors if self._finalizes(actor)]:
            self._wait_for_stops()
        for actor in list(self.actors):
            self.kill(actor)

    def _wait_for_stops(self) -> None:
        stopping = [actor for actor in self.actors if actor.stops]
        if stopping and self._alive():
            seconds = max(actor.stop_by for actor in stopping) - time.monotonic()
            wait_for([actor.stopped.ref for actor in stopping if actor.stopped], len(stopping), seconds)

    def tidy(self, usable: Collection[bytes], grace: float, *, shared: bool) -> float | None:
        """Takes back the actors of lost leases, and kills those that are late.

        Args:
            usable: options of the loaders that live.
            grace: seconds that an actor is kept if no loader could use it.
            shared: others use this Ray too: an actor that reserves CPUs is kept no longer, whoever could use it.

        Returns:
            The seconds until the next deadline; None if there is none.
        """
        for actor in list(self.actors):
            if actor.state is ActorState.LENT and (actor.lease is None or actor.lease() is None):
                self.give_back(actor, busy=True)
        now = time.monotonic()
        spare = [actor for actor in list(self.actors) if actor.state is not ActorState.LENT]
        for actor in spare:
            stays = actor.is_new or (actor.key in usable and not (shared and actor.reserves))
            actor.keep_until = math.inf if stays else min(actor.keep_until, now + grace)
        if any(actor.state is ActorState.STOPPING and now >= actor.stop_by for actor in spare):
            with self._lock:
                self._settle()
        deadline = math.inf
        for actor in spare:
            moments = actor.keep_until, actor.stop_by if actor.stops else math.inf
            if now >= min(moments) or not self._alive():
                self.kill(actor, if_spare=True)
            if actor.state is not ActorState.GONE:
                deadline = min([deadline, *(moment for moment in moments if moment > now)])
        return max(0.0, deadline - now) if deadline < math.inf else None
