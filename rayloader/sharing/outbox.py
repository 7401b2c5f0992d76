"""The producer's end of a consumer's line: sends batches before they are asked for one by one.

Promise: the consumer gets its batches in order, each once, and never more than it has room for. Nothing here waits:
what the socket does not accept is sent when it does. All methods run in one event loop.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

from rayloader.sharing.ledger import Place
from rayloader.sharing.messages import Begin, Kind, Take, for_line
from rayloader.transport.line import Line, Message, packed


class Outbox:
    """The batches that one consumer is still to be sent.

    Args:
        rank: of the consumer.
        connection: its number.
        line: to it, connected.
        hear: called when something has come, or the line has ended.

    Attributes:
        rank: of the consumer.
        connection: its number.
        epoch: that it reads.
    """

    def __init__(self, rank: int, connection: int, line: Line, hear: Callable[[Outbox], None]) -> None:
        self.rank, self.connection = rank, connection
        self._place: Place | None = None  # of the batch that is sent next
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._series = -1
        self._until = 0  # number after the last batch to send for now
        self.epoch = -1
        self._gone: dict[int, str] = {}  # as the consumer knows it
        self._descriptor = line.descriptor
        self._loop.add_reader(self._descriptor, hear, self)

    @property
    def has_ended(self) -> bool:
        """Whether the consumer has gone."""
        return self._line.ended

    @property
    def wants(self) -> Place | None:
        """The place of the batch to send now; None if there is none, or the consumer has no room for it."""
        return self._place if self._place is not None and self._place.number < self._until else None

    def received(self) -> list[Begin | Take]:
        """What the consumer has said."""
        return [pickle.loads(message) for message in self._line.receive()]  # type: ignore[arg-type] # no parcels

    def begin(self, begin: Begin) -> None:
        """A new series."""
        self._series, self._until, self.epoch = begin.series, begin.until, begin.epoch
        self._place = Place(begin.epoch, begin.first)

    def allow(self, take: Take) -> bool:
        """The consumer has room for more; returns whether it still reads that series."""
        if take.series != self._series:
            return False
        self._until = take.until
        return True

    def send(self, content: Message) -> None:
        """Sends the batch that it wants, or what is in its place."""
        assert self._place is not None
        self._send(self._place.number, content)
        self._place = self._place._replace(number=self._place.number + 1)

    def end(self, kind: Kind, payload: object = None) -> None:
        """Sends this in place of the next batch, and none after it."""
        self.send(packed((kind.value, payload), None))
        self._place = None

    def tell_gone(self, gone: dict[int, str]) -> None:
        """Tells the consumer which others no longer read, if that is news."""
        if gone != self._gone:
            self._gone = gone
            self._send(-1, packed((Kind.GONE.value, gone), None))

    def _send(self, number: int, content: Message) -> None:
        self._line.send(for_line(self._series, number, content))
        if self._line.unsent:
            self._loop.add_writer(self._descriptor, self._send_rest)

    def _send_rest(self) -> None:
        self._line.flush()
        if not self._line.unsent:
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """Ends the line."""
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._place = None
        self._line.close()
