"""Which way leads to an actor: a local line, one by TCP, or Ray calls.

Promise: what keeps one worker of another machine from connecting keeps all of them, and is said once; workers are not
asked to try again. The memory for what the network brings is this object's, and a crew's.
"""

from __future__ import annotations

import logging

from rayloader import session
from rayloader.driver.actor import Actor
from rayloader.driver.answers import Answers
from rayloader.driver.channel import Channel
from rayloader.driver.line_calls import LineCalls, TcpCalls
from rayloader.driver.pool import Pool
from rayloader.driver.ray_calls import RayCalls
from rayloader.transport import memory_file
from rayloader.transport.line import LineError
from rayloader.transport.recycled import Recycled

# Whether workers on this machine are reached by local sockets; the tests have them reached as those on others are.
LOCAL_LINES = True

logger = logging.getLogger("rayloader")


class Ways:
    """The ways to the actors of one crew.

    Args:
        pool: that the actors are from.
        answers: where those of Ray's calls are waited for.
        lines: whether lines are wanted.

    Attributes:
        uses_store: whether batches of some come through Ray's object store, or came.
        copies: whether batches of some have to be copied by this process: from there, or from the network.
    """

    def __init__(self, pool: Pool, answers: Answers, *, lines: bool) -> None:
        self._pool = pool
        self._answers = answers
        self._lines = lines
        self._memory = Recycled()  # for what the network brings
        self.uses_store = self.copies = False

    def channel_to(self, actor: Actor) -> Channel:
        """A new one."""
        line = self._line_to(actor)
        self.uses_store |= line is None
        self.copies |= line is None or isinstance(line, TcpCalls)
        if not is_near(actor):
            self._pool.later(self._pool.tidy)  # which asks from now on whether its node is drained
        return line or RayCalls(actor, self._answers)

    def _line_to(self, actor: Actor) -> LineCalls | None:
        if not self._lines or actor.no_line or _location_of(actor) in self._pool.without_lines:
            return None
        try:
            if LOCAL_LINES and is_near(actor):
                return LineCalls(actor, self._answers)
            if not session.uses_tls():
                return TcpCalls(actor, self._answers, session.node_ip(), self._memory.room)
        except LineError as error:
            self.do_without_line(actor, str(error))
        return None

    def do_without_line(self, actor: Actor, reason: str) -> None:
        """From here on; that is said, of the workers of another machine once."""
        actor.no_line = reason
        location = _location_of(actor)
        if location is not None:
            if location in self._pool.without_lines:
                return
            self._pool.without_lines.add(location)
        logger.warning("rayloader: a worker is reached by Ray calls, which take longer than a socket: %s", reason)

    @property
    def leased_bytes(self) -> int:
        """Of what the network has brought, and is in use. Any thread may ask."""
        return self._memory.leased_bytes

    def close(self) -> None:
        """Gives up the memory; what is in use stays until its last view has died."""
        self._memory.close()


def is_near(actor: Actor) -> bool:
    """Whether it is on this machine and can open our files."""
    where = actor.address
    if where is None:
        return all_see_us()
    return where.node_id == session.node_id() and where.reaches_driver


def all_see_us() -> bool:
    """In a Ray of our own all actors are on this machine and can open our files: it need not be asked."""
    return session.started_here() and memory_file.others_may_open()


def _location_of(actor: Actor) -> tuple[str, str] | None:
    """Where an actor is that local sockets do not reach."""
    return None if is_near(actor) or actor.address is None else actor.address.location
