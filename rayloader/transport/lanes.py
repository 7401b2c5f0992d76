"""How an encoded object travels: its buffers in the worker's arena where there is room, otherwise with the call.

Promise: `to_wire` and `from_wire` are each other's inverse through Ray, whatever the lane; what arrives is writable and
nobody else's. The driver's `ArenaLane` owns one actor's arena, from the first batch that is worth one until the actor's
end; no wait ever depends on room in it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

from rayloader.transport import codec
from rayloader.transport.arena import Arena, ArenaAddress, ArenaError, ArenaWriter, Slot, SlotWriter

logger = logging.getLogger("rayloader")

# Switches arenas off for a process, as the loader's argument `arenas` does for a loader.
ARENAS_VARIABLE = "RAYLOADER_ARENAS"
# Smaller batches travel in the answer: copying them costs less than a slot.
MIN_SLOT_BYTES = 4096
# Slots that an arena has room for, beyond those of the window: what the user may hold before the store lane takes over.
# Pages that were never used take no memory.
SPARE_SLOTS = 16
# Room beyond the largest batch lately seen, for batches that vary; and how fast such a size is forgotten.
HEADROOM = 1.125
FORGET = 0.98


@dataclass(frozen=True, slots=True)
class Placed:
    """A buffer that lies in the call's slot, instead of travelling."""

    offset: int
    nbytes: int


# What Ray hands over of an encoded object: the skeleton and the buffers, out of band or placed.
Wire = tuple[bytes, list[Any]]


@dataclass(frozen=True, slots=True)
class Room:
    """A slot for one call, and the arena it is in."""

    address: ArenaAddress
    slot: Slot


def to_wire(encoded: codec.Encoded, writer: SlotWriter | None = None) -> Wire:
    """Puts the buffers into the slot as far as there is room; Ray sends the others out of band."""
    buffers: list[Any] = []
    for buffer in encoded.buffers:
        place = writer.place(buffer) if writer is not None else None
        buffers.append(PickleBuffer(buffer) if place is None else Placed(*place))
    return encoded.skeleton, buffers


def from_wire(wire: Wire) -> Any:
    """Rebuilds an object that came without a slot; Ray's buffers are read-only, so they are copied."""
    skeleton, buffers = wire
    return codec.decode(skeleton, codec.writable_copies(buffers))


class ArenaLane:
    """The driver's side of one actor's arena."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._rooms: dict[int, Room] = {}  # of calls whose slot is not released, by ticket
        self._batch_nbytes = 0.0
        self._off = ""  # why there will be no arena
        self._told = False

    def saw(self, nbytes: int) -> None:
        """Takes in the size of a batch."""
        self._batch_nbytes = max(float(nbytes), FORGET * self._batch_nbytes)

    def refused(self, reason: str) -> None:
        """The worker cannot open the arena: it lives elsewhere."""
        self._off = reason
        self.drop()
        logger.info("rayloader: batches travel through Ray's object store: %s", reason)

    def room(self, window: int) -> Room | None:
        """A slot for a batch; None where there is none, or a batch is not worth one.

        Args:
            window: batches of this worker that may be under way.
        """
        nbytes = int(self._batch_nbytes * HEADROOM)
        if self._off or self._batch_nbytes < MIN_SLOT_BYTES or os.environ.get(ARENAS_VARIABLE) == "0":
            return None
        if self._arena is not None and nbytes * (window + 2) > self._arena.address.nbytes:
            self.drop()  # batches have grown: its memory goes with the batches that are held
        try:
            if self._arena is None:
                self._arena = Arena(nbytes * (window + SPARE_SLOTS))
        except ArenaError as error:
            self._off = str(error)
            return None
        slot = self._arena.take(nbytes)
        if slot is None:
            self._tell_once()
            return None
        room = Room(self._arena.address, slot)
        self._rooms[slot.ticket] = room
        return room

    def open(self, room: Room | None, wire: Wire) -> Any:
        """Rebuilds an object; what is in the slot is not copied, and keeps the slot for as long as it lives."""
        skeleton, buffers = wire
        if room is None:
            return from_wire(wire)
        if self._arena is None or self._arena.address is not room.address:
            raise RuntimeError("the arena of a batch is gone")  # a fault in the caller
        arena, slot = self._arena, room.slot
        own = [
            arena.view(slot, buffer.offset, buffer.nbytes)
            if isinstance(buffer, Placed)
            else codec.writable_copies([buffer])[0]
            for buffer in buffers
        ]
        return codec.decode(skeleton, own)

    def release(self, room: Room | None, *, reuse: bool) -> None:
        """The call was answered, and its batch opened or dropped."""
        if room is not None and self._rooms.pop(room.slot.ticket, None) is not None and self._arena is not None:
            self._arena.release_call(room.slot, reuse=reuse)

    def settle(self, *, reuse: bool) -> None:
        """Every call was answered. Without `reuse` the worker may still hold memory of the slots."""
        for room in list(self._rooms.values()):
            self.release(room, reuse=reuse)

    def drop(self) -> None:
        """Gives up the arena; batches that are held keep its memory."""
        if self._arena is not None:
            self._arena.close()
        self._arena = None
        self._rooms.clear()

    def drop_if_unanswered(self) -> None:
        """Gives up an arena that calls may still write to though nobody waits for them."""
        if self._rooms:
            self.drop()

    def _tell_once(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "rayloader: %d or more batches of one worker are held at once, so its further batches are copied "
                "through Ray's object store; drop batches when they are used, or clone what is to be kept",
                SPARE_SLOTS,
            )


class WorkerLane:
    """The worker's side: the arena that the driver last named, open."""

    def __init__(self) -> None:
        self._address: ArenaAddress | None = None
        self._arena: ArenaWriter | None = None
        self.error = ""  # why it cannot be opened

    def writer(self, room: Room | None) -> SlotWriter | None:
        """For the slot of a call; None if there is none or it cannot be reached."""
        if room is None:
            return None
        if room.address != self._address:
            self.close()
            self._address = room.address
            try:
                self._arena = ArenaWriter.open(room.address)
            except ArenaError as error:
                self.error = str(error)
        return self._arena.writer(room.slot) if self._arena is not None else None

    def close(self) -> None:
        """Unmaps it; callable more than once."""
        if self._arena is not None:
            self._arena.close()
        self._arena, self._address, self.error = None, None, ""
