"""The actors that one iterator owns, and all that it may ask of them.

Promise: each method checks that the actors' Ray session still lives before it calls Ray, and raises `RaySessionError`
if not; what Ray raises about a lost actor, node or object arrives as `ActorLost`. `release` gives the actors back to
the pool.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayloader import session
from rayloader.errors import RaySessionError
from rayloader.transport import memory_file
from rayloader.transport.codec import Encoded
from rayloader.transport.control_page import ControlPage, make_page
from rayloader.transport.lanes import ArenaLane, Room, pack, to_wire, unpack
from rayloader.transport.replica import Image
from rayloader.worker import Reply, Setup, Source, WorkerAddress

if TYPE_CHECKING:
    from rayloader.pool import Pool

# How often a wait for workers to say where they are looks whether that has become hopeless, in seconds.
LOCATE_TICK_S = 1.0

Ref = Any  # an ObjectRef; Ray's own type is generic over what nobody can check


SESSION_ENDED = (
    "Ray was shut down while this iterator was live; its workers are gone: "
    "call iter() on the loader again, which starts anew"
)


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
    lane: ArenaLane = field(default_factory=ArenaLane)
    page: ControlPage | None = field(default_factory=make_page)
    calls: int = 0  # made of `run`
    hosted: tuple[str, Ref] | None = None  # the image that it holds for its node: name, answer to `host`

    def has_started(self) -> bool:
        """Whether it runs by now; notes where. Raises RayError if it never will."""
        if self.address is None:
            try:
                address: Any = ray.get(self.hello, timeout=0)
            except GetTimeoutError:
                return False
            self.address, self.started_at = address, time.monotonic()
        return True

    def start(self, setup: Setup, source: Source) -> Ref:
        """`Worker.start`."""
        if self.hosted is not None and self.hosted[0] != source.image.name:
            self.hosted = None
        return self.handle.start.remote(setup, source)

    def host(self, image: Image, contents: Ref) -> Ref:
        """`Worker.host`: what the others of its node open."""
        self.hosted = image.address.name, self.handle.host.remote(image.address.name, image.address, contents)
        return self.hosted[1]

    def hosts(self, image: Image) -> bool:
        """Whether it holds that image for its node by now."""
        if self.hosted is not None and self.hosted[0] == image.address.name:
            with contextlib.suppress(RayError):  # not yet, or it failed
                return ray.get(self.hosted[1], timeout=0) is not None
        return False

    def resume(self, epoch: int, shared_seed: int | None, undo_from: int | None) -> Ref:
        """`Worker.resume`."""
        return self.handle.resume.remote(epoch, shared_seed, undo_from)

    def run(self, task_ids: Sequence[int], indices: Sequence[Encoded], room: Room | None) -> Ref:
        """`Worker.run`."""
        self.calls += 1
        wires = [to_wire(encoded) for encoded in indices]
        return self.handle.run.remote(pack((self.calls, tuple(task_ids), wires, room), wires))

    def let_go(self) -> None:
        """The process is gone, or will be: gives up what it shares with this one."""
        self.page = None
        self.lane.close()

    def drop(self, from_task: int) -> None:
        """Nobody wants tasks from this one on, of the calls made so far."""
        if self.page is not None:
            self.page.drop(self.calls, from_task)


class ActorLost(Exception):
    """A worker's answer will not come: its actor, its node or the object is gone."""

    def __init__(self, worker_id: int, error: RayError) -> None:
        super().__init__(str(error).strip())
        self.worker_id = worker_id


@dataclass(frozen=True, slots=True)
class Returned:
    """What a crew leaves behind: actors to be used again, and actors that are gone or must go."""

    actors: list[Actor]
    gone: list[Actor]
    busy: bool  # calls may be unanswered


class Crew:
    """The actors that one iterator owns, one a worker, until `release`."""

    def __init__(self, pool: Pool, actors: list[Actor], options: dict[str, Any]) -> None:
        self._pool = pool
        self._options = options  # that those of the actors were made with which are new
        self._pid = os.getpid()
        self._released = False
        self._image: Image | None = None  # kept for workers that have yet to open it
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
                "load with num_workers=0 here, or start this process with the spawn method"
            )
        if self._released or self._pool.closed:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        if not self._pool.session_alive():
            raise RaySessionError(SESSION_ENDED)

    def fetch(self, worker_id: int, ref: Ref, timeout: float) -> Reply | None:
        """What a worker's call returned; None if it has not within `timeout` seconds.

        Raises:
            ActorLost: it never will.
        """
        self.check_session()
        try:
            reply: Reply = unpack(ray.get(ref, timeout=timeout))
            return reply
        except GetTimeoutError:
            return None
        except RayError as error:
            self.check_session()  # Ray's shutdown is not the worker's fault
            raise ActorLost(worker_id, error) from error
        except SystemExit as error:  # what Ray raises in a thread that waits while it is shut down
            raise RaySessionError(SESSION_ENDED) from error

    def ready(self, refs: Sequence[Ref], *, count: int, timeout: float) -> list[Ref]:
        """Those of `refs` that are answered (or lost), once `count` of them are or after `timeout` seconds."""
        self.check_session()
        try:
            return ray.wait(list(refs), num_returns=min(count, len(refs)), timeout=timeout)[0]
        except SystemExit as error:  # as in fetch
            raise RaySessionError(SESSION_ENDED) from error

    def ship(self, image: Image, carried: list[Any]) -> list[Source]:
        """What each worker is to open its replica from, in the order of `actors`.

        Those that can open the driver's files do. On any other node one makes an image for all workers there, from
        one object of Ray's that is made when the first needs it.

        Raises:
            WorkerStartError: in a Ray that was not started here, a worker found no place.
        """
        self.check_session()
        self._image = image
        self._locate()
        driver_node = session.node_id()
        contents: Ref = None
        hosts: dict[tuple[str, str], tuple[Ref, Ref]] = {}  # contents, answer to `host`; by place
        for actor in self.actors:
            if actor.address is not None and actor.hosts(image):
                assert actor.hosted is not None
                hosts[actor.address.place] = None, actor.hosted[1]
        sources = []
        for actor in self.actors:
            where = actor.address
            if where is None or (where.node_id == driver_node and where.reaches_driver):
                sources.append(Source(image.address, carried))
                continue
            if where.place not in hosts:
                if contents is None:
                    contents = ray.put([PickleBuffer(content) for content in image.contents()])
                hosts[where.place] = contents, actor.host(image, contents)
            # In lists: Ray waits for what stands by itself, and would not call at all where it is lost.
            sources.append(Source(image.address, carried, *([ref] for ref in hosts[where.place])))
        return sources

    def _locate(self) -> None:
        """Waits until it is known where the workers are; in a Ray of our own all are on this machine and see us."""
        if session.started_here() and memory_file.others_may_open():
            return
        with contextlib.suppress(ActorLost):  # the epoch will say so
            while pending := [actor.hello for actor in self.actors if actor.address is None]:
                self.ready(pending, count=len(pending), timeout=LOCATE_TICK_S)
                self.check_started()

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
                self.check_session()
                raise ActorLost(worker_id, error) from error
        if pending:
            progress = [actor.started_at for actor in self.actors if actor.started_at is not None]
            waited = time.monotonic() - max([min(actor.created_at for actor in pending), *progress])
            self._pool.check_start_limit(waited, len(pending), len(self.actors), self._options)

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
        self._released, self._image = True, None
        for actor in self.actors:
            actor.drop(from_task=0)
        gone = [actor for worker_id, actor in enumerate(self.actors) if worker_id in lost]
        self._pool.post(Returned([actor for actor in self.actors if actor not in gone], gone, busy=busy))
