"""The actors that one iterator owns, the workers that they host, and all that it may ask of them.

Promise: each method checks that the actors' Ray session still lives before it calls Ray, and raises `RaySessionError`
if not; what Ray raises about a lost actor, node or object arrives as `ActorLost`. A worker that has lost its process,
or is to move to another, goes on there as its journal says. `release` gives the actors back to the pool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayError

from rayloader import session
from rayloader.driver.actor import Actor, Lease, Ref
from rayloader.driver.answers import NONE_YET, Answers
from rayloader.driver.channel import ActorLost, Channel, Message
from rayloader.driver.placement import Verdict
from rayloader.driver.pool import Pool
from rayloader.driver.ways import Ways, all_see_us, is_near
from rayloader.driver.worker_slot import WorkerSlot
from rayloader.errors import RaySessionError
from rayloader.protocol import Setup, Source, WorkerAddress
from rayloader.replica.image import Image
from rayloader.state.journal import Journal, Resumed, Told
from rayloader.transport.lanes import Lent

# How often a wait for workers to say where they are looks whether that has become hopeless, in seconds.
LOCATE_TICK_S = 1.0
# How many processes that are to take over from those that help out may fail to start, before that is left as it is.
MOST_FAILED_STARTS = 3

logger = logging.getLogger("rayloader")

SESSION_ENDED = (
    "Ray was shut down while this iterator was live; its workers are gone: "
    "call iter() on the loader again, which starts anew"
)


class Crew:
    """The actors that one iterator owns, until `release`, and the workers that they host, dealt out in turn.

    Attributes:
        actors: in the order in which they host.
        slots: of the workers.
        ways: to its actors.
    """

    def __init__(self, pool: Pool, lease: Lease, remote_args: dict[str, Any], *, fresh: bool, lines: bool) -> None:
        self._pool = pool
        self._lease: Lease | None = lease  # None when the actors were given back
        self._channels: dict[Actor, Channel] = {}
        self._unflushed: set[Channel] = set()  # that were told something
        self._impatient: set[Channel] = set()  # that have more to wait for than descriptors can tell
        self._fresh = fresh  # no actor may have been another's before
        self._remote_args = remote_args
        self._pid = os.getpid()
        self._tell_at = time.monotonic() + session.NOTICE_S  # what is waited for
        self._answers = Answers()
        self.ways = Ways(pool, self._answers, lines=lines)
        self._image: Image | None = None  # kept for workers that have yet to open it
        self._carried: list[Any] = []
        self._dead: list[Actor] = []
        # Asked for, while others host their workers: these workers, and how many processes have failed to start.
        self._coming: dict[Actor, tuple[list[WorkerSlot], int]] = {}
        self.actors: list[Actor] = []
        self.slots: list[WorkerSlot] = []

    @classmethod
    def of(
        cls, pool: Pool, loader: object, count: int, remote_args: dict[str, Any], *, name: str, fresh: bool, lines: bool
    ) -> Crew:
        """A crew of `count` actors for an iterator of `loader`: warm ones first, the rest started side by side.

        Does not wait until new ones run. With `fresh` none is reused; with `lines` those on this machine are driven
        over local sockets, and those elsewhere by TCP.
        """
        crew = cls(pool, pool.begin_lease(loader, remote_args, name), remote_args, fresh=fresh, lines=lines)
        try:
            crew.lend(count)
        except BaseException:  # what Ray says of the options, a warning made an error, Ctrl-C
            crew.release(busy=False)
            raise
        return crew

    @property
    def usable(self) -> bool:
        """Whether the actors are still this crew's and can be talked to."""
        return self._lease is not None and not self._pool.closed and self._pool.session_alive()

    def lend(self, count: int, *, fresh: bool | None = None) -> list[Actor]:
        """Adds so many actors; does not wait until new ones run. `fresh`: unlike the others of the crew."""
        if self._lease is None:
            self.check_session()
            raise AssertionError("check_session() raises for a crew without a lease")
        fresh = self._fresh if fresh is None else fresh
        new = self._pool.lend(self._lease, self._remote_args, count, fresh=fresh)
        self.actors = self.actors + new
        return new

    def check_session(self) -> None:
        """Raises RaySessionError unless the crew is usable."""
        if os.getpid() != self._pid:
            raise RaySessionError(
                "an iterator works in the process that made it, and this one was forked from it; "
                "load with num_workers=0 here, or start this process with the spawn method"
            )
        if self._lease is None or self._pool.closed:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        if not self._pool.session_alive():
            raise RaySessionError(SESSION_ENDED)

    def check_connected(self) -> None:
        """The same where Ray was shut down and not started again, which costs next to nothing to see."""
        if not ray.is_initialized():
            self.check_session()

    # ---- channels

    def lane(self, actor: Actor) -> str:
        """How it is reached and how its batches travel, in words."""
        channel = self._channels.get(actor)
        return "" if channel is None else channel.lane

    def run(self, slot: WorkerSlot, task: Told) -> Lent | None:
        """Has a worker build a task's batch; see `Channel.run`."""
        return self._channel(slot).run(slot.worker_id, task)

    def replay(self, slot: WorkerSlot, tasks: Sequence[Told]) -> None:
        """Has a worker build again what it had built; without tasks it goes on with that."""
        self._channel(slot).replay(slot.worker_id, tasks)

    def resume(self, slot: WorkerSlot, resumed: Resumed) -> None:
        """Has a worker begin another epoch; its journal is told when it has."""
        self._channel(slot).resume(slot.worker_id, resumed)
        slot.journal.resumed = slot.host, slot.host.calls
        slot.began_at = slot.host.calls

    def drop(self, slot: WorkerSlot, from_task: int) -> None:
        """Nobody wants a worker's tasks of this epoch from this one on, of the calls made so far.

        What it builds again of the epoch before has numbers of its own, and is wanted. Workers that share a process are
        not told: their calls have one sequence of numbers.
        """
        if slot.host in self._channels and len(self.hosted_by(slot.host)) == 1:
            self._channel(slot).drop(slot.began_at, from_task)

    def flush(self) -> None:
        """To be called when the last of several calls has been made: before that they may not be on their way."""
        while self._unflushed:
            channel = self._unflushed.pop()
            channel.flush()
            self._watch(channel)

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; False if nothing has."""
        self.check_session()
        for ref in self.awaited:
            self._answers.watch(ref)
        if self._impatient:
            timeout = min(timeout, *(channel.patience for channel in self._impatient))
        return self._answers.wait(timeout)

    def read(self) -> None:
        """Reads what a wait has found, for `receive`: without the epoch's lock, where no interrupt can come."""
        for channel in list(self._answers.ready):
            if channel is not None:
                channel.read()

    def receive(self, *, all_channels: bool = True, was_read: bool = False) -> list[tuple[Actor, Message]]:
        """What the actors have sent.

        Args:
            all_channels: all of them; else those of which a wait has found that they have.
            was_read: only what `read` has read.
        """
        self.check_session()
        ready = self._answers.ready
        arrived = []
        for channel in list(self._channels.values()) if all_channels else {*ready, *self._impatient}:
            ready.discard(channel)  # first: what comes from here on makes it ready again
            if channel is not None:
                if not was_read:
                    channel.read()
                arrived += [(channel.actor, message) for message in channel.receive()]
                self._watch(channel)
        if arrived:
            self._answers.ring_others()
            if ActorLost in [type(message) for _, message in arrived]:
                self.check_session()  # Ray's shutdown is not the worker's fault
        return arrived

    def _watch(self, channel: Channel) -> None:
        """It may have to be waited for in another way than before."""
        self._answers.watch_descriptors(channel, tuple(channel.descriptors()))
        if channel.patience < math.inf:
            self._impatient.add(channel)
        else:
            self._impatient.discard(channel)

    def ring(self) -> None:
        """Ends a wait."""
        self._answers.ring()

    def fall_back(self, actor: Actor, reason: str) -> list[WorkerSlot]:
        """Does without a line to an actor.

        Returns:
            Its workers, which are to be started anew; they are away now.
        """
        self.ways.do_without_line(actor, reason)
        self._hang_up(actor)
        slots = self.hosted_by(actor)
        for slot in slots:
            self.restart(slot)
        return slots

    def _channel(self, slot: WorkerSlot) -> Channel:
        """To tell that worker something."""
        channel = self._channels[slot.host]
        self._unflushed.add(channel)
        return channel

    def _open_channel(self, actor: Actor) -> Channel:
        if actor not in self._channels:
            self._channels[actor] = self.ways.channel_to(actor)
        return self._channels[actor]

    @property
    def leased_bytes(self) -> int:
        """Of shared memory in which batches lie, the user's among them. Any thread may ask."""
        return sum(actor.lane.leased_bytes for actor in self.actors) + self.ways.leased_bytes

    def _hang_up(self, actor: Actor) -> None:
        channel = self._channels.pop(actor, None)
        if channel is not None:
            channel.close()
            self._watch(channel)

    def _leave(self, slot: WorkerSlot) -> None:
        """The worker's host is told that it is this worker no longer."""
        if slot.host in self._channels:
            self._channel(slot).pause()
        slot.host.leave(slot.worker_id)
        slot.host.lane.abandon(slot.worker_id)

    # ---- workers

    def start(self, image: Image, carried: list[Any], setups: list[Setup], journals: list[Journal]) -> None:
        """Tells the actors which workers they are.

        Raises:
            WorkerStartError: in a Ray that was not started here, a worker found no place.
        """
        self.check_session()
        self._image, self._carried = image, carried
        self.slots = [
            WorkerSlot(setup.worker_id, setup, journal, self.actors[setup.worker_id % len(self.actors)])
            for setup, journal in zip(setups, journals, strict=True)
        ]
        if not all_see_us():
            while any(actor.address is None and actor not in self._dead for actor in self.actors):
                self.wait(LOCATE_TICK_S)
                try:
                    self.check_started()
                except ActorLost as lost:  # its workers stay away; the epoch has them start elsewhere
                    self.lose(lost.actor)
        contents: list[Ref] = []
        for slot in self.slots:
            if slot.host not in self._dead:
                self._start_worker(slot, contents)

    def revive(self) -> list[WorkerSlot]:
        """Starts the workers that are away and have a host by now; the epoch is to tell them what their journals say.

        Raises:
            ActorLost: a host could not be started.
            WorkerStartError: one found no place.
        """
        if not any(slot.away for slot in self.slots):
            return []
        self.check_session()
        if not all_see_us():
            self.check_started()  # whoever moves is away already
        hosted = [slot for slot in self.slots if slot.away and slot.host not in self._dead]
        ready = [slot for slot in hosted if all_see_us() or slot.host.address is not None]
        contents: list[Ref] = []
        for slot in ready:
            self._start_worker(slot, contents)
        return ready

    def _start_worker(self, slot: WorkerSlot, contents: list[Ref]) -> None:
        actor, setup, journal = slot.host, slot.setup, slot.journal
        if journal.shared_seed is not None:
            setup = replace(setup, shared_seed=journal.shared_seed)
        source = self._source(actor, contents)
        self._open_channel(actor)
        self._channel(slot).pause()
        slot.began_at = actor.calls
        slot.started = actor.start(setup, source, journal.state)
        slot.away = False

    def _source(self, actor: Actor, contents: list[Ref]) -> Source:
        """What a worker is to open its replica from.

        Those that can open the driver's files do that. On any other node one makes an image for all workers there, from
        one object of Ray's that is made when the first needs it and then stands in `contents`.
        """
        assert self._image is not None
        where = actor.address
        if where is None or is_near(actor):
            return Source(self._image.address, self._carried)
        near = [
            a for a in self.actors if a not in self._dead and a.address is not None and a.address.place == where.place
        ]
        hosts = [a for a in near if a.hosts(self._image)]
        hosts += [a for a in near if a.hosted is not None and a.hosted[0] == self._image.address.name]
        host = hosts[0] if hosts else actor
        if not hosts:
            if not contents:
                contents.append(ray.put([PickleBuffer(content) for content in self._image.contents()]))
            host.host(self._image, contents[0])
        assert host.hosted is not None
        # In lists: Ray waits for what stands by itself, and would not call at all where it is lost.
        return Source(self._image.address, self._carried, [contents[0] if contents else None], [host.hosted[1]])

    def hosted_by(self, actor: Actor) -> list[WorkerSlot]:
        """The workers of an actor, none if it is not this crew's any more."""
        return [slot for slot in self.slots if slot.host is actor] if actor in self.actors else []

    @property
    def awaited(self) -> list[Ref]:
        """What is answered when workers that are away may be started, or may move."""
        hosts = {id(slot.host): slot.host for slot in self.slots if slot.away and slot.host not in self._dead}
        return [host.hello for host in (*hosts.values(), *self._coming)]

    def is_dead(self, actor: Actor) -> bool:
        """Whether the actor was lost."""
        return actor in self._dead

    def has_begun(self, slot: WorkerSlot) -> bool:
        """Whether the worker has got past its start, and into the epoch."""
        try:
            ray.get(slot.started, timeout=0)
        except RayError:  # it has not, or it never will
            return False
        return slot.journal.begun

    def lose(self, actor: Actor) -> None:
        """The actor is dead, or must not be trusted any more: it is killed, and what it shares with us is given up."""
        if actor not in self._dead:
            self._dead.append(actor)
            for slot in self.hosted_by(actor):
                slot.away = True
            self._hang_up(actor)
            self._pool.kill(actor)

    def replace(self, slot: WorkerSlot) -> bool:
        """Gives a worker whose actor is dead another one, with all that the old one hosted; False if it is not dead."""
        old = slot.host
        if old not in self._dead:
            return False
        hosts = self._survivors_of(old) if old.vanished else []
        own = self._own_of(old)
        if own or not hosts:
            (new,) = self.lend(1, fresh=True)  # idle ones may be as dead
            if hosts:
                self._coming[new] = own, 0
            else:
                hosts = [new]
        self._move([old], hosts)
        return True

    def _own_of(self, actor: Actor) -> list[WorkerSlot]:
        """The workers of an actor but for those that it hosts until their own comes."""
        others = [slot for slots, _ in self._coming.values() for slot in slots]
        return [slot for slot in self.hosted_by(actor) if slot not in others]

    def _survivors_of(self, vanished: Actor) -> list[Actor]:
        """Who can do the work of one whose node may be gone, those first who have the least.

        Ray takes a node that has lost power for alive for up to half a minute, and may give its room to a new actor.
        """
        gone = None if vanished.address is None else vanished.address.node_id
        there = [a for a in self.actors if a.address is not None and a not in self._dead and a.address.node_id != gone]
        return sorted(there, key=lambda actor: len(self.hosted_by(actor)))

    def spread(self) -> list[WorkerSlot]:
        """Has processes that have come late take over their workers from those that had to help out.

        Returns:
            The workers that move; they are away now.
        """
        moved = []
        for new, (slots, failed) in list(self._coming.items()):
            self._answers.watch(new.hello)  # to ask Ray each time would take long
            if self._answers[new.hello] is NONE_YET:
                continue
            self._answers.forget(new.hello)
            try:
                new.has_started()
            except RayError:  # it was given room on a node that is gone
                self._pool.kill(new)
                if failed < MOST_FAILED_STARTS:
                    (another,) = self.lend(1, fresh=True)
                    self.actors.remove(another)
                    self._coming[another] = slots, failed + 1
            else:
                for slot in slots:
                    if slot.host in self._channels and not slot.away:
                        self._leave(slot)
                    slot.host, slot.away = new, True
                    moved.append(slot)
                self.actors = list(dict.fromkeys(slot.host for slot in self.slots))
            del self._coming[new]
        return moved

    def resize(self, count: int) -> list[WorkerSlot]:
        """Another number of actors for the same workers.

        Returns:
            The workers that move; they are away now.
        """
        self.check_session()
        while self._coming:
            self._pool.give_back(self._coming.popitem()[0])
        self.lend(max(0, count - len(self.actors)))
        kept, spare = self.actors[:count], self.actors[count:]
        self.actors = kept
        moved = []
        for slot in self.slots:
            host = kept[slot.worker_id % len(kept)]
            if host is slot.host:
                continue
            if slot.host in kept:
                self._leave(slot)
            slot.host, slot.away = host, True
            moved.append(slot)
        for actor in spare:
            self._hang_up(actor)
            self._pool.give_back(actor)
        return moved

    def restart(self, slot: WorkerSlot) -> None:
        """The worker is to be started anew where it is, as its journal says; it is away until then."""
        if not slot.away:
            self.drop(slot, from_task=0)
            self._leave(slot)
        slot.away = True

    def _move(self, old: list[Actor], new: list[Actor]) -> list[WorkerSlot]:
        """Deals out the workers of some actors, which leave the crew, to others.

        Returns:
            The workers that move; they are away now.
        """
        moved = [slot for slot in self.slots if slot.host in old]
        for number, slot in enumerate(moved):
            slot.host, slot.away = new[number % len(new)], True
        self.actors = list(dict.fromkeys(slot.host for slot in self.slots))
        return moved

    def check_started(self) -> list[WorkerSlot]:
        """Notes which actors run by now, and sees to it that no worker waits for a process for too long.

        Returns:
            Workers that move to another actor, since theirs found no place; they are away now.

        Raises:
            WorkerStartError: none has found a place.
            ActorLost: one could not be started.
        """
        self.check_session()
        pending = []
        for actor in self.actors:
            if actor in self._dead:
                continue
            try:
                if not actor.has_started():
                    pending.append(actor)
            except RayError as error:
                self.check_session()
                raise ActorLost(actor, error) from error
        if not pending:
            return []
        if time.monotonic() >= self._tell_at:
            self._tell_at = math.inf
            self._pool.tell(pending, len(self.actors))
        hosts = [actor for actor in self.actors if actor not in pending and actor not in self._dead]
        match self._pool.verdict(pending, self._remote_args, others=bool(hosts)):
            case Verdict.SHARE_CPUS:
                pending = [actor for actor in pending if not actor.has_place()]
                hosts = self.lend(len(pending), fresh=True)
            case Verdict.GIVE_UP if hosts:
                self._pool.gave_up(pending, len(self.actors))
                for actor in pending:  # they come when there is room: another node, or what others have let go of
                    self._hang_up(actor)
                    if own := self._own_of(actor):
                        self._coming[actor] = own, 0
                    else:
                        self._pool.kill(actor)
                return self._move(pending, hosts)
            case Verdict.GIVE_UP:
                raise self._pool.start_error(pending, len(self.actors))
            case _:
                return []
        for actor in pending:
            self._hang_up(actor)
            self._pool.kill(actor)
        return self._move(pending, hosts)

    def address(self, slot: WorkerSlot) -> WorkerAddress | None:
        """Where a worker runs; None if it does not, or nobody can say any more."""
        if self.usable:
            with contextlib.suppress(RayError):
                slot.host.has_started()
        return slot.host.address

    def release(self, *, busy: bool, reuse: bool = True) -> None:
        """Gives the actors back; callable more than once. Not for finalizers.

        Args:
            busy: calls may be unanswered.
            reuse: whether others may have the processes.
        """
        if os.getpid() != self._pid:
            return
        lease, self._lease = self._lease, None  # an interrupt after this ends the lease too: nobody refers to it then
        if lease is not None:
            self._image = None
            for actor in list(self._channels):
                self._hang_up(actor)
            self._answers.ring()
            self.ways.close()
            self._pool.end(lease, busy=busy, reuse=reuse)

    def settle_output(self) -> None:
        """Waits until what the workers have logged so far is handled."""
        self._pool.output.settle()

    def later(self, job: Callable[[], object]) -> None:
        """Has something done by the thread that no finalizer can hinder; for finalizers."""
        self._pool.later(job)
