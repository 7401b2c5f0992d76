"""Which kind of channel leads to an actor: a local line, one by TCP, or Ray calls.

Promise: a failure to connect from one worker of another machine applies to all of them, and is reported once; they do
not try again. This object owns the memory for data from the network, one for each crew.
"""

from __future__ import annotations

import logging

from rayloader.start import session
from rayloader.transport import memory_file
from rayloader.transport.lanes import SMALL_BYTES
from rayloader.transport.line import LineError
from rayloader.transport.recycled import Recycled
from rayloader.workers.actor import Actor
from rayloader.workers.answers import Answers
from rayloader.workers.channel import Channel
from rayloader.workers.line_calls import LineCalls, TcpCalls
from rayloader.workers.pool import Pool
from rayloader.workers.ray_calls import RayCalls

# Whether local sockets are used on this machine; tests switch them off, to reach workers as on other machines.
LOCAL_LINES = True

logger = logging.getLogger("rayloader")


class Ways:
    """The channels to the actors of one crew, and the memory for what they receive.

    Args:
        pool: where the actors come from.
        answers: where the answers to Ray calls are awaited.
        lines: whether lines are wanted.

    Attributes:
        uses_store: whether some batches come, or came, through Ray's object store.
        reaches_far: whether some batches come from the network.
        copies: whether this process has to copy some batches: from the store, or large ones from the network.
    """

    def __init__(self, pool: Pool, answers: Answers, *, lines: bool) -> None:
        self._pool = pool
        self._answers = answers
        self._lines = lines
        self._memory = Recycled()  # for data from the network
        self.uses_store = self.reaches_far = self.copies = False

    def channel_to(self, actor: Actor) -> Channel:
        """Opens a new channel to an actor."""
        line = self._line_to(actor)
        self.uses_store |= line is None
        self.reaches_far |= isinstance(line, TcpCalls)
        self.copies |= line is None
        if not is_near(actor):
            self._pool.later(self._pool.tidy)  # from now on, it asks whether the actor's node is drained
        return line or RayCalls(actor, self._answers)

    def _line_to(self, actor: Actor) -> LineCalls | None:
        if not self._lines or actor.no_line or _location_of(actor) in self._pool.without_lines:
            return None
        try:
            if LOCAL_LINES and is_near(actor):
                return LineCalls(actor, self._answers)
            if not session.uses_tls():
                return TcpCalls(actor, self._answers, session.node_ip(), self._room)
        except LineError as error:
            self.do_without_line(actor, str(error))
        return None

    def _room(self, nbytes: int) -> memoryview:
        """Memory for a buffer that arrives from the network."""
        self.copies |= nbytes > SMALL_BYTES
        return self._memory.room(nbytes)

    def do_without_line(self, actor: Actor, reason: str) -> None:
        """Uses no line to the actor from now on; logs that, once for the workers of another machine."""
        actor.no_line = reason
        location = _location_of(actor)
        if location is not None:
            if location in self._pool.without_lines:
                return
            self._pool.without_lines.add(location)
        logger.warning("rayloader: a worker is reached by Ray calls, which take longer than a socket: %s", reason)

    @property
    def leased_bytes(self) -> int:
        """Bytes of data from the network that are in use. Any thread may ask."""
        return self._memory.leased_bytes

    def close(self) -> None:
        """Gives up the memory; parts in use stay until their last view has died."""
        self._memory.close()


def is_near(actor: Actor) -> bool:
    """Whether the actor is on this machine and can open our files."""
    where = actor.address
    if where is None:
        return all_see_us()
    return where.node_id == session.node_id() and where.reaches_driver


def all_see_us() -> bool:
    """Whether all actors are known to be on this machine and to open our files: so it is in a Ray of our own."""
    return session.started_here() and memory_file.others_may_open()


def _location_of(actor: Actor) -> tuple[str, str] | None:
    """The location of an actor that local sockets do not reach."""
    return None if is_near(actor) or actor.address is None else actor.address.location
