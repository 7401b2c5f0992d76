"""The workers of one iterator, and all that it may ask of them and of the actors that host them.

Promise: each method checks that the actors' Ray session still lives before it calls Ray, and raises `RaySessionError`
if not; Ray's errors about a lost actor, node or object arrive as `ActorLost`. A worker that has lost its process,
or is to move to another, continues there as its journal says. `release` gives the actors back to the pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayError

from rayloader.protocol import Setup, Source, WorkerAddress
from rayloader.replica.image import Image
from rayloader.resume.journal import Journal, Resumed, Told
from rayloader.transport.lanes import Lent
from rayloader.workers.actor import Actor, Lease, Ref
from rayloader.workers.answers import Answers
from rayloader.workers.channel import ActorLost, Message
from rayloader.workers.channels import Channels
from rayloader.workers.loan import Loan
from rayloader.workers.moving import Moving
from rayloader.workers.pool import Pool
from rayloader.workers.ways import Ways, all_see_us, is_near
from rayloader.workers.worker_slot import WorkerSlot

# While waiting for workers to report where they are: how often to check whether that has become hopeless, in seconds.
LOCATE_TICK_S = 1.0


class Crew:
    """The actors that one iterator owns, until `release`, and the workers that they host, dealt out in turn.

    Attributes:
        moving: knows which of its actors hosts each worker.
        ways: to its actors.
    """

    def __init__(self, pool: Pool, lease: Lease, remote_args: dict[str, Any], *, fresh: bool, lines: bool) -> None:
        self._pool = pool
        self._loan = Loan(pool, lease, remote_args, fresh=fresh)
        self._answers = Answers()
        self.ways = Ways(pool, self._answers, lines=lines)
        self._channels = Channels(self.ways, self._answers)
        self.moving = Moving(self._loan, self._channels, self._answers)
        self._image: Image | None = None  # kept for workers that still have to open it
        self._carried: list[Any] = []

    @classmethod
    def of(
        cls, pool: Pool, loader: object, remote_args: dict[str, Any], *, name: str, fresh: bool, lines: bool
    ) -> Crew:
        """A crew for an iterator of `loader`, without actors yet.

        With `fresh`, no actor is to be reused; with `lines`, actors on this machine are reached over local sockets, and
        those elsewhere over TCP.
        """
        return cls(pool, pool.begin_lease(loader, remote_args, name), remote_args, fresh=fresh, lines=lines)

    @property
    def actors(self) -> list[Actor]:
        """The actors, in the order in which they host."""
        return self.moving.actors

    @property
    def slots(self) -> list[WorkerSlot]:
        """The slots of the workers."""
        return self.moving.slots

    @property
    def usable(self) -> bool:
        """Whether the actors are still this crew's and can be called."""
        return self._loan.usable

    def check_session(self) -> None:
        """Raises RaySessionError unless the crew is usable."""
        self._loan.check_session()

    # ---- channels

    def lane(self, actor: Actor) -> str:
        """How an actor is reached and how its batches travel, in words."""
        return self._channels.lane(actor)

    def run(self, slot: WorkerSlot, task: Told) -> Lent | None:
        """Makes a worker build a task's batch; see `Channel.run`."""
        return self._channels.to(slot).run(slot.worker_id, task)

    def replay(self, slot: WorkerSlot, tasks: Sequence[Told]) -> None:
        """Makes a worker rebuild batches; without tasks it continues with those that it was given before."""
        self._channels.to(slot).replay(slot.worker_id, tasks)

    def resume(self, slot: WorkerSlot, resumed: Resumed) -> None:
        """Makes a worker begin another epoch; its journal is updated when it has."""
        self._channels.to(slot).resume(slot.worker_id, resumed)
        slot.journal.resumed = slot.host, slot.host.calls
        slot.began_at = slot.host.calls

    def drop(self, slot: WorkerSlot, from_task: int) -> None:
        """Cancels a worker's tasks of this epoch from this one on, of the calls made so far.

        Tasks of the previous epoch that it rebuilds have numbers of their own, and are not cancelled. Workers that
        share a process are not told: their calls have one sequence of numbers.
        """
        if slot.host in self._channels and len(self.moving.hosted_by(slot.host)) == 1:
            self._channels.to(slot).drop(slot.began_at, from_task)

    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""
        self._channels.flush()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; False if nothing has."""
        self.check_session()
        for ref in self.moving.awaited:
            self._answers.watch(ref)
        return self._channels.wait(timeout)

    def read(self) -> None:
        """Reads what a wait has found, for `receive`: without the epoch's lock, in a thread without interrupts."""
        self._channels.read()

    def receive(self, *, all_channels: bool = True, was_read: bool = False) -> list[tuple[Actor, Message]]:
        """The actors' messages.

        Args:
            all_channels: receive from all of them; otherwise from those that a wait has found ready.
            was_read: only messages that `read` has read.
        """
        self.check_session()
        arrived = self._channels.receive(all_channels=all_channels, was_read=was_read)
        if ActorLost in [type(message) for _, message in arrived]:
            self.check_session()  # Ray's shutdown is not the worker's fault
        return arrived

    def ring(self) -> None:
        """Ends a wait in progress."""
        self._answers.ring()

    def fall_back(self, actor: Actor, reason: str) -> list[WorkerSlot]:
        """Replaces the line to an actor with Ray calls.

        Returns:
            Its workers, which must be started again; they are away now.
        """
        self.ways.do_without_line(actor, reason)
        self._channels.hang_up(actor)
        slots = self.moving.hosted_by(actor)
        for slot in slots:
            self.restart(slot)
        return slots

    @property
    def leased_bytes(self) -> int:
        """Bytes of shared memory in which batches lie, including the user's. Any thread may ask."""
        return sum(actor.lane.leased_bytes for actor in self.actors) + self.ways.leased_bytes

    # ---- workers

    def start(self, image: Image, carried: list[Any], setups: list[Setup], journals: list[Journal]) -> None:
        """Tells the actors which workers they are.

        Raises:
            WorkerStartError: in a Ray that was not started here, a worker found no place.
        """
        self.check_session()
        self._image, self._carried = image, carried
        self.moving.slots = [
            WorkerSlot(setup.worker_id, setup, journal, self.actors[setup.worker_id % len(self.actors)])
            for setup, journal in zip(setups, journals, strict=True)
        ]
        if not all_see_us():
            while any(actor.address is None and not actor.lost for actor in self.actors):
                self.wait(LOCATE_TICK_S)
                try:
                    self.moving.check_started()
                except ActorLost as lost:  # its workers stay away; the epoch starts them elsewhere
                    self.moving.lose(lost.actor)
        contents: list[Ref] = []
        for slot in self.slots:
            if not slot.host.lost:
                self._start_worker(slot, contents)

    def revive(self) -> list[WorkerSlot]:
        """Starts the workers that are away and have a host by now; the epoch must then repeat their journals' calls.

        Raises:
            ActorLost: a host could not be started.
            WorkerStartError: one found no place.
        """
        if not any(slot.away for slot in self.slots):
            return []
        self.check_session()
        if not all_see_us():
            self.moving.check_started()  # workers that move are away already
        hosted = [slot for slot in self.slots if slot.away and not slot.host.lost]
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
        if source.contents is not None:
            setup = replace(setup, process=setup.process.without_secrets())
        self._channels.open(actor)
        self._channels.to(slot).pause()
        slot.began_at = actor.calls
        slot.started = actor.start(setup, source, journal.state)
        slot.told_at = time.monotonic()
        slot.away = False

    def _source(self, actor: Actor, contents: list[Ref]) -> Source:
        """Where a worker gets its replica from.

        Workers that can open the driver's files do so. On any other node, one actor makes an image for all workers
        there, from one Ray object that is made when it is first needed and is then kept in `contents`.
        """
        assert self._image is not None
        where = actor.address
        if where is None or is_near(actor):
            return Source(self._image.address, self._carried)
        near = [a for a in self.actors if not a.lost and a.address is not None and a.address.location == where.location]
        hosts = [a for a in near if a.hosts(self._image)]
        hosts += [a for a in near if a.hosted is not None and a.hosted[0] == self._image.address.name]
        host = hosts[0] if hosts else actor
        if not hosts:
            if not contents:
                contents.append(ray.put([PickleBuffer(content) for content in self._image.contents()]))
            host.host(self._image, contents[0])
        assert host.hosted is not None
        # In lists: Ray resolves a bare reference before the call, and fails the call if the object is lost.
        return Source(self._image.address, self._carried, [contents[0] if contents else None], [host.hosted[1].ref])

    def has_begun(self, slot: WorkerSlot) -> bool:
        """Whether the worker has finished its start, and begun the epoch."""
        return slot.started is not None and slot.started.succeeded and slot.journal.begun

    def restart(self, slot: WorkerSlot) -> None:
        """The worker is to be started again on the same actor, as its journal says; it is away until then."""
        if not slot.away:
            self.drop(slot, from_task=0)
            self._channels.leave(slot)
        slot.away = True

    def address(self, slot: WorkerSlot) -> WorkerAddress | None:
        """Where a worker runs; None if it does not run, or if that is no longer known."""
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
        lease = self._loan.end()
        if lease is not None:
            self._image = None
            self._channels.close()
            self._answers.ring()
            self.ways.close()
            self._pool.end(lease, busy=busy, reuse=reuse)

    def settle_output(self) -> None:
        """Waits until all log records that the workers have sent so far are handled."""
        self._pool.output.settle()

    def later(self, job: Callable[[], object]) -> None:
        """Passes a job to the thread that no finalizer can disturb; for finalizers."""
        self._pool.later(job)
