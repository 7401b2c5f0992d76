"""Memory that driver and worker share: the worker builds batches in it, the driver hands them out without a copy.

An *arena* is an anonymous memory file of one actor incarnation. The driver makes it and cuts *slots* from it, one for
each call; the worker opens it by its `ArenaAddress` and fills the slots.

- A slot is free again once its call was released *and* the last view of its bytes has died, whatever kind of view,
  in whatever thread, in whatever order. It is never free again if the process forked in between.
- Nobody waits: without room `take`, `allocate`, `empty` and `place` say None and the caller takes another lane.
- Nothing is visible in the file system; the kernel frees the file with its last user (memory_file.py).

Driver: `Arena`; `take` and `close` are for one thread at a time, all else for any. Worker: `ArenaWriter`, one thread.
Ray is unknown here, and so is what a batch is.

NOTE [Leases]. A slot's lease is an object that shows the slot's memory to NumPy (`__array_interface__`) and posts the
slot to a deque when it dies: no lock, no I/O, for that may happen in any thread, in the collector, at exit. Whatever is
cut from it refers to it: memoryview -> ndarray -> lease. Torch and NumPy keep the memoryview, or the ndarray behind
it. (An ndarray subclass with a `__del__` would not do: NumPy shortens chains of arrays and skips it.) The call that
names a slot holds its lease like any view. Mappings go the same way: leases refer to them, nobody unmaps.

NOTE [Forks]. A forked child shares the mapping, and what was leased at that moment it may read for ever. So a lease
remembers the number of forks before it, and its slot is reused only if there was none since. While another thread is
forking nothing is leased, for it cannot be said which side that would be on. In the child there are no slots to have.

NOTE [Free list]. Slots are whole pages, cut from the lowest free stretch that fits; neighbours join when they come
back. What costs is the first touch of a page, in either process, not which of the touched ones is used: lowest first
touches no new page while an old one fits, and leaves the top of a generous arena without memory. It is also the policy
that fragments least when sizes vary, there are no classes of sizes to round up to, and the list is short: it cannot
have more entries than there are leases, plus one. An interrupt (Ctrl-C) inside `take` loses a slot at worst.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayloader.errors import RayloaderError
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file

SLOT_ALIGN = 64  # bytes; the codec's alignment of spans, torch's of memory
_PAGE = mmap.PAGESIZE
_NEVER = -1

_Freed = deque[tuple[int, int, bool]]  # start, end of a slot, whether it may be reused


class ArenaError(RayloaderError):
    """An arena can't be made or opened here; what it is for has to go through the object store."""


ArenaAddress = FileAddress


class Slot(NamedTuple):
    """The room of one call: `nbytes` bytes from `offset` of the file on, both in whole pages."""

    offset: int
    nbytes: int
    ticket: int  # tells the calls that get the same room apart


class Arena:
    """The driver's side: makes the file, hands out slots and knows when they are free again.

    Args:
        nbytes: room for slots, rounded up to whole pages. Pages cost memory once they are written to.
        kind: what its slots are for; part of the file's name.

    Attributes:
        address: what the worker opens it by.
        spoiled: bytes that will never be free again (see `reuse` and NOTE [Forks]), as `take` last saw it.

    Raises:
        ArenaError: this system has no memory files, or no room for one.
    """

    def __init__(self, nbytes: int, kind: str = "arena") -> None:
        size = _PAGE + _whole_pages(nbytes)
        self._file: MemoryFile | None = None
        try:
            self._file = MemoryFile(kind, size)
            self.address = self._file.address
            os.pwrite(self._file.fd, self.address.header, 0)
            self._file.seal(writes=False)
            self._mapping: _Mapping | None = _Mapping(self._file.fd, size)
        except (OSError, MemoryFileError) as error:
            self.close()
            raise ArenaError(f"can't make an arena's memory file: {error}") from error
        self._free = [(_PAGE, size)]  # start, end of each free stretch, ascending; no two touch
        self._freed: _Freed = deque()  # posted by leases, for `take` to put back
        self._unanswered: dict[int, tuple[memoryview, _Lease]] = {}  # by ticket
        self._last_ticket = 0
        self.spoiled = 0

    def __del__(self) -> None:
        self.close()

    def take(self, nbytes: int) -> Slot | None:
        """Leases a slot of at least `nbytes` bytes to a call, until `release_call` and the death of its last view.

        Returns:
            None if there is no room now, or never will be: closed, or in a forked child.
        """
        forks = _forks  # read before `_forking`: a fork that begins in between spoils the lease
        mapping = self._mapping
        if mapping is None or _forking or os.getpid() != self.address.pid:
            return None
        while self._freed:
            start, end, reuse = self._freed.popleft()
            if reuse:
                self._put_back(start, end)
            else:
                self.spoiled += end - start
        size = _whole_pages(nbytes)
        index = next((i for i, (low, high) in enumerate(self._free) if high - low >= size), None)
        if index is None:
            return None
        start, end = self._free[index]
        self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
        lease = _Lease(mapping, start, start + size, forks, self._freed)
        self._last_ticket += 1
        self._unanswered[self._last_ticket] = lease.memory(), lease
        return Slot(start, size, self._last_ticket)

    def view(self, slot: Slot, offset: int, nbytes: int) -> memoryview:
        """Bytes of a slot, writable; they, and what is made of them, keep the slot leased.

        Args:
            slot: of a call that is not released yet.
            offset: from the slot's start, in bytes.
            nbytes: at most to the slot's end.

        Raises:
            KeyError: the call was released.
            ValueError: the bytes are not inside the slot.
        """
        memory, _ = self._unanswered[slot.ticket]
        if not 0 <= offset <= offset + nbytes <= slot.nbytes:
            raise ValueError(f"a view must lie in the {slot.nbytes} bytes of its slot, got {nbytes} from {offset}")
        return memory[offset : offset + nbytes]

    def release_call(self, slot: Slot, *, reuse: bool = True) -> None:
        """The worker is done with the slot: its call was answered, or the worker is gone. Again: no effect.

        Args:
            slot: as `take` gave it. Views that are wanted must have been made.
            reuse: False if the worker still holds memory of the slot (`SlotWriter.close`): then it is never reused.
        """
        entry = self._unanswered.pop(slot.ticket, None)
        if entry is not None and not reuse:
            entry[1].forks = _NEVER

    def close(self) -> None:
        """No more slots, no more openings; the mapping goes with the last lease. Callable more than once."""
        file, self._file, self._mapping = self._file, None, None
        if file is not None:
            file.close()

    def _put_back(self, start: int, end: int) -> None:
        first = last = bisect(self._free, (start, end))
        if first > 0 and self._free[first - 1][1] == start:
            first -= 1
            start = self._free[first][0]
        if last < len(self._free) and self._free[last][0] == end:
            end = self._free[last][1]
            last += 1
        self._free[first:last] = [(start, end)]


class ArenaWriter:
    """The worker's side: the file, mapped. Get one with `open`."""

    def __init__(self, mapping: _Mapping) -> None:
        self._mapping: _Mapping | None = mapping

    @classmethod
    def open(cls, address: ArenaAddress) -> ArenaWriter:
        """Maps the arena of another process.

        Raises:
            ArenaError: it is on another machine or in another PID namespace, is gone, may not be opened, or what is
                found in its place is something else.
        """
        try:
            fd = open_file(address, writable=True)
            try:
                if os.pread(fd, len(address.header), 0) != address.header:
                    raise ArenaError(f"{address.name} does not begin with its name")
                return cls(_Mapping(fd, address.nbytes))
            finally:
                os.close(fd)
        except (OSError, MemoryFileError) as error:
            raise ArenaError(f"can't open {address.name}: {error}") from error

    def writer(self, slot: Slot) -> SlotWriter:
        """Begins to fill a slot, from its start."""
        if self._mapping is None:
            raise ArenaError("this arena was closed here; open it again")
        return SlotWriter(self._mapping, slot)

    def close(self) -> None:
        """Unmaps the file as soon as nothing refers to it any more. Callable more than once."""
        self._mapping = None


class SlotWriter:
    """Fills a slot from its start to its end; what was given out is not given out again."""

    def __init__(self, mapping: _Mapping, slot: Slot) -> None:
        region = _Region(mapping, slot.offset, slot.nbytes)
        self._memory = region.memory()
        self._region = weakref.ref(region)
        self._start = mapping.start + slot.offset
        self.used = 0  # bytes given out, gaps included

    def allocate(self, nbytes: int) -> memoryview | None:
        """The next `nbytes` bytes of the slot, from a multiple of 64 on; None without room."""
        end = self.used + nbytes
        if end > self._memory.nbytes:
            return None
        memory = self._memory[self.used : end]
        self.used = -(-end // SLOT_ALIGN) * SLOT_ALIGN
        return memory

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """An uninitialized contiguous tensor in the slot; None without room, and for a tensor of no elements."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self.allocate(nbytes) if nbytes else None
        return None if memory is None else torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def place(self, buffer: memoryview) -> tuple[int, int] | None:
        """Sees to it that flat bytes, such as `codec.encode` gives, are in the slot: copies them in if they are not.

        Returns:
            Offset in the slot and size in bytes, for `Arena.view`; None without room.
        """
        if buffer.nbytes == 0:
            return 0, 0
        source = np.frombuffer(buffer, np.uint8)
        offset: int = source.__array_interface__["data"][0] - self._start
        if not 0 <= offset <= self._memory.nbytes - source.nbytes:
            offset = self.used
            if (copy := self.allocate(source.nbytes)) is None:
                return None
            np.frombuffer(copy, np.uint8)[:] = source  # unlike the memoryview's own, without the GIL
        return offset, source.nbytes

    def close(self) -> bool:
        """Lets go of the slot, to be called when the batches in it have been dropped.

        Returns:
            Whether nothing here refers to its memory any more. If something does (the user's class kept a tensor that
            was collated into it), the slot must not be reused: `Arena.release_call(slot, reuse=False)`.
        """
        self._memory = memoryview(b"")
        return self._region() is None


class _Mapping:
    """A whole file, mapped shared and writable for as long as something refers to this."""

    __slots__ = ("_memory", "start")

    def __init__(self, fd: int, nbytes: int) -> None:
        self._memory = mmap.mmap(fd, nbytes)  # holds a duplicate of `fd`
        self.start: int = np.frombuffer(self._memory, np.uint8).__array_interface__["data"][0]


class _Region:
    """A part of a mapping, shown to NumPy as writable bytes, which keep it alive."""

    __slots__ = ("__array_interface__", "__weakref__", "mapping")

    def __init__(self, mapping: _Mapping, offset: int, nbytes: int) -> None:
        self.mapping = mapping
        data = mapping.start + offset, False
        self.__array_interface__ = {"version": 3, "data": data, "shape": (nbytes,), "typestr": "|u1"}

    def memory(self) -> memoryview:
        array: Any = np.asarray(self)
        return memoryview(array)


class _Lease(_Region):
    """The right to a slot; see NOTE [Leases]."""

    __slots__ = ("extent", "forks", "freed")

    def __init__(self, mapping: _Mapping, start: int, end: int, forks: int, freed: _Freed) -> None:
        super().__init__(mapping, start, end - start)
        self.extent, self.forks, self.freed = (start, end), forks, freed

    def __del__(self) -> None:
        self.freed.append((*self.extent, self.forks == _forks))


# See NOTE [Forks]. Module state, for a fork concerns all arenas of the process.
_forks = 0  # begun so far
_forking = 0  # under way, in all threads


def _before_fork() -> None:
    global _forks, _forking
    _forks += 1
    _forking += 1


def _after_fork() -> None:
    global _forking
    _forking -= 1


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // _PAGE)) * _PAGE
