"""The lifetimes of actors: which lease holds each of them, and how long it lives.

Promise: every change of an actor's state is made here.

    LENT --> IDLE --> LENT again; any --> GONE

An actor is LENT from its creation on, to the lease of one fleet, whether it has found its place yet or not. A lease
ends by `end`, or with the last reference to it: its actors come back even if an exception or Ctrl-C interrupts its
holder at any line. IDLE ones were told to stop, and are warm: what user code has left in their process is still there.
They may be lent to any loader with the same options, though they have not answered `stop` yet, and end `GRACE_S` after
they came back, or at once when something else in the cluster waits for what they hold (placement.py). Actors that
`rayloader.init` has created in advance are IDLE without a deadline until they are lent.

NOTE [Slow is not dead]
A process that gets no time on a busy machine does not answer for a while, and starting another one there takes much
longer. So `iter()` waits for a warm actor that is late, and for nothing else: it is given up when Ray says that it has
ended. Only code of the user's could keep it for ever. Where no batch was under way when it was told to stop, none runs,
and it is given up after `GIVE_UP_S`; otherwise it may be at a batch that nobody wants, and `UNWANTED_S` are enough.

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
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from rayloader.actors.actor import Actor, ActorState, Lease, RayAnswer, on_completed, wait_for
from rayloader.interrupts import new_lock
from rayloader.protocol import NONE_YET
from rayloader.workers.janitor import janitor

# How long actors are kept after their work: between two epochs lie a checkpoint, a validation, a notebook's cell.
GRACE_S = 60.0
# How long an actor that is to end may take to stop: its work is of no use any more, but user code may have something to
# finalize. As long as torch waits for a worker.
STOP_TIMEOUT_S = 5.0
# See NOTE [Slow is not dead].
GIVE_UP_S = 300.0
UNWANTED_S = 30.0
# After how many seconds of waiting for a late actor a line in the log says so.
LATE_NOTICE_S = 5.0

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

    def take(self, lease: Lease, key: bytes, count: int) -> list[Actor]:
        """Lends up to `count` idle actors, which may not be alive any more: see `proved`."""
        with self._lock:
            idle = [a for a in self.actors if a.state is ActorState.IDLE and a.key == key and not a.ends]
            idle.sort(key=lambda a: (a.address is None, a.was_busy and a.stops))  # first those that run and are free
            for actor in idle[:count]:
                actor.lease = lease.ref
                actor.state = ActorState.LENT
                if actor.stopped is None:  # it may not run yet, and its loader has waited no longer
                    actor.created_at = time.monotonic()
            return idle[:count]

    def proved(self, actors: list[Actor]) -> list[Actor]:
        """Those of the actors just taken that answer: they have finished `stop`, are as new, and have not died since.

        Waits for those that are late, see NOTE [Slow is not dead]; the others are killed.
        """
        if not self._alive():
            return []
        alive = [actor for actor in actors if actor.stopped is None]  # no user code has run there: nothing to prove
        asked = [actor for actor in actors if actor.stopped is not None]
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
                janitor.later(functools.partial(self.kill, actor))
            else:
                actor.lane.abandon()  # all its calls are answered
                actor.lane.rest(False)
                alive.append(actor)
        return alive

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
            if actor.has_started():
                actor.stopped = RayAnswer(actor.handle.stop.remote())
                on_completed(actor.stopped.ref, functools.partial(self._stopped, actor))
        except Exception:  # whatever Ray raises; without this call it could be neither reused nor waited for
            self.kill(actor)
            return
        actor.lane.rest(True)
        now = time.monotonic()
        actor.lease, actor.was_busy, actor.stop_by, actor.keep_until = None, busy, now + STOP_TIMEOUT_S, now + GRACE_S
        actor.state = ActorState.IDLE
        if actor.ends and not actor.stops:
            self.kill(actor)

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
        actor.lane.close()
        if self._alive():
            with contextlib.suppress(RayError, ValueError):  # it may be gone already
                ray.kill(actor.handle)

    def end_idle(self, actor: Actor) -> None:
        """Ends an actor, unless it was lent meanwhile, though its time has not come."""
        actor.keep_until = 0.0
        self.kill(actor, if_spare=True)

    def _finalizes(self, actor: Actor) -> bool:
        """Tells an actor to finalize something, if it has said at its stop that it must; `_stopped` kills it then."""
        if actor.state is ActorState.LENT or actor.stopped is None or actor.stopped.value is not True:
            return False
        actor.stopped = RayAnswer(actor.handle.end.remote())
        actor.ends, actor.stop_by = True, time.monotonic() + STOP_TIMEOUT_S
        on_completed(actor.stopped.ref, functools.partial(self._stopped, actor))
        return True

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
            wait_for([actor.stopped.ref for actor in stopping if actor.stopped], seconds)

    def tidy(self) -> float | None:
        """Takes back the actors of lost leases, and ends those whose time has come.

        Returns:
            The seconds until the next deadline; None if there is none.
        """
        for actor in list(self.actors):
            if actor.state is ActorState.LENT and (actor.lease is None or actor.lease() is None):
                self.give_back(actor, busy=True)
        now, ended = time.monotonic(), 0
        deadline = math.inf
        for actor in list(self.actors):
            if actor.state is ActorState.LENT:
                continue
            moments = actor.keep_until, actor.stop_by if actor.ends and actor.stops else math.inf
            if now >= min(moments) or not self._alive():
                ended += not actor.ends
                self.kill(actor, if_spare=True)
                moments = actor.keep_until, actor.stop_by if actor.stops else math.inf
            if actor.state is not ActorState.GONE:
                deadline = min([deadline, *(moment for moment in moments if moment > now)])
        if ended:
            logger.info("rayloader: %d worker processes end, which have been idle for %g s", ended, GRACE_S)
        return max(0.0, deadline - now) if deadline < math.inf else None
