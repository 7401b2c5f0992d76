"""How far each consumer has read, and what follows: what to produce and to keep, who may read what, who waits for whom.

Promise: pure. Batches of one loader are produced one after the other, epoch after epoch, and each consumer reads all of
them in this order. A batch is kept until the last consumer has taken it, and nothing is produced while `buffer` batches
are kept: no consumer gets further ahead of the slowest. No Ray, no clock, no threads; standard library only.

NOTE [Places]. A place (epoch, number) is before the batch of that number: a consumer at this place has taken all
batches before it. Places only grow, except by `seek`. The front is the place of the next batch to be produced.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A place before a batch of an epoch; see NOTE [Places]."""

    epoch: int
    number: int


class PlacesLeft(NamedTuple):
    """How many more batches may be kept, or fewer, once they have so many bytes."""

    batches: int
    nbytes: int


START, NOWHERE = Place(0, 0), Place(-1, 0)
# Takes the place of a batch after the last of an epoch.
END: Any = object()


class Step(Enum):
    """What to do next."""

    BEGIN = "begin the next epoch"
    PRODUCE = "produce a batch"
    WAIT = "wait for the consumers"


@dataclass(slots=True)
class _Consumer:
    place: Place = START
    asked: Place = NOWHERE  # the last batch that it has requested; it takes them in order
    gone: str = ""  # why it no longer reads


class Ledger:
    """The ledger of one share; its attributes belong together, and only its methods change them.

    Args:
        consumers: how many there are.
        buffer: how many batches are kept at most.
        buffer_bytes: from this many bytes on nothing is produced either, once two batches are kept.
    """

    def __init__(self, consumers: int, buffer: int, buffer_bytes: int) -> None:
        self._consumers = [_Consumer() for _ in range(consumers)]
        self._buffer, self._buffer_bytes = buffer, buffer_bytes
        self._kept: dict[Place, tuple[Any, int]] = {}  # batch and bytes; in order, without gaps within an epoch
        self._nbytes = 0
        self._front = NOWHERE
        self._lengths: dict[int, int] = {-1: 0}  # of finished epochs, as far back as some consumer reads

    # ---- the producer

    @property
    def front(self) -> Place:
        """The place of the next batch to be produced; epoch -1 before the first."""
        return self._front

    @property
    def lowest(self) -> Place:
        """The place of the slowest consumer; the front if no consumer reads any more."""
        return min((consumer.place for consumer in self._reading()), default=self._front)

    @property
    def room(self) -> PlacesLeft:
        """What may be produced before the next `step`, which may say more."""
        return PlacesLeft(self._buffer - len(self._kept), self._buffer_bytes - self._nbytes)

    def step(self) -> Step:
        """What to do next."""
        after = Place(self._front.epoch + 1, 0)
        over = self._front.epoch in self._lengths or self.lowest >= after  # the second: all have broken it off
        if over:
            return Step.BEGIN if any(consumer.asked >= after for consumer in self._reading()) else Step.WAIT
        return Step.PRODUCE if self._has_room() and any(self._reading()) else Step.WAIT

    def begin(self) -> None:
        """The next epoch has begun."""
        self._lengths.setdefault(self._front.epoch, self._front.number)
        self._front = Place(self._front.epoch + 1, 0)
        self._forget()

    def add(self, batch: Any, nbytes: int) -> None:
        """Adds the batch at the front, which was produced."""
        self._kept[self._front] = batch, nbytes
        self._nbytes += nbytes
        self._front = self._front._replace(number=self._front.number + 1)
        self._forget()

    def end(self) -> None:
        """The epoch has no more batches."""
        self._lengths[self._front.epoch] = self._front.number

    def held_up_by(self) -> list[int]:
        """The consumers that must read on before a batch that another one has requested can be produced."""
        if self.step() is not Step.WAIT or self._has_room():
            return []
        if not any(consumer.asked >= consumer.place >= self._front for consumer in self._reading()):
            return []
        lowest = self.lowest
        return [rank for rank, consumer in enumerate(self._consumers) if not consumer.gone and consumer.place == lowest]

    # ---- the consumers

    def place_of(self, rank: int) -> Place:
        """Where a consumer continues: in the next epoch if it has taken all batches of one."""
        place = self._consumers[rank].place
        return Place(place.epoch + 1, 0) if self._lengths.get(place.epoch) == place.number else place

    def gone(self, rank: int) -> str:
        """Why a consumer no longer reads; "" if it does."""
        return self._consumers[rank].gone

    def reach(self, rank: int, place: Place) -> None:
        """A consumer has taken all batches before this place."""
        consumer = self._consumers[rank]
        consumer.place = max(consumer.place, place)
        self._forget()

    def ask(self, rank: int, place: Place) -> None:
        """A consumer requests the batch at this place."""
        consumer = self._consumers[rank]
        consumer.asked = max(consumer.asked, place)

    def find(self, place: Place) -> Any:
        """The batch at a place; `END` after the last of its epoch, None if it is not produced yet."""
        if place in self._kept:
            return self._kept[place][0]
        length = self._lengths.get(place.epoch, self._front.number)
        is_over = place.epoch in self._lengths or place.epoch < self._front.epoch
        return END if (is_over and place.number >= length) or place < self.lowest else None

    def seek(self, rank: int, place: Place) -> bool:
        """A consumer continues at this place, as if it had taken everything before it and nothing after it.

        Returns:
            Whether it does: False if batches from there on are no longer kept.
        """
        oldest = min(self._kept, default=self._front)
        if place < min(oldest, self.place_of(rank)):
            return False
        self._consumers[rank].place, self._consumers[rank].asked = place, NOWHERE
        self._forget()
        return True

    def leave(self, rank: int, why: str) -> None:
        """A consumer stops reading, and the others no longer wait for it."""
        self._consumers[rank].gone = why
        self._forget()

    # ----

    def _reading(self) -> list[_Consumer]:
        return [consumer for consumer in self._consumers if not consumer.gone]

    def _has_room(self) -> bool:
        return len(self._kept) < self._buffer and (len(self._kept) < 2 or self._nbytes < self._buffer_bytes)

    def _forget(self) -> None:
        lowest = self.lowest
        while self._kept and (oldest := next(iter(self._kept))) < lowest:
            self._nbytes -= self._kept.pop(oldest)[1]
        for epoch in [epoch for epoch in self._lengths if epoch < min(lowest.epoch, self._front.epoch)]:
            del self._lengths[epoch]
