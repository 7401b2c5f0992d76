"""Memory that driver and worker share: the worker builds batches in it, the driver hands them out without a copy.

An *arena* is an anonymous memory file of one actor process. The driver creates it; the worker opens it by its
`FileAddress` and takes *slots* in it, because the worker knows the sizes: one for each large buffer of a batch, and
one for the small ones together. The driver creates a *lease* of a slot when it receives a result; when the last view of
a lease's memory has died, whatever kind of view, in whatever thread, in whatever order, `freed` returns the slot's
ticket, and the next message to the worker carries it back.

- Nothing waits: without room `allocate`, `put` and `pack` return None and the caller takes another lane.
- A slot that something in the worker still refers to is never the driver's: see NOTE [Final].
- Nothing is visible in the file system; the kernel frees the file with its last user (memory_file.py). The file is
  sparse: only pages that were touched take memory. Memory that has been free for long is given back (NOTE [Cold
  memory]), and so is all memory without a lease when the worker has ended.

Driver: `Arena`; `freed`, `leased` and `close` are for one thread at a time, leases die in any. Worker: `ArenaWriter`,
one thread. This module does not import Ray, and does not know what a batch is.

NOTE [Leases]. A slot's lease is an object that shows the slot's memory to NumPy (`__array_interface__`) and posts the
slot to a deque when it dies: no lock, no I/O, because that may happen in any thread, in the garbage collector, at exit.
Everything cut from it refers to it: memoryview -> ndarray -> lease. Torch and NumPy keep the memoryview, or the ndarray
behind it. (An ndarray subclass with a `__del__` would not do: NumPy shortens chains of arrays and skips it.) Mappings
end in the same way: leases refer to them, and no code unmaps. Once no worker needs the memory any more, a lease gives
it back to the system when it dies, as the end of any large array does.

NOTE [Forks]. A forked child shares the mapping, and may read for ever what was leased at the time of the fork. So a
lease remembers the number of forks before it, and its slot is reused only if there was none since. A slot that is
leased while another thread is forking is never reused, because it is unknown whether the child sees it. The worker does
the same for slots that user code could have seen when it forked; its children take no slots.

NOTE [Interrupts]. A result may be received twice, if a Ctrl-C came in the middle of the first time. So the leases of
a message are kept, by ticket, until all of it was received (`Leases`), and a lease posts nothing before it is kept. So
are copies, and their slot is posted after that. `freed` may return a ticket twice, if a Ctrl-C came in the middle of
the first time. At worst an interrupt loses a slot, until `ArenaWriter.abandon`.

NOTE [Final]. A result is final when its task ends. But user code may have kept a tensor that was stacked in a slot, and
write to it later. So after the batch has been dropped, `seal` checks whether anything still refers to the slot, and if
so sends a copy. The slot then belongs to the worker alone, and becomes free when nothing refers to it any more.

NOTE [Reuse]. A slot gets the place of a returned one of the same size, the one that came back last first: its memory is
still in the processor's cache. Sizes are rounded up by an eighth at most, so that batches that vary a little meet the
same sizes again. If there is no such slot, all free slots are joined with their neighbours, and the new one is cut from
the lowest stretch that fits: that touches no new page while an old one fits.

NOTE [Cold memory]. A page costs memory once it was touched, even if its slot is free. So whenever `COLD_AFTER` slots
were taken, all that is free then is given back to the system. Some of it was in use just before: a few of the next
batches touch their pages anew. To give back more often would cost more.

NOTE [Locked slots]. The driver may page-lock a slot for an accelerator while it has it leased (page_locks.py). The
accelerator refuses a copy of which only a part is locked, and goes on reading the pages that it was told of. So the
worker learns it before the slot is free again: then its place is for whole slots for ever, is neither joined nor cut
nor cold, and is preferred for all that fills at least half of it.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayloader._compat import KEEPS_SENT_STORAGES, release_sent_storages
from rayloader.errors import RayloaderError
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file
from rayloader.transport.raw import Memory

if TYPE_CHECKING:
    from rayloader.gpu.device import Accelerator
    from rayloader.gpu.page_locks import PageLocks

PAGE = mmap.PAGESIZE
COLD_AFTER = 1024  # slots
# Small buffers lie side by side in their slot, at multiples of this.
PACKED_ALIGN = 64
_NEVER = -1
_GONE = "the worker of this batch was shut down"


class ArenaError(RayloaderError):
    """An arena can't be created, opened or used here; its data has to go another way."""


Slot = tuple[int, int, int]  # unique ticket in the arena; offset in the file; size in bytes
Slice = tuple[Slot, int, int]  # of a buffer: its slot, its offset in the slot, its size in bytes


class ArenaMemory:
    """A whole file, mapped shared and writable for as long as something refers to this object."""

    __slots__ = ("bytes", "gone", "locks", "memory", "resting", "start")

    def __init__(self, fd: int, nbytes: int) -> None:
        file = mmap.mmap(fd, nbytes)  # holds a duplicate of `fd`
        self.memory = memoryview(file)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(file, np.uint8)
        self.start: int = self.bytes.__array_interface__["data"][0]
        self.resting = False  # whether leases give freed memory back to the system
        self.gone = False  # whether all memory without a lease was given back
        self.locks: PageLocks | None = None  # of its slots, if they may be page-locked

    def give_back(self, start: int, nbytes: int) -> None:
        """Gives the memory of whole pages back to the system; they read as zeros and can be used again."""
        if nbytes:
            file: Any = self.memory.obj
            with contextlib.suppress(OSError):  # the kernel does not support it: they stay until the mapping ends
                file.madvise(mmap.MADV_REMOVE, start, nbytes)


Dead = deque[tuple[int, bool]]  # ticket, whether it may be reused


class SlotLease(Memory):
    """The right to a slot; see NOTE [Leases]."""

    __slots__ = ("dead", "forks", "mapping", "slot")

    def __init__(self, mapping: ArenaMemory, slot: Slot, forks: int) -> None:
        super().__init__(mapping.start + slot[1], slot[2], mapping)
        self.mapping, self.slot, self.forks = mapping, slot, forks
        self.dead: Dead | None = None  # from when it is kept on

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        dead: Dead | None = getattr(self, "dead", None)  # missing if an interrupt came before the constructor's end
        if dead is None or is_finalizing():  # at the end of the interpreter the modules' names may be gone
            return
        (ticket, start, size), mapping = self.slot, self.mapping
        reuse = self.forks == forks_begun
        if reuse and mapping.resting and not self.is_page_locked:
            mapping.give_back(start, size)  # before the worker can learn of it
        dead.append((ticket, reuse))
        if mapping.gone:
            if (locks := mapping.locks) is not None:
                locks.ring()
            elif reuse:
                mapping.give_back(start, size)

    def page_lock(self) -> int:
        """Page-locks the slot if that is worth it now, and returns its size if so; see `PageLocks.lock`."""
        return 0 if (locks := self.mapping.locks) is None else locks.lock(*self.slot[1:])

    @property
    def is_page_locked(self) -> bool:
        """Whether the slot is page-locked."""
        return (locks := self.mapping.locks) is not None and locks.is_locked(self.slot[1])


Leases = dict[int, SlotLease | list[bytearray]]  # by ticket; the leases of one message, and copies


def lease_of(buffer: Any) -> SlotLease | None:
    """The lease of the slot in which a buffer lies; None if it is other memory."""
    lease = getattr(memoryview(buffer).obj, "base", None)
    return lease if isinstance(lease, SlotLease) else None


# See NOTE [Forks]. Module state, because a fork affects all arenas of the process.
forks_begun = 0  # begun so far
forks_under_way = 0  # in progress, in all threads


def _before_fork() -> None:
    global forks_begun, forks_under_way
    forks_begun += 1
    forks_under_way += 1


def _after_fork() -> None:
    global forks_under_way
    forks_under_way -= 1


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


class Arena:
    """The driver's side: creates the file, leases slots and knows which are free again.

    Args:
        nbytes: room for slots, rounded up to whole pages. Pages cost memory once they are touched.
        kind: purpose of its slots; part of the file's name.

    Attributes:
        address: for the worker to open it.
        spoiled: bytes that will never be free again (see NOTE [Forks]), as of the last call of `freed`.

    Raises:
        ArenaError: this system has no memory files, or no room for one.
    """

    def __init__(self, nbytes: int, kind: str = "arena") -> None:
        size = max(1, -(-nbytes // PAGE)) * PAGE
        self._file: MemoryFile | None = None
        self._pid = os.getpid()
        try:
            self._file = MemoryFile(kind, size)
            self.address = self._file.address
            self._file.seal(writes=False)
            self._mapping = ArenaMemory(self._file.fd, size)
        except (OSError, MemoryFileError) as error:
            self.close()
            raise ArenaError(f"can't make an arena's memory file: {error}") from error
        self._leased: dict[int, Slot] = {}  # by ticket: live leases, posted ones, held ones and spoiled ones
        self._dead: Dead = deque()  # posted by leases
        self._spoiled: set[int] = set()  # tickets
        self._freed_locked: list[int] = []  # offsets of locked slots that `freed` has returned
        self.spoiled = 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()

    def page_lock_for(self, accelerator: Accelerator) -> None:
        """From now on its slots may be page-locked."""
        if self._mapping.locks is None:
            from rayloader.gpu.page_locks import PageLocks

            self._mapping.locks = PageLocks(accelerator, self._mapping.start)

    def view(self, where: Slice, leases: Leases) -> memoryview:
        """The bytes of a buffer, writable; they, and everything made from them, keep their slot leased.

        Args:
            where: from `ArenaWriter.seal`.
            leases: of the message that named it; see NOTE [Interrupts].

        Raises:
            ArenaError: the worker has ended, and the memory was given back.
        """
        slot, offset, nbytes = where
        return self._lease(slot, leases).view()[offset : offset + nbytes]

    def unpack(self, slot: Slot, sizes: Sequence[int], leases: Leases) -> list[bytearray]:
        """Copies what `ArenaWriter.pack` put into a slot, each buffer to memory of its own; the slot is free then.

        Raises:
            ArenaError: as in `view`.
        """
        ticket, offset, _ = slot
        copied = leases.get(ticket)
        if isinstance(copied, list):  # see NOTE [Interrupts]
            return copied
        memory, copies = self._mapping.memory, []
        for nbytes in sizes:
            copies.append(bytearray(memory[offset : offset + nbytes]))
            offset += -(-nbytes // PACKED_ALIGN) * PACKED_ALIGN
        if self._mapping.gone:  # the copied memory may have been given back before
            raise ArenaError(_GONE)
        leases[ticket] = copies
        self._dead.append((ticket, True))  # a forked child has the copies, and never reads the slot
        return copies

    def freed(self) -> list[int]:
        """Tickets of slots that are free again, and were not returned before, for `ArenaWriter.free`.

        After an interrupt it may return some again; see NOTE [Interrupts].
        """
        if KEEPS_SENT_STORAGES:
            release_sent_storages()
        dead, locks = self._dead.copy(), self._mapping.locks
        freed: list[int] = []
        free_now, held = [], []

        def free(tickets: Collection[int]) -> None:
            for ticket in tickets:
                slot = self._leased.get(ticket)
                if slot is not None and locks is not None and locks.is_locked(slot[1]):
                    self._freed_locked.append(slot[1])  # before it is no longer leased
                self._leased.pop(ticket, None)
            freed.extend(tickets)

        for ticket, reuse in dead:
            slot = self._leased.get(ticket)  # None, if it was only copied
            if not reuse:
                assert slot is not None
                if ticket not in self._spoiled:
                    self.spoiled += slot[2]
                    self._spoiled.add(ticket)
            elif slot is not None and locks is not None and locks.is_locked(slot[1]):
                held.append(ticket)
            else:
                free_now.append(ticket)
        free(free_now)
        if locks is not None:
            if held:
                locks.hold(held)
            locks.free_passed(free)
        for _ in dead:  # last: after an interrupt all is done again, and a ticket that is returned twice is freed once
            self._dead.popleft()  # only this thread removes from it
        return freed

    def locked(self, *, all_slots: bool = False) -> list[int]:
        """Offsets of page-locked slots: those that `freed` has returned since the last call, or all."""
        freed, self._freed_locked = self._freed_locked, []
        locks = self._mapping.locks
        return [offset for offset, _ in locks.locked] if all_slots and locks is not None else freed

    def leased(self) -> frozenset[int]:
        """Tickets of the slots that are leased, or will never be free again; call it directly after `freed`."""
        return frozenset(self._leased)

    @property
    def leased_bytes(self) -> int:
        """Bytes in slots that are leased. Any thread may ask."""
        dead = {ticket for ticket, _ in self._dead.copy()}
        if (locks := self._mapping.locks) is not None:
            dead |= locks.held()
        return sum(size for ticket, _, size in list(self._leased.values()) if ticket not in dead)

    def rest(self, resting: bool) -> None:
        """While it rests, the worker takes no slots: memory that becomes free is given back to the system at once."""
        self._mapping.resting = resting

    def close(self, *, give_back: bool = False) -> None:
        """No more openings; the mapping goes with the last lease. Callable more than once.

        After an interrupt the next call does what is left: page-locked memory must not be unmapped. In a forked child
        this only closes the file: memory and page-locks are the parent's.

        Args:
            give_back: the worker has ended: all memory that is not leased is given back to the system. Page-locked
                memory is, in a thread, in any case.
        """
        if self._file is None:
            return
        mapping = getattr(self, "_mapping", None)  # missing if the constructor has failed
        if mapping is not None and os.getpid() == self._pid:
            # `gone` comes first: a lease that another thread makes or ends sees it, or is seen.
            if (locks := mapping.locks) is not None and locks.close():
                mapping.gone = True
                locks.retire(self.unlock)
            else:
                mapping.locks = None
                if give_back:
                    mapping.gone = True
                    self.freed()
                    self._give_back_free()
        file, self._file = self._file, None
        if file is not None:  # another thread may have come first: the collector finalizes what a job still uses
            file.close()

    def unlock(self) -> bool:
        """Unlocks slots in which no batch lives; for `Unlocker`, once it is closed. Waits for the copies from there.

        Returns:
            Whether all is unlocked.
        """
        locks = self._mapping.locks
        if locks is None:
            return True
        self.freed()
        spoiled = self._spoiled.copy()  # they are not held, but copies from them may be pending too
        locks.hold([])
        locks.wait()
        self.freed()
        locks.unlock([slot[1] for ticket, slot in list(self._leased.items()) if ticket not in spoiled])
        unlocked = not locks.locked
        if unlocked:
            self._mapping.locks = None  # from here a lease gives its memory back by itself, as without locks
            self.freed()  # those that ended before
        self._give_back_free()
        return unlocked

    def _give_back_free(self) -> None:
        """Gives all memory that is neither leased nor page-locked back to the system."""
        used = [(start, start + size) for _, start, size in self._leased.values()]
        if (locks := self._mapping.locks) is not None:
            used += [(start, start + size) for start, size in locks.locked]
        free = 0
        for start, end in sorted(used):
            self._mapping.give_back(free, max(0, start - free))
            free = max(free, end)
        self._mapping.give_back(free, self.address.nbytes - free)

    def _lease(self, slot: Slot, leases: Leases) -> SlotLease:
        forks = _NEVER if forks_under_way else forks_begun
        ticket = slot[0]
        lease = leases.get(ticket)
        if not isinstance(lease, SlotLease):
            lease = leases[ticket] = SlotLease(self._mapping, slot, forks)
        if lease.dead is None:
            self._leased[ticket] = slot
            if self._mapping.gone:
                del self._leased[ticket]
                raise ArenaError(_GONE)
            lease.dead = self._dead
        return lease


class ArenaWriter:
    """The worker's side: maps the arena of another process, and knows its free slots.

    Args:
        address: of the arena.

    Attributes:
        full: whether there was no room for a buffer.
        small: buffers up to this size are not worth a slot of their own, according to the driver.

    Raises:
        ArenaError: it is on another machine or in another PID namespace, is gone, may not be opened, or what is found
            in its place is another file.
    """

    def __init__(self, address: FileAddress) -> None:
        try:
            fd = open_file(address, writable=True)
            try:
                self._mapping = ArenaMemory(fd, address.nbytes)
            finally:
                os.close(fd)
        except (OSError, MemoryFileError) as error:
            raise ArenaError(f"can't open {address.name}: {error}") from error
        self.small = 0
        self._pid = os.getpid()
        self._free = FreeSlots(address.nbytes)
        self._slots: dict[int, _Taken] = {}  # by ticket
        self._batch: list[int] = []  # tickets taken for the batch that is being built
        self._kept: list[int] = []  # of slots that user code still referred to when their batch was finished
        self._last_ticket = 0
        self.full = False

    def begin(self) -> None:
        """A batch begins; the rest of an unfinished one is dropped."""
        for ticket in self._batch:
            taken = self._slots.get(ticket)
            if taken is not None and not taken.sent and not self._free_if_dropped(ticket):
                self._kept.append(ticket)
        self._batch.clear()

    def allocate(self, nbytes: int) -> memoryview | None:
        """Memory for a buffer of this batch, in a slot of its own; None without room."""
        taken = self._take(nbytes)
        if taken is None:
            return None
        region = Memory(self._mapping.start + taken.slot[1], nbytes, self._mapping)
        taken.region = weakref.ref(region)
        return region.view()

    def put(self, buffer: memoryview) -> Slice | None:
        """Makes sure that a buffer is in a slot of this batch: copies it there if it is not.

        Args:
            buffer: flat bytes, such as those of `codec.encode`.

        Returns:
            The argument for `seal`; None without room.
        """
        source = np.frombuffer(buffer, np.uint8)
        offset: int = source.__array_interface__["data"][0] - self._mapping.start
        for ticket in self._batch:
            taken = self._slots[ticket]
            _, start, size = taken.slot
            if taken.region is not None and start <= offset and offset + source.nbytes <= start + size:
                taken.sent = True
                return taken.slot, offset - start, source.nbytes
        return self._copy(source)

    def reserve(self, nbytes: int) -> Slice | None:
        """A slot for the driver's side to fill; None without room."""
        taken = self._take(nbytes)
        if taken is None:
            return None
        taken.sent = True
        return taken.slot, 0, nbytes

    def pack(self, buffers: Sequence[memoryview]) -> Slot | None:
        """Copies buffers into one slot, side by side; None without room."""
        where = self.reserve(sum([-(-buffer.nbytes // PACKED_ALIGN) * PACKED_ALIGN for buffer in buffers]))
        if where is None:
            return None
        slot, offset, memory = where[0], where[0][1], self._mapping.memory
        for buffer in buffers:
            nbytes = buffer.nbytes
            memory[offset : offset + nbytes] = buffer
            offset += -(-nbytes // PACKED_ALIGN) * PACKED_ALIGN
        return slot

    def seal(self, where: Slice) -> Slice | bytearray:
        """Makes a buffer that was put in final; to be called after the batch has been dropped. See NOTE [Final].

        Returns:
            Its place. A copy of the buffer if user code still refers to it and there is no room for a copy in a slot.
        """
        slot, offset, nbytes = where
        taken = self._slots[slot[0]]
        # A slot whose first buffer was copied is never sent, even if another thread drops its reference meanwhile.
        if taken.sent and (taken.region is None or taken.region() is None):
            if taken.forks == forks_begun:
                taken.region = None  # later forks cannot have seen it
            return where
        taken.sent = False
        source = self._mapping.bytes[slot[1] + offset :][:nbytes]
        copied = self._copy(source)
        return bytearray(source) if copied is None else copied

    def lock(self, offsets: Iterable[int]) -> None:
        """The slots at these places are page-locked; the driver says so before they are free. NOTE [Locked slots]."""
        self._free.lock(offsets)

    def free(self, tickets: Collection[int]) -> None:
        """The driver no longer needs these slots."""
        for ticket in tickets:
            taken = self._slots.pop(ticket, None)
            if taken is not None and not taken.seen_by_child:
                self._free.put_back(*taken.slot[1:])

    def abandon(self, leased: Collection[int]) -> None:
        """The driver will receive no result that was sent so far, but for these `leased` tickets, which it has."""
        self.free([ticket for ticket, taken in self._slots.items() if taken.sent and ticket not in leased])

    def _copy(self, source: np.ndarray[Any, np.dtype[np.uint8]]) -> Slice | None:
        where = self.reserve(source.nbytes)
        if where is not None:
            start = where[0][1]
            self._mapping.bytes[start : start + source.nbytes] = source
        return where

    def _take(self, nbytes: int) -> _Taken | None:
        if os.getpid() != self._pid:
            return None
        extent = self._free.take(nbytes)
        if extent is None and self._look_again():
            extent = self._free.take(nbytes)
        if extent is None:
            self.full = True
            return None
        self._last_ticket += 1
        taken = self._slots[self._last_ticket] = _Taken((self._last_ticket, *extent), forks_begun)
        self._batch.append(self._last_ticket)
        if self._last_ticket % COLD_AFTER == 0:
            self._look_again()
            for start, end in self._free.join():
                self._mapping.give_back(start, end - start)
        return taken

    def _look_again(self) -> bool:
        """Frees slots that user code no longer refers to; returns whether there were some."""
        before = len(self._kept)
        self._kept = [ticket for ticket in self._kept if not self._free_if_dropped(ticket)]
        return len(self._kept) < before

    def _free_if_dropped(self, ticket: int) -> bool:
        """Frees a slot that was not sent, if nothing refers to it; a slot that a fork has seen is not reused."""
        taken = self._slots[ticket]
        if taken.region is not None and taken.region() is not None:
            return False
        if taken.seen_by_child:
            return True
        del self._slots[ticket]
        self._free.put_back(*taken.slot[1:])
        return True


class _Taken:
    """The worker's record of a slot."""

    __slots__ = ("forks", "region", "sent", "slot")

    def __init__(self, slot: Slot, forks: int) -> None:
        self.slot = slot
        self.forks = forks
        self.region: weakref.ref[Memory] | None = None  # the memory that user code may refer to
        self.sent = False  # it belongs to the driver

    @property
    def seen_by_child(self) -> bool:
        """Whether a forked child may refer to it."""
        return self.region is not None and self.forks != forks_begun


class FreeSlots:
    """The free list of an arena.

    Args:
        nbytes: of its room; whole pages.
    """

    def __init__(self, nbytes: int) -> None:
        self._same_size: dict[int, list[int]] = {}  # starts of free slots by size, in the order of their return
        self._stretches = [(0, nbytes)]  # the other free room: start, end, ascending
        self._locked: set[int] = set()  # starts of page-locked places
        self._free_locked: list[tuple[int, int]] = []  # size and start of those that are free, ascending

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Start and size of a slot of at least `nbytes` bytes, in whole pages; None if no stretch fits."""
        size = rounded(nbytes)
        at = bisect.bisect_left(self._free_locked, (size, 0))
        if at < len(self._free_locked) and self._free_locked[at][0] <= 2 * size:
            size, start = self._free_locked.pop(at)
            return start, size
        starts = self._same_size.get(size)
        cut = starts.pop() if starts else self._cut(size)
        return None if cut is None else (cut, size)

    def put_back(self, start: int, size: int) -> None:
        """A slot, as returned by `take`, is free again."""
        if start in self._locked:
            bisect.insort(self._free_locked, (size, start))
        else:
            self._same_size.setdefault(size, []).append(start)

    def lock(self, starts: Iterable[int]) -> None:
        """The slots that begin there, and are not free yet, are page-locked; see NOTE [Locked slots]."""
        self._locked.update(starts)

    def _cut(self, size: int) -> int | None:
        if any(self._same_size.values()):
            self.join()
        for index, (start, end) in enumerate(self._stretches):
            if end - start >= size:
                self._stretches[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def join(self) -> list[tuple[int, int]]:
        """Turns all free slots into stretches, but those that are page-locked; returns starts and ends of all."""
        free = [(start, start + size) for size, starts in self._same_size.items() for start in starts]
        self._same_size.clear()
        joined: list[tuple[int, int]] = []
        for start, end in sorted([*free, *self._stretches]):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._stretches = joined
        return joined


def rounded(nbytes: int) -> int:
    """The size of a slot for `nbytes` bytes: whole pages, at most an eighth more than needed, or one page."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE
