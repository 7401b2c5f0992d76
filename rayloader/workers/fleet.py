"""The workers of one iterator, and the processes that host them: begun, lost, replaced, moved, ended.

Promise: each method checks that the actors' Ray session still lives before it calls Ray, and raises `RaySessionError`
if not; Ray's errors about a lost actor, node or object arrive as `ActorLost`. A worker that has lost its process,
or is to move to another, is away until it is begun again there, as its journal says. Actors that host others' workers,
until these have processes of their own, give them up when those processes have come. `release` gives the actors back to
the pool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayError

from rayloader.errors import RaySessionError
from rayloader.protocol import Setup, Source, WorkerAddress
from rayloader.replica.image import Image
from rayloader.resume.journal import Journal
from rayloader.start import session
from rayloader.transport.device import Accelerator
from rayloader.transport.lanes import SMALL_BYTES, Recycled
from rayloader.transport.line import LineError
from rayloader.workers.actor import Actor, Lease, Ref, all_see_us
from rayloader.workers.connection import ActorLost, Channel, LineCalls, Mailbox, Message, RayCalls, TcpCalls
from rayloader.workers.placement import Verdict
from rayloader.workers.pool import Pool
from rayloader.workers.worker import Worker

logger = logging.getLogger("rayloader")

# Whether local sockets are used on this machine; tests switch them off, to reach workers as on other machines.
LOCAL_LINES = True
# While waiting for workers to report where they are: how often to check whether that has become hopeless, in seconds.
LOCATE_TICK_S = 1.0
# How many replacement processes may fail to start before the helping processes keep the work.
MOST_FAILED_STARTS = 3
# After how many seconds of waiting for processes, once Ray runs, a line in the log says what the program waits for.
NOTICE_S = 5.0
# Unanswered tasks that one worker may have if a thread of ours receives answers and sends the next tasks. A Ray call
# takes some milliseconds, of which about one is work: with this many, the worker need not wait. More would only risk
# larger batches than expected.
CALLS_AHEAD = 8
# Likewise of a worker on another node, while its batches are so small that the user's thread receives them. With half
# as many, a tiny batch takes a fifth longer, because fewer answers come at once; twice as many gain nothing.
TASKS_AHEAD = 16


class Fleet:
    """The workers of one iterator, dealt out in turn to the actors that it owns until `release`.

    Args:
        pool: where the actors come from.
        loader: whose iterator it is.
        remote_args: the user's options of actors.
        name: of the loader, for the names of actors.
        fresh: no actor is to be reused.
        lines: actors on this machine are reached over local sockets, those elsewhere over TCP.
        accelerator: for which the memory of batches is page-locked.

    Attributes:
        actors: in the order in which they host.
        workers: by worker id.
        uses_store: whether some batches come, or came, through Ray's object store.
        copies: whether this process has to copy some batches: from the store, or large ones from the network.
    """

    def __init__(
        self,
        pool: Pool,
        loader: object,
        remote_args: dict[str, Any],
        *,
        name: str,
        fresh: bool,
        lines: bool,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._pool = pool
        self._lease: Lease | None = pool.begin_lease(loader, remote_args, name)  # None after `release`
        self._remote_args = remote_args
        self._fresh = fresh
        self._lines = lines
        self._pid = os.getpid()
        self._mailbox = Mailbox()
        self._accelerator = accelerator
        self._memory = Recycled(accelerator)  # for data from the network
        self.uses_store = self.copies = self._reaches_far = False
        self.actors: list[Actor] = []
        self.workers: list[Worker] = []
        self._image: Image | None = None  # kept for workers that still have to open it
        self._carried: list[Any] = []
        self._notice_at = time.monotonic() + NOTICE_S  # when to say what the program waits for
        # Requested while others host their workers: these workers, and how many processes have failed to start.
        self._coming: dict[Actor, tuple[list[Worker], int]] = {}
        self._replaced: list[Actor] = []  # replacements were requested, because their nodes will leave

    # ---- the loan of actors

    @property
    def usable(self) -> bool:
        """Whether the actors are still this fleet's and can be called."""
        return self._lease is not None and not self._pool.closed and self._pool.session_alive()

    def check_session(self) -> Lease:
        """Raises RaySessionError unless the fleet is usable; returns its lease."""
        if os.getpid() != self._pid:
            raise RaySessionError(
                "an iterator works in the process that made it, and this one was forked from it; "
                "load with num_workers=0 here, or start this process with the spawn method"
            )
        if self._lease is None or self._pool.closed:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        if not self._pool.session_alive():
            raise RaySessionError(
                "Ray was shut down while this iterator was live; its workers are gone: "
                "call iter() on the loader again, which starts new ones"
            )
        return self._lease

    def lend(self, count: int) -> None:
        """Adds `count` actors; does not wait until new ones run."""
        self.actors = self.actors + self._lend(count, fresh=self._fresh)

    def _lend(self, count: int, *, fresh: bool = True) -> list[Actor]:
        return self._pool.lend(self.check_session(), self._remote_args, count, fresh=fresh)

    def release(self, *, busy: bool, reuse: bool = True) -> None:
        """Gives the actors back; callable more than once. Not for finalizers.

        An interrupt within gives them back too: no reference to the lease is left then.

        Args:
            busy: calls may be unanswered.
            reuse: whether others may have the processes.
        """
        if os.getpid() != self._pid:
            return
        lease, self._lease = self._lease, None
        if lease is not None:
            self._image = None
            self._mailbox.close()
            self._memory.close()  # parts in use stay until their last view has died
            self._pool.end(lease, busy=busy, reuse=reuse)

    def settle_output(self) -> None:
        """Waits until all log records that the workers have sent so far are handled."""
        self._pool.output.settle()

    def later(self, job: Callable[[], object]) -> None:
        """Passes a job to the thread that no finalizer can disturb; for finalizers."""
        self._pool.later(job)

    # ---- messages

    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""
        self._mailbox.flush()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; False if nothing has."""
        self.check_session()
        for ref in self.awaited:
            self._mailbox.watch(ref)
        return self._mailbox.wait(timeout)

    def read(self) -> None:
        """`Mailbox.read`."""
        self._mailbox.read()

    def receive(self, *, all_channels: bool = True, was_read: bool = False) -> list[tuple[Actor, Message]]:
        """`Mailbox.receive`."""
        self.check_session()
        arrived = self._mailbox.receive(all_channels=all_channels, was_read=was_read)
        if ActorLost in [type(message) for _, message in arrived]:
            self.check_session()  # Ray's shutdown is not the worker's fault
        return arrived

    def ring(self) -> None:
        """Ends a wait in progress."""
        self._mailbox.ring()

    @property
    def awaited(self) -> list[Ref]:
        """The Ray calls to wait for: their answers allow workers that are away to start, or to move."""
        hosts = {id(worker.host): worker.host for worker in self.workers if worker.away and not worker.host.lost}
        return [host.hello.ref for host in (*hosts.values(), *self._coming)]

    @property
    def most_unanswered(self) -> float:
        """How many tasks of one worker may be unanswered, beyond those that torch's would have."""
        if self.copies:
            return CALLS_AHEAD
        return TASKS_AHEAD if self._reaches_far else math.inf

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory in which batches lie, including the user's. Any thread may ask."""
        return sum(actor.lane.leased_bytes for actor in self.actors) + self._memory.leased_bytes

    def lane(self, worker: Worker) -> str:
        """How a worker is reached and how its batches travel, in words."""
        return self._mailbox.lane(worker.host)

    def address(self, worker: Worker) -> WorkerAddress | None:
        """Where a worker runs; None if it does not run, or if that is no longer known."""
        if self.usable:
            with contextlib.suppress(RayError):
                worker.host.has_started()
        return worker.host.address

    def _open_channel(self, actor: Actor) -> None:
        if actor in self._mailbox:
            return
        actor.lane.accelerator = self._accelerator
        line = self._line_to(actor)
        if line is None:
            self.uses_store = self.copies = True
        self._reaches_far |= isinstance(line, TcpCalls)
        if not actor.is_near:
            self._pool.later(self._pool.tidy)  # from now on, it asks whether the actor's node is drained
        self._mailbox.add(line or RayCalls(actor, self._mailbox))

    def _line_to(self, actor: Actor) -> Channel | None:
        if not self._lines or actor.no_line or _far_location(actor) in self._pool.without_lines:
            return None
        try:
            if LOCAL_LINES and actor.is_near:
                return LineCalls(actor, self._mailbox)
            if not session.uses_tls():
                return TcpCalls(actor, self._mailbox, session.node_ip(), self._room)
        except LineError as error:
            self._do_without_line(actor, str(error))
        return None

    def _room(self, nbytes: int) -> memoryview:
        """Memory for a buffer that arrives from the network."""
        self.copies |= nbytes > SMALL_BYTES
        return self._memory.room(nbytes)

    def _do_without_line(self, actor: Actor, reason: str) -> None:
        """Uses no line to the actor from now on; logs that, once for the workers of another machine."""
        actor.no_line = reason
        location = _far_location(actor)
        if location is not None:
            if location in self._pool.without_lines:
                return
            self._pool.without_lines.add(location)
        logger.warning("rayloader: a worker is reached by Ray calls, which take longer than a socket: %s", reason)

    def fall_back(self, actor: Actor, reason: str) -> list[Worker]:
        """Replaces the line to an actor with Ray calls.

        Returns:
            Its workers, which must be begun again; they are away now.
        """
        self._do_without_line(actor, reason)
        self._mailbox.remove(actor)
        workers = self.hosted_by(actor)
        for worker in workers:
            if not worker.away:
                self.drop(worker, from_task=0)
                worker.leave()
                worker.away = True
        return workers

    # ---- workers begin

    def begin(self, image: Image, carried: list[Any], setups: list[Setup], journals: list[Journal]) -> None:
        """Tells the actors which workers they are.

        Raises:
            WorkerStartError: in a Ray that was not started here, a worker found no place.
        """
        self.check_session()
        self._image, self._carried = image, carried
        self.workers = [
            Worker(setup, journal, self.actors[setup.worker_id % len(self.actors)], self._mailbox)
            for setup, journal in zip(setups, journals, strict=True)
        ]
        if not all_see_us():
            while any(actor.address is None and not actor.lost for actor in self.actors):
                self.wait(LOCATE_TICK_S)
                try:
                    self.check_started()
                except ActorLost as lost:  # its workers stay away; the epoch begins them elsewhere
                    self.lose(lost.actor)
        self._begin([worker for worker in self.workers if not worker.host.lost])

    def revive(self) -> list[Worker]:
        """Begins the workers that are away and have a host by now; the epoch must then repeat their journals' calls.

        Raises:
            ActorLost: a host could not be started.
            WorkerStartError: one found no place.
        """
        if not [worker for worker in self.workers if worker.away]:
            return []
        self.check_session()
        if not all_see_us():
            self.check_started()  # workers that move are away already
        hosted = [worker for worker in self.workers if worker.away and not worker.host.lost]
        ready = [worker for worker in hosted if all_see_us() or worker.host.address is not None]
        self._begin(ready)
        return ready

    def _begin(self, workers: list[Worker]) -> None:
        contents: list[Ref] = []
        for worker in workers:
            source = self._source(worker.host, contents)
            self._open_channel(worker.host)
            worker.begin(source)

    def _source(self, actor: Actor, contents: list[Ref]) -> Source:
        """Where a worker gets its replica from.

        Workers that can open the driver's files do so. On any other node, one actor makes an image for all workers
        there, from one Ray object that is made when it is first needed and is then kept in `contents`.
        """
        assert self._image is not None
        where = actor.address
        if where is None or actor.is_near:
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

    def drop(self, worker: Worker, from_task: int) -> None:
        """`Worker.drop`; workers that share a process are not told: their calls have one sequence of numbers."""
        if worker.host in self._mailbox and len(self.hosted_by(worker.host)) == 1:
            worker.drop(from_task)

    # ---- which process hosts each worker

    def hosted_by(self, actor: Actor) -> list[Worker]:
        """The workers of an actor; none if it no longer belongs to this fleet."""
        return [worker for worker in self.workers if worker.host is actor] if actor in self.actors else []

    def lose(self, actor: Actor) -> None:
        """Kills an actor that is dead or not to be trusted any more, and gives up what it shares with this process."""
        if not actor.lost:
            actor.lost = True
            for worker in self.hosted_by(actor):
                worker.away = True
            self._end(actor)

    def _end(self, actor: Actor) -> None:
        """Kills an actor, and gives up what it shares with us."""
        self._mailbox.remove(actor)
        self._pool.kill(actor)

    def replace(self, worker: Worker) -> bool:
        """Gives a worker whose actor is dead another one, with all that the old one hosted; False if it is not dead."""
        old = worker.host
        if not old.lost:
            return False
        own = self._own_of(old)
        hosts = self._survivors_of(old) if old.vanished or not own else []
        if own or not hosts:
            (new,) = self._lend(1)  # idle ones may be just as dead
            if hosts:
                self._coming[new] = own, 0
            else:
                hosts = [new]
        self._move([old], hosts)
        return True

    def _own_of(self, actor: Actor) -> list[Worker]:
        """The workers of an actor, except for those that it hosts until their own actor comes."""
        others = [worker for workers, _ in self._coming.values() for worker in workers]
        return [worker for worker in self.hosted_by(actor) if worker not in others]

    def _survivors_of(self, vanished: Actor) -> list[Actor]:
        """Actors that can do the work of one whose node may be gone, those with the fewest workers first.

        If a node loses power, Ray regards it as alive for up to half a minute, and may place a new actor there.
        """
        gone = None if vanished.address is None else vanished.address.node_id
        there = [a for a in self.actors if a.address is not None and not a.lost and a.address.node_id != gone]
        stay = [actor for actor in there if not self._pool.is_draining(actor)]
        return sorted(stay, key=lambda actor: len(self.hosted_by(actor)))

    @property
    def may_spread(self) -> bool:
        """Whether there may be work for `spread`; the question costs next to nothing."""
        return bool(self._coming or self._pool.draining)

    def spread(self) -> list[Worker]:
        """Moves workers to processes of their own that have come, and away from nodes that will leave.

        A process on such a node continues until its replacement has come, or until it is late. Others then host its
        workers.

        Returns:
            The workers that move; they are away now.
        """
        before = self.actors
        draining = [actor for actor in before if not actor.lost and self._pool.is_draining(actor)]
        for actor in draining:
            if actor not in self._replaced and (own := self._own_of(actor)):
                (new,) = self._lend(1)
                self._coming[new] = own, 0
                self._replaced.append(actor)
                for worker in own:
                    worker.hurry()
        moved = self._take_over()
        for actor in draining:
            # If no actor stays, Ray must not be asked again for each batch.
            if (hosts := self._survivors_of(actor)) and self._is_late(actor):
                for worker in self.hosted_by(actor):
                    worker.leave()
                moved += self._move([actor], hosts)
        for actor in before:
            if actor not in self.actors and not actor.lost:
                self._end(actor)
        return moved

    def _is_late(self, actor: Actor) -> bool:
        """Whether its workers must leave it at once: its node leaves, or they have waited long enough for room."""
        assert actor.address is not None
        node_id, draining = actor.address.node_id, self._pool.draining
        if not draining.is_late(node_id, at_last=False):
            return False
        coming = [new for new, (workers, _) in self._coming.items() if actor in [worker.host for worker in workers]]
        has_room = bool(coming) and all(new.is_placed() for new in coming)  # then Ray is not asked again
        return not has_room or draining.is_late(node_id, at_last=True)

    def _take_over(self) -> list[Worker]:
        """Lets late processes take over their workers from those that have helped out."""
        moved = []
        for new, (workers, failed) in list(self._coming.items()):
            try:
                if not new.has_started():
                    continue
            except RayError:  # it was given room on a node that is gone
                self._pool.kill(new)
                if failed < MOST_FAILED_STARTS:
                    (another,) = self._lend(1)
                    self._coming[another] = workers, failed + 1
            else:
                for worker in workers:
                    worker.leave()
                    worker.moves_to(new)
                    moved.append(worker)
                self.actors = self._hosts
            self._mailbox.forget(new.hello.ref)  # a wait has watched it
            del self._coming[new]
        return moved

    def resize(self, count: int) -> list[Worker]:
        """Changes the number of actors that host the same workers.

        Returns:
            The workers that move; they are away now.
        """
        self.check_session()
        while self._coming:
            self._pool.give_back(self._coming.popitem()[0])
        self._replaced.clear()
        self.lend(max(0, count - len(self.actors)))
        kept, spare = self.actors[:count], self.actors[count:]
        self.actors = kept
        moved = []
        for worker in self.workers:
            host = kept[worker.worker_id % len(kept)]
            if host is not worker.host:
                if worker.host in kept:
                    worker.leave()
                worker.moves_to(host)
                moved.append(worker)
        for actor in spare:
            self._mailbox.remove(actor)
            self._pool.give_back(actor)
        return moved

    def _move(self, old: list[Actor], new: list[Actor]) -> list[Worker]:
        """Deals the workers of some actors, which leave the fleet, to other actors.

        Returns:
            The workers that move; they are away now.
        """
        moved = [worker for worker in self.workers if worker.host in old]
        for number, worker in enumerate(moved):
            worker.moves_to(new[number % len(new)])
        self.actors = self._hosts
        return moved

    @property
    def _hosts(self) -> list[Actor]:
        return list(dict.fromkeys(worker.host for worker in self.workers))

    def check_started(self) -> list[Worker]:
        """Notes which actors run by now, and makes sure that no worker waits for a process for too long.

        Returns:
            Workers that move to another actor because theirs found no place; they are away now.

        Raises:
            WorkerStartError: none has found a place.
            ActorLost: one could not be started.
        """
        self.check_session()
        pending = []
        for actor in self.actors:
            if actor.lost:
                continue
            try:
                if not actor.has_started():
                    pending.append(actor)
            except RayError as error:
                self.check_session()
                raise ActorLost(actor, error) from error
        if not pending:
            return []
        if time.monotonic() >= self._notice_at:
            self._notice_at = math.inf
            self._pool.tell(pending, len(self.actors))
        hosts = [actor for actor in self.actors if actor not in pending and not actor.lost]
        match self._pool.verdict(pending, self._remote_args, others=bool(hosts)):
            case Verdict.SHARE_CPUS:
                pending = [actor for actor in pending if not actor.is_placed()]
                hosts = self._lend(len(pending))
            case Verdict.GIVE_UP if hosts:
                self._pool.gave_up(pending, len(self.actors))
                for actor in pending:  # they come when there is room: on a new node, or after other work
                    if own := self._own_of(actor):
                        self._mailbox.remove(actor)
                        self._coming[actor] = own, 0
                    else:
                        self._end(actor)
                return self._move(pending, hosts)
            case Verdict.GIVE_UP:
                raise self._pool.start_error(pending, len(self.actors))
            case _:
                return []
        for actor in pending:
            self._end(actor)
        return self._move(pending, hosts)


def _far_location(actor: Actor) -> tuple[str, str] | None:
    """The location of an actor that local sockets do not reach."""
    return None if actor.is_near or actor.address is None else actor.address.location
