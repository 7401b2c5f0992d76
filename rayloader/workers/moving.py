"""Which process hosts each worker of a crew, and the workers' moves from one process to another.

Promise: a worker that moves is away until its crew has started it again, as its journal says. Actors that host others'
workers, until these have processes of their own, give them up when those processes have come.
"""

from __future__ import annotations

import math
import time

from ray.exceptions import RayError

from rayloader.workers.actor import Actor, Ref
from rayloader.workers.answers import Answers
from rayloader.workers.channel import ActorLost
from rayloader.workers.channels import Channels
from rayloader.workers.loan import Loan
from rayloader.workers.placement import Verdict
from rayloader.workers.worker_slot import WorkerSlot

# How many replacement processes may fail to start before the helping processes keep the work.
MOST_FAILED_STARTS = 3
# After how many seconds of waiting for processes, once Ray runs, a line in the log says what the program waits for.
NOTICE_S = 5.0


class Moving:
    """The hosts of one crew's workers.

    Args:
        loan: of its actors.
        channels: to them.
        answers: to Ray calls.

    Attributes:
        actors: in the order in which they host.
        slots: one for each worker.
    """

    def __init__(self, loan: Loan, channels: Channels, answers: Answers) -> None:
        self._loan = loan
        self._channels = channels
        self._answers = answers
        self._tell_at = time.monotonic() + NOTICE_S  # when to say what the program waits for
        # Requested while others host their workers: these workers, and how many processes have failed to start.
        self._coming: dict[Actor, tuple[list[WorkerSlot], int]] = {}
        self._replaced: list[Actor] = []  # replacements were requested, because their nodes will leave
        self.actors: list[Actor] = []
        self.slots: list[WorkerSlot] = []

    def lend(self, count: int) -> None:
        """Adds `count` actors; does not wait until new ones run."""
        self.actors = self.actors + self._loan.lend(count)

    def hosted_by(self, actor: Actor) -> list[WorkerSlot]:
        """The workers of an actor; none if it no longer belongs to this crew."""
        return [slot for slot in self.slots if slot.host is actor] if actor in self.actors else []

    @property
    def awaited(self) -> list[Ref]:
        """The Ray calls to wait for: their answers allow workers that are away to start, or to move."""
        hosts = {id(slot.host): slot.host for slot in self.slots if slot.away and not slot.host.lost}
        return [host.hello.ref for host in (*hosts.values(), *self._coming)]

    def lose(self, actor: Actor) -> None:
        """Kills an actor that is dead or not to be trusted any more, and gives up what it shares with this process."""
        if not actor.lost:
            actor.lost = True
            for slot in self.hosted_by(actor):
                slot.away = True
            self._end(actor)

    def _end(self, actor: Actor) -> None:
        """Kills an actor, and gives up what it shares with us."""
        self._channels.hang_up(actor)
        self._loan.pool.kill(actor)

    def replace(self, slot: WorkerSlot) -> bool:
        """Gives a worker whose actor is dead another one, with all that the old one hosted; False if it is not dead."""
        old = slot.host
        if not old.lost:
            return False
        own = self._own_of(old)
        hosts = self._survivors_of(old) if old.vanished or not own else []
        if own or not hosts:
            (new,) = self._loan.lend(1, fresh=True)  # idle ones may be just as dead
            if hosts:
                self._coming[new] = own, 0
            else:
                hosts = [new]
        self._move([old], hosts)
        return True

    def _own_of(self, actor: Actor) -> list[WorkerSlot]:
        """The workers of an actor, except for those that it hosts until their own actor comes."""
        others = [slot for slots, _ in self._coming.values() for slot in slots]
        return [slot for slot in self.hosted_by(actor) if slot not in others]

    def _survivors_of(self, vanished: Actor) -> list[Actor]:
        """Actors that can do the work of one whose node may be gone, those with the fewest workers first.

        If a node loses power, Ray regards it as alive for up to half a minute, and may place a new actor there.
        """
        gone = None if vanished.address is None else vanished.address.node_id
        there = [a for a in self.actors if a.address is not None and not a.lost and a.address.node_id != gone]
        stay = [actor for actor in there if not self._loan.pool.is_draining(actor)]
        return sorted(stay, key=lambda actor: len(self.hosted_by(actor)))

    @property
    def due(self) -> bool:
        """Whether there may be work for `spread`; the question costs next to nothing."""
        return bool(self._coming or self._loan.pool.draining)

    def spread(self) -> list[WorkerSlot]:
        """Moves workers to processes of their own that have come, and away from nodes that will leave.

        A process on such a node continues until its replacement has come, or until it is late. Others then host its
        workers.

        Returns:
            The workers that move; they are away now.
        """
        before = self.actors
        draining = [actor for actor in before if not actor.lost and self._loan.pool.is_draining(actor)]
        for actor in draining:
            if actor not in self._replaced and (own := self._own_of(actor)):
                (new,) = self._loan.lend(1, fresh=True)
                self._coming[new] = own, 0
                self._replaced.append(actor)
                for slot in own:
                    if slot.host in self._channels and not slot.away:
                        self._channels.hurry(slot)
        moved = self._take_over()
        for actor in draining:
            # if no actor stays, Ray must not be asked again for each batch
            if (hosts := self._survivors_of(actor)) and self._is_late(actor):
                for slot in self.hosted_by(actor):
                    self._leave(slot)
                moved += self._move([actor], hosts)
        for actor in before:
            if actor not in self.actors and not actor.lost:
                self._end(actor)
        return moved

    def use_joined_nodes(self) -> None:
        """Asks for processes on nodes that have joined, for workers whose processes had to share CPUs.

        They take over when they have come. For the beginning of an epoch: Ray is asked what is free.
        """
        crowded = [a for a in self.actors if not a.lost and not a.options.get("num_cpus") and self._own_of(a)]
        if crowded:
            for actor, new in zip(crowded, self._loan.lend_on_joined(len(crowded)), strict=False):
                self._coming[new] = self._own_of(actor), 0

    def _is_late(self, actor: Actor) -> bool:
        """Whether its workers must leave it at once: its node leaves, or they have waited long enough for room."""
        assert actor.address is not None
        node_id, draining = actor.address.node_id, self._loan.pool.draining
        if not draining.is_late(node_id, at_last=False):
            return False
        coming = [new for new, (slots, _) in self._coming.items() if actor in [slot.host for slot in slots]]
        has_room = bool(coming) and all(new.is_placed() for new in coming)  # then Ray is not asked again
        return not has_room or draining.is_late(node_id, at_last=True)

    def _take_over(self) -> list[WorkerSlot]:
        """Lets late processes take over their workers from those that have helped out."""
        moved = []
        for new, (slots, failed) in list(self._coming.items()):
            try:
                if not new.has_started():
                    continue
            except RayError:  # it was given room on a node that is gone
                self._loan.pool.kill(new)
                if failed < MOST_FAILED_STARTS:
                    (another,) = self._loan.lend(1, fresh=True)
                    self._coming[another] = slots, failed + 1
            else:
                for slot in slots:
                    self._leave(slot)
                    slot.host, slot.away = new, True
                    moved.append(slot)
                self.actors = list(dict.fromkeys(slot.host for slot in self.slots))
            self._answers.forget(new.hello.ref)  # a wait has watched it
            del self._coming[new]
        return moved

    def _leave(self, slot: WorkerSlot) -> None:
        """Tells the worker's host that it no longer is this worker, if it was ever told that it is."""
        if slot.host in self._channels and not slot.away:
            self._channels.leave(slot)

    def resize(self, count: int) -> list[WorkerSlot]:
        """Changes the number of actors that host the same workers.

        Returns:
            The workers that move; they are away now.
        """
        self._loan.check_session()
        while self._coming:
            self._loan.pool.give_back(self._coming.popitem()[0])
        self._replaced.clear()
        self.lend(max(0, count - len(self.actors)))
        kept, spare = self.actors[:count], self.actors[count:]
        self.actors = kept
        moved = []
        for slot in self.slots:
            host = kept[slot.worker_id % len(kept)]
            if host is slot.host:
                continue
            if slot.host in kept:
                self._channels.leave(slot)
            slot.host, slot.away = host, True
            moved.append(slot)
        for actor in spare:
            self._channels.hang_up(actor)
            self._loan.pool.give_back(actor)
        return moved

    def _move(self, old: list[Actor], new: list[Actor]) -> list[WorkerSlot]:
        """Deals the workers of some actors, which leave the crew, to other actors.

        Returns:
            The workers that move; they are away now.
        """
        moved = [slot for slot in self.slots if slot.host in old]
        for number, slot in enumerate(moved):
            slot.host, slot.away = new[number % len(new)], True
        self.actors = list(dict.fromkeys(slot.host for slot in self.slots))
        return moved

    def check_started(self) -> list[WorkerSlot]:
        """Notes which actors run by now, and makes sure that no worker waits for a process for too long.

        Returns:
            Workers that move to another actor because theirs found no place; they are away now.

        Raises:
            WorkerStartError: none has found a place.
            ActorLost: one could not be started.
        """
        self._loan.check_session()
        pending = []
        for actor in self.actors:
            if actor.lost:
                continue
            try:
                if not actor.has_started():
                    pending.append(actor)
            except RayError as error:
                self._loan.check_session()
                raise ActorLost(actor, error) from error
        if not pending:
            return []
        if time.monotonic() >= self._tell_at:
            self._tell_at = math.inf
            self._loan.pool.tell(pending, len(self.actors))
        hosts = [actor for actor in self.actors if actor not in pending and not actor.lost]
        match self._loan.pool.verdict(pending, self._loan.remote_args, others=bool(hosts)):
            case Verdict.SHARE_CPUS:
                pending = [actor for actor in pending if not actor.is_placed()]
                hosts = self._loan.lend(len(pending), fresh=True)
            case Verdict.GIVE_UP if hosts:
                self._loan.pool.gave_up(pending, len(self.actors))
                for actor in pending:  # they come when there is room: on a new node, or after other work
                    if own := self._own_of(actor):
                        self._channels.hang_up(actor)
                        self._coming[actor] = own, 0
                    else:
                        self._end(actor)
                return self._move(pending, hosts)
            case Verdict.GIVE_UP:
                raise self._loan.pool.start_error(pending, len(self.actors))
            case _:
                return []
        for actor in pending:
            self._end(actor)
        return self._move(pending, hosts)
