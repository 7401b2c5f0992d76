"""How an encoded object travels: its buffers in the worker's arena where there is room, otherwise with the call.

Promise: `to_wire` and `from_wire` are each other's inverse through Ray, whatever the lane; what arrives is writable and
nobody else's. The driver's `ArenaLane` owns one actor's arena, from the first batch that is worth one until the actor's
end; no wait ever depends on room in it.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

from rayloader.transport import codec
from rayloader.transport.arena import SLOT_ALIGN, Arena, ArenaAddress, ArenaError, ArenaWriter, Slot, SlotWriter

logger = logging.getLogger("rayloader")

# Switches arenas off for a process, as the loader's argument `arenas` does for a loader.
ARENAS_VARIABLE = "RAYLOADER_ARENAS"
# Smaller batches travel in the answer: copying them costs less than a slot.
MIN_SLOT_BYTES = 4096
# What an arena has room for beyond the window: what the user may hold before the store lane takes over, in batches and
# in calls (one batch that is held keeps its call's slot). Pages that were never used take no memory.
SPARE_BATCHES = 16
SPARE_CALLS = 4
# An arena is replaced when it has become too small and is full, or is so many times larger than one would be made now.
TOO_LARGE = 8
# Room beyond the largest batch lately seen, for batches that vary; and how fast such a size is forgotten.
HEADROOM = 1.125
FORGET = 0.98


# A buffer that lies in the call's slot, instead of travelling: its offset there and its size in bytes.
Placed = tuple[int, int]
# What Ray hands over of an encoded object: the skeleton, the buffers, out of band or placed, and what is carried.
Wire = tuple[bytes, list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Room:
    """A slot for one call, and the arena it is in, as the worker is told."""

    address: ArenaAddress
    slot: Slot


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """The driver's side of a `Room`. It keeps an arena open that has been replaced meanwhile."""

    arena: Arena
    slot: Slot

    @property
    def room(self) -> Room:
        """For the worker."""
        return Room(self.arena.address, self.slot)


def to_wire(encoded: codec.Encoded, writer: SlotWriter | None = None) -> Wire:
    """Puts the buffers into the slot as far as there is room; Ray sends the others out of band."""
    buffers: list[Any] = []
    for buffer in encoded.buffers:
        place = writer.place(buffer) if writer is not None else None
        buffers.append(PickleBuffer(buffer) if place is None else place)
    return encoded.skeleton, buffers, encoded.carried


def unplaced(wire: Wire, lent: Lent) -> Wire:
    """The same with views of the slot for what lies there; they keep the slot, and the call can be released."""
    skeleton, buffers, carried = wire
    views = [lent.arena.view(lent.slot, *b) if isinstance(b, tuple) else b for b in buffers]
    return skeleton, views, carried


def from_wire(wire: Wire) -> Any:
    """Rebuilds an object.

    Views of a slot are not copied, and the object keeps the slot for as long as it lives. The other buffers are: Ray's
    are read-only.
    """
    skeleton, buffers, carried = wire
    own = [b if isinstance(b, memoryview) and not b.readonly else codec.writable_copies([b])[0] for b in buffers]
    return codec.decode(skeleton, own, carried)


def pack(message: Any, wires: Sequence[Wire]) -> Any:
    """A message that holds these wires, as bytes where Ray need not look into it: it takes long to pickle anything."""
    return message if any(carried or _unplaced(buffers) for _, buffers, carried in wires) else pickle.dumps(message, 5)


def unpack(message: Any) -> Any:
    """What was packed."""
    return pickle.loads(message) if isinstance(message, bytes) else message


def _unplaced(buffers: list[Any]) -> bool:
    return any(isinstance(buffer, PickleBuffer) for buffer in buffers)


def slot_bytes(encoded: codec.Encoded) -> int:
    """What the buffers take in a slot."""
    return sum(-(-buffer.nbytes // SLOT_ALIGN) * SLOT_ALIGN for buffer in encoded.buffers)


def fits_in_band(wire: Wire, nbytes: int) -> bool:
    """Whether it can be pickled without Ray, with so many bytes at most of what is not placed."""
    skeleton, buffers, carried = wire
    if carried:
        return False
    return len(skeleton) + sum(b.raw().nbytes for b in buffers if isinstance(b, PickleBuffer)) <= nbytes


class ArenaLane:
    """The driver's side of one actor's arena."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._lent: set[Lent] = set()  # to calls whose slot is not released
        self._batch_nbytes = 0.0
        self._most_tasks = 1  # of a call
        self._off = ""  # why there will be no arena

    @property
    def arena_names(self) -> set[str]:
        """Of the memory files that the next slot comes from, and that unanswered calls have slots in."""
        arenas = {lent.arena for lent in self._lent} | ({self._arena} if self._arena is not None else set())
        return {arena.address.name for arena in arenas}

    def saw(self, nbytes: int) -> None:
        """Takes in the size of a batch."""
        self._batch_nbytes = max(float(nbytes), FORGET * self._batch_nbytes)

    def take_after(self, other: ArenaLane) -> None:
        """Expects batches as large as the other's."""
        self._batch_nbytes, self._most_tasks = other._batch_nbytes, other._most_tasks

    def refused(self, reason: str) -> None:
        """The worker cannot open the arena: it lives elsewhere."""
        self._off, self._arena = reason, None
        logger.info("rayloader: batches travel through Ray's object store: %s", reason)

    def lend(self, tasks: int, window: int) -> Lent | None:
        """A slot for a call's batches; None where there is none, or they are not worth one.

        Args:
            tasks: batches that the call may bring.
            window: batches of this worker that may be under way.
        """
        batch_nbytes = self._batch_nbytes * HEADROOM
        nbytes = max(1, math.ceil(batch_nbytes * tasks / mmap.PAGESIZE)) * mmap.PAGESIZE  # slots are pages
        if self._off or self._batch_nbytes * tasks < MIN_SLOT_BYTES or os.environ.get(ARENAS_VARIABLE) == "0":
            return None
        self._most_tasks = most = max(self._most_tasks, tasks)
        batches = max(window, most) + max(SPARE_BATCHES, SPARE_CALLS * most)
        wanted = max(math.ceil(batches * batch_nbytes), (window + SPARE_BATCHES) * mmap.PAGESIZE)
        arena = self._arena
        if arena is not None and arena.address.nbytes > wanted * TOO_LARGE:
            arena = None  # batches have shrunk: its memory goes with its calls and what is held of it
        slot = arena.take(nbytes) if arena is not None else None
        if slot is None and arena is not None and arena.address.nbytes >= wanted and not arena.spoiled:
            _tell_once()
            return None
        if slot is None:  # there is none yet, it has become too small, or forks took part of it for good
            try:
                arena = Arena(wanted)
            except ArenaError as error:
                self._off = str(error)
                return None
            slot = arena.take(nbytes)
        self._arena = arena
        if arena is None or slot is None:
            return None
        lent = Lent(arena, slot)
        self._lent.add(lent)
        return lent

    def release(self, lent: Lent | None, *, reuse: bool) -> None:
        """The call was answered, and its batch opened or dropped."""
        if lent is not None:
            self._lent.discard(lent)
            lent.arena.release_call(lent.slot, reuse=reuse)

    def settle(self, *, reuse: bool) -> None:
        """Every call was answered. Without `reuse` the worker may still hold memory of the slots."""
        for lent in list(self._lent):
            self.release(lent, reuse=reuse)

    def abandon_unanswered(self) -> None:
        """Gives up an arena that calls may still write to though nobody waits for them."""
        if self._lent:
            self.close()

    def close(self) -> None:
        """Gives up the arena: its memory goes with what is held of it. The next batch may get a new one."""
        self._lent.clear()
        self._arena = None


_told = False  # that batches are held; all lanes say it once


def _tell_once() -> None:
    global _told
    if not _told:
        _told = True
        logger.warning(
            "rayloader: so many batches of one worker are held at once (%d or more) that its further ones are copied "
            "through Ray's object store; drop batches when they are used, or clone what is to be kept",
            SPARE_BATCHES // 2,
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
