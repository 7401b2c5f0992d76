"""How an encoded object travels: large buffers in slots of the worker's arena, the others with the message.

Promise: received data is writable and belongs to nobody else, whatever the lane. Small buffers get memory of their own,
so that a program that keeps the labels of a batch keeps only the labels. The result of `sealed` is final: the worker
must not write to any part of it, except for buffers that lie in no slot and were not copied into the message.

In the order of a batch's path: worker `to_wire`, `sealed`; driver `received`, `from_wire`. The driver's `ArenaLane`
owns one actor's arena; no wait ever depends on room in it.

NOTE [Fields]. What is sent of a `Wire`, a `Room` or an `Answer` is a plain tuple of its fields, and whoever receives it
makes the object again: a tuple is pickled and unpickled in 1 us, an object of a class in 4.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Collection, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, NamedTuple

from rayloader._compat import KEEPS_SENT_STORAGES, release_sent_storages
from rayloader.interrupts import new_lock
from rayloader.transport import codec, raw
from rayloader.transport.arena import Arena, ArenaError, ArenaWriter, Leases, Slot, SlotLease, lease_of
from rayloader.transport.memory_file import FileAddress

if TYPE_CHECKING:
    from rayloader.gpu.device import Accelerator

logger = logging.getLogger("rayloader")

# Switches arenas, and the lines that they need, off for a process, as the loader's argument `arenas` does for a loader.
ARENAS_VARIABLE = "RAYLOADER_ARENAS"
# Buffers up to this size get memory of their own in the driver: a lease costs more than such a copy.
SMALL_BYTES = 1 << 16
# Small buffers of at most this size together travel in the message: a slot costs more than such a copy.
INLINE_BYTES = 1 << 12
# Room of an arena: far more than a machine's memory, because pages that were never touched take none.
ARENA_BYTES = 1 << 36
# An arena in which forks have spoiled this much is replaced: memory that a child may still read is never reused.
SPOILED_BYTES = 1 << 28


class Wire(NamedTuple):
    """The form in which an encoded object is sent; see NOTE [Fields]."""

    skeleton: bytes
    buffers: Sequence[Any]  # each a `Slice` of a slot of its own; None for a small one; or the bytes themselves
    carried: Sequence[Any]  # objects that Ray carries
    small_slot: Slot | None = None  # where the small ones lie side by side
    small_sizes: Sequence[int] = ()


class Room(NamedTuple):
    """News of the arena, sent as a plain tuple with a message, so that the worker can put batches into slots."""

    address: FileAddress | None  # of the arena; None: the last one
    freed: list[int]  # tickets of slots that are free again
    small: int  # up to what size buffers are small
    locked: Sequence[int] = ()  # offsets of page-locked slots: of all that are freed by this message, at least
    leased: Collection[int] | None = None  # if all results so far are discarded, the tickets of slots that are not


def switched_off() -> bool:
    """Whether the environment switches arenas off.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = os.environ.get(ARENAS_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{ARENAS_VARIABLE} must be 0 or 1, got {text!r}; leave it out for 1")
    return text == "0"


class Lent(NamedTuple):
    """Receives the result of a message that brought a `Room`. Drop it afterwards."""

    arena: Arena
    leases: Leases


def in_message(encoded: codec.Encoded) -> tuple[Any, ...]:
    """The fields of a wire whose buffers all travel with the message: of indices, for example."""
    if not encoded.buffers:
        return encoded.skeleton, (), encoded.carried
    return encoded.skeleton, [PickleBuffer(buffer) for buffer in encoded.buffers], encoded.carried


def to_wire(encoded: codec.Encoded, arena: ArenaWriter | None = None) -> Wire:
    """Puts buffers into slots as far as there is room; the others travel with the message.

    Args:
        encoded: the object to send.
        arena: in which a batch has begun.
    """
    if arena is None or not encoded.buffers:
        return Wire(*in_message(encoded))
    small = [buffer for buffer in encoded.buffers if buffer.nbytes <= arena.small]
    sizes = [buffer.nbytes for buffer in small]
    slot = arena.pack(small) if sum(sizes) > INLINE_BYTES else None
    buffers: list[Any] = [None] * len(encoded.buffers)
    if slot is None or len(small) < len(buffers):
        for index, buffer in enumerate(encoded.buffers):
            if buffer.nbytes > arena.small:
                buffers[index] = arena.put(buffer) or PickleBuffer(buffer)
            elif slot is None:
                buffers[index] = PickleBuffer(buffer)
    return Wire(encoded.skeleton, buffers, encoded.carried, slot, sizes)


def sealed(wire: Wire, arena: ArenaWriter) -> Wire:
    """The wire with its buffers in slots made final; call it after the batch and its encoded form have been dropped."""
    buffers = [arena.seal(buffer) if type(buffer) is tuple else buffer for buffer in wire.buffers]
    return Wire(wire.skeleton, buffers, *wire[2:])


def received(fields: Sequence[Any], lent: Lent | None) -> Wire:
    """The wire of these fields, with leased views of slots, and copies of small buffers, in place of their names."""
    skeleton, buffers, carried, small_slot, small_sizes = fields
    if lent is not None and buffers:
        arena, leases = lent.arena, lent.leases
        copies = iter(() if small_slot is None else arena.unpack(small_slot, small_sizes, leases))
        buffers = [
            next(copies) if buffer is None else arena.view(buffer, leases) if type(buffer) is tuple else buffer
            for buffer in buffers
        ]
    return Wire(skeleton, buffers, carried)


def from_wire(wire: Wire) -> Any:
    """Rebuilds an object.

    Writable buffers become its own and are not copied; an object keeps the slots of its views for as long as
    it lives. The other buffers are copied: Ray's are read-only.
    """
    if KEEPS_SENT_STORAGES:
        release_sent_storages()  # of earlier batches, whose memory is not in an arena
    return codec.decode(wire.skeleton, _writable(wire, raw.copied) if wire.buffers else (), wire.carried)


def owned(wire: Wire, copy: Callable[[memoryview], memoryview]) -> Wire:
    """The wire with copies, made by `copy`, of the buffers that can't be written to."""
    return Wire(wire.skeleton, _writable(wire, copy), wire.carried)


def _writable(wire: Wire, copy: Callable[[memoryview], memoryview]) -> list[memoryview]:
    return [copy(view) if (view := memoryview(buffer)).readonly else view for buffer in wire.buffers]


def read_only_bytes(wire: Wire) -> int:
    """Bytes of the buffers that `owned` has to copy."""
    views = [memoryview(buffer) for buffer in wire.buffers]
    return sum(view.nbytes for view in views if view.readonly)


def _leases(wire: Wire) -> list[SlotLease]:
    return [lease for lease in map(lease_of, wire.buffers) if lease is not None]


def leased_bytes(wire: Wire) -> int:
    """Bytes of the slots that its buffers keep leased."""
    return sum({lease.slot[0]: lease.slot[2] for lease in _leases(wire)}.values())


def page_lock(wire: Wire) -> tuple[int, bool]:
    """Page-locks slots that its buffers keep leased, as far as that is worth it now.

    Returns:
        How many bytes are page-locked that were not; whether its buffers lie in slots, all of which are page-locked.
    """
    leases = _leases(wire)
    nbytes = sum([lease.page_lock() for lease in leases])
    return nbytes, bool(leases) and all(lease.is_page_locked for lease in leases)


def pack(message: Any, wires: Sequence[Sequence[Any]]) -> Any:
    """A message with these wires' fields, as bytes unless Ray must inspect it: Ray takes long to pickle anything."""
    made = [Wire(*fields) for fields in wires]
    for_ray = any(wire.carried or any(isinstance(b, PickleBuffer) for b in wire.buffers) for wire in made)
    return message if for_ray else pickle.dumps(message, 5)


def unpack(message: Any) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(message) if isinstance(message, bytes) else message


def fits_in_band(wire: Wire, nbytes: int) -> bool:
    """Whether it can be pickled without Ray, with at most so many bytes of buffers that are in no slot."""
    if wire.carried:
        return False
    in_message = [memoryview(b).nbytes for b in wire.buffers if b is not None and type(b) is not tuple]
    return len(wire.skeleton) + sum(in_message) <= nbytes


class ArenaLane:
    """The driver's side of one actor's arena.

    Args:
        kind: purpose of its slots, as for `Arena`.

    Attributes:
        accelerator: for which the batches to come may be page-locked.
    """

    def __init__(self, kind: str = "arena") -> None:
        self._kind = kind
        self.accelerator: Accelerator | None = None
        self._arena: Arena | None = None
        self._off = ""  # why there will be no arena
        self._abandoned = False  # the worker is to be told that

    @property
    def is_open(self) -> bool:
        """Whether there is an arena."""
        return self._arena is not None

    @property
    def leased_bytes(self) -> int:
        """Bytes in slots that hold a batch, or a part of one."""
        arena = self._arena  # read once: another thread may call this
        return arena.leased_bytes if arena is not None else 0

    def lend(self, known: FileAddress | None = None) -> tuple[Lent | None, tuple[Any, ...] | None]:
        """Room for the batch of a message, and the fields of a `Room`; no room if there is no arena.

        Args:
            known: the arena that the worker was told of last.
        """
        if self._off:
            return None, None
        arena = self._arena
        freed = arena.freed() if arena is not None else []
        if arena is None or arena.spoiled > SPOILED_BYTES:
            try:
                self._arena = arena = Arena(ARENA_BYTES, self._kind)
            except ArenaError as error:
                self._off = str(error)
                return None, None
            freed = []
        if self.accelerator is not None and self.accelerator.can_register:
            arena.page_lock_for(self.accelerator)
        address = arena.address if arena.address is not known else None
        news: tuple[Any, ...] = address, freed, SMALL_BYTES, arena.locked(all_slots=self._abandoned)
        if self._abandoned:
            self._abandoned = False
            news += (arena.leased(),)
        return Lent(arena, {}), news

    def abandon(self) -> None:
        """No result that the worker was asked for so far will be received."""
        self._abandoned = True

    def rest(self, resting: bool) -> None:
        """The actor is idle, or is no longer."""
        if self._arena is not None:
            self._arena.rest(resting)

    def refused(self, reason: str) -> None:
        """The worker cannot open the arena: its batches travel in the messages."""
        self.close()
        self._off = reason
        logger.info("rayloader: batches travel without shared memory: %s", reason)

    def was_full(self) -> None:
        """The worker had no room for a buffer."""
        global _warned_of_full
        if not _warned_of_full:
            _warned_of_full = True
            logger.warning(
                "rayloader: so many batches of one worker are held at once that its arena of %d MB is full, and "
                "further ones are copied, which is slower; drop batches when they are used, or clone what you keep",
                ARENA_BYTES >> 20,
            )

    def close(self) -> None:
        """The process is gone, or soon will be: memory without a batch is freed at once, the rest with its batches."""
        if self._arena is not None:
            self._arena.close(give_back=True)
            self._arena = None


_warned_of_full = False  # for all lanes


class WorkerLane:
    """The worker's side: the open arena that the driver named last.

    Attributes:
        address: of that arena.
    """

    def __init__(self) -> None:
        self.address: FileAddress | None = None
        self._arena: ArenaWriter | None = None
        self.error = ""  # why it cannot be opened

    def open(self, room: Sequence[Any] | None) -> ArenaWriter | None:
        """For the batches of a message that brought these fields of a `Room`; None if there is no arena here."""
        if room is None:
            return None
        news = Room(*room)
        if (address := news.address) is not None and address != self.address:
            self._arena, self.address, self.error = None, address, ""
            try:
                self._arena = ArenaWriter(address)
            except ArenaError as error:
                self.error = str(error)
        if self._arena is not None:
            self._arena.small = news.small
            self._arena.lock(news.locked)
            self._arena.free(news.freed)
            if news.leased is not None:
                self._arena.abandon(news.leased)
        return self._arena

    def take_full(self) -> bool:
        """Whether there was no room for a buffer since the last call."""
        if self._arena is None:
            return False
        full, self._arena.full = self._arena.full, False
        return full


class Recycled:
    """Memory for the copies of this process, reused once nothing refers to it any more.

    A copy is writable and belongs to nobody else, for as long as any view of it lives. It lies in an arena of which
    this process is the worker as well as the driver; without one, or without room, it has fresh memory. Nothing waits.
    One thread at a time copies; any may call `close`, more than once.

    Args:
        accelerator: for which the memory may be page-locked.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._lock = new_lock(reentrant=False)
        self._closed = False
        self._lane, self._own = ArenaLane("copies"), WorkerLane()
        self._lane.accelerator = accelerator

    def copy(self, buffer: memoryview) -> memoryview:
        """A copy of flat bytes, in memory from `room`."""
        return raw.copied(buffer, self.room)

    def room(self, nbytes: int) -> memoryview:
        """Memory for `nbytes` bytes; small sizes get memory of their own, so that keeping them keeps nothing else."""
        if nbytes > SMALL_BYTES:
            with self._lock:
                leased = self._leased(nbytes)
            if leased is not None:
                return leased
        return raw.new_memory(nbytes)

    def _leased(self, nbytes: int) -> memoryview | None:
        lent, news = (None, None) if self._closed else self._lane.lend(self._own.address)
        if lent is None or (writer := self._own.open(news)) is None:
            return None
        writer.begin()
        where = writer.reserve(nbytes)
        return None if where is None else lent.arena.view(where, lent.leases)

    @property
    def leased_bytes(self) -> int:
        """Bytes of copies that have live views. Any thread may ask."""
        return self._lane.leased_bytes

    def close(self) -> None:
        """Gives unused memory back to the system at once, and the rest with the last view of each copy."""
        with self._lock:
            self._closed, self._own = True, WorkerLane()
            self._lane.close()
