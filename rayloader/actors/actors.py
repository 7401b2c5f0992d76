"""The actors of one fleet: lent by the pool, reached over lines or by Ray calls, given the replica.

Promise: nothing here calls Ray once the session that the actors came from is gone.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pickle import PickleBuffer
from typing import Any

import ray
from typing_extensions import override

from rayloader.actors import session
from rayloader.actors.actor import Actor, Lease, Ref, watch
from rayloader.actors.channels import ActorLine, RayCalls, TcpCalls
from rayloader.actors.image import Image, Source, module_folders
from rayloader.actors.pool import Pool
from rayloader.errors import RaySessionError
from rayloader.gpu.device import Accelerator
from rayloader.options import Options
from rayloader.transport.lanes import SMALL_BYTES, Recycled
from rayloader.transport.line import LineError
from rayloader.workers.connection import Channel, Mailbox, Processes

logger = logging.getLogger("rayloader")

# Whether local sockets are used on this machine; tests switch them off, to reach workers as on other machines.
LOCAL_LINES = True
# After how many seconds of waiting for processes, once Ray runs, a line in the log says what the program waits for.
NOTICE_S = 5.0


class Actors(Processes):
    """The actors of one fleet.

    Args:
        pool: where they come from.
        options: of the loader.
        name: of the loader, for the names of actors.
        accelerator: for which the memory of batches is page-locked.

    Attributes:
        replica: its image, and the parts of it that Ray carries unchanged; set before a worker begins, until `release`.
    """

    replica: tuple[Image, list[Any]] | None = None

    def __init__(self, pool: Pool, options: Options, name: str = "", accelerator: Accelerator | None = None) -> None:
        self._pool = pool
        self._remote_args = options.ray_remote_args
        self._lease: Lease | None = pool.begin_lease(name)  # None after `release`
        self._lines = options.uses_lines  # otherwise every call and every batch goes through Ray
        self._contents: list[Ref] = []  # the image in Ray's store, while processes on other nodes may need it
        self._memory = Recycled(accelerator)  # for data from the network
        self._notice_at = time.monotonic() + NOTICE_S  # when to say what the program waits for

    @override
    def check(self) -> None:
        if self._pool.closed:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        if not self._pool.session_alive():
            raise RaySessionError(
                "Ray was shut down while this iterator was live; its workers are gone: "
                "call iter() on the loader again, which starts new ones"
            )

    @override
    def lend(self, count: int, *, fresh: bool = True) -> list[Actor]:
        assert self._lease is not None
        return self._pool.lend(self._lease, self._remote_args, count, fresh=fresh)

    @override
    def kill(self, process: Actor) -> None:
        self._pool.kill(process)

    @override
    def give_back(self, process: Actor) -> None:
        self._pool.give_back(process)

    @override
    def release(self, *, busy: bool, reuse: bool) -> None:
        lease, self._lease = self._lease, None
        self.replica = None  # the iterator may live on
        if lease is not None:
            self._memory.close()  # parts in use stay until their last view has died
            self._pool.end(lease, busy=busy, reuse=reuse)

    @property
    @override
    def leased_bytes(self) -> int:  # type: ignore[override]
        return self._memory.leased_bytes

    # ---- channels

    @override
    def watch_start(self, process: Actor, mailbox: Mailbox) -> None:
        watch(mailbox, process.hello.ref)

    @override
    def channel(self, process: Actor, mailbox: Mailbox) -> Channel:
        line = self._line_to(process, mailbox)
        if line is None:
            self.uses_store = self.copies = True
        return line or RayCalls(process, mailbox)

    def _line_to(self, actor: Actor, mailbox: Mailbox) -> Channel | None:
        if not self._lines or actor.no_line or _far_location(actor) in self._pool.without_lines:
            return None
        try:
            if LOCAL_LINES and actor.is_near:
                return ActorLine(actor, mailbox)
            if not session.uses_tls():
                return TcpCalls(actor, mailbox, session.node_ip(), self._room)
        except LineError as error:
            self.refused(actor, str(error))
        return None

    def _room(self, nbytes: int) -> memoryview:
        """Memory for a buffer that arrives from the network."""
        self.copies |= nbytes > SMALL_BYTES
        return self._memory.room(nbytes)

    @override
    def refused(self, process: Actor, reason: str) -> None:
        """Uses no line to the actor from now on; logs that, once for the workers of another machine."""
        process.no_line = reason
        location = _far_location(process)
        if location is not None:
            if location in self._pool.without_lines:
                return
            self._pool.without_lines.add(location)
        logger.warning("rayloader: a worker is reached by Ray calls, which take longer than a socket: %s", reason)

    # ---- the replica

    @override
    def sources(self, others: list[Actor]) -> Callable[[Actor], Source]:
        contents = self._contents
        if all(actor.address is not None or actor.lost for actor in others):  # the last ones begin
            self._contents = []
        return functools.partial(self._source, others, contents, module_folders())

    def _source(self, others: list[Actor], content: list[Ref], folders: list[str], actor: Actor) -> Source:
        """Where a worker gets its replica from.

        Workers that can open the driver's files do so. On any other node, one actor makes an image for all workers
        there, from one Ray object that is made when it is first needed and is then kept in `content`.
        """
        assert self.replica is not None
        (image, carried), where = self.replica, actor.address
        source = Source(session.node_id(), folders, image.address, carried)
        if where is None or actor.is_near:
            return source
        near = [a for a in others if not a.lost and a.address is not None and a.address.location == where.location]
        hosts = [a for a in near if a.hosts(image)]
        hosts += [a for a in near if a.hosted is not None and a.hosted[0] == image.address.name]
        host = hosts[0] if hosts else actor
        if not hosts:
            if not content:
                content.append(ray.put(PickleBuffer(image.content())))
            host.host(image, content[0])
        assert host.hosted is not None
        # In lists: Ray resolves a bare reference before the call, and fails the call if the object is lost.
        of_file, hosted = [content[0] if content else None], [host.hosted[1].ref]
        return replace(source, content=of_file, hosted=hosted)

    # ---- places

    @override
    def check_pending(self, pending: list[Actor], of: int) -> None:
        self._pool.check_pending(pending, of)
        if time.monotonic() >= self._notice_at:
            self._notice_at = math.inf
            self._pool.placement.tell(pending, of)


def _far_location(actor: Actor) -> tuple[str, str] | None:
    """The location of an actor that local sockets do not reach."""
    return None if actor.is_near or actor.address is None else actor.address.location
