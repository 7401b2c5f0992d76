"""The memory behind an arena: the mapped file, its slots, and the leases that keep them.

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
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from typing import Any

import numpy as np

Slot = tuple[int, int, int]  # unique ticket in the arena; offset in the file; size in bytes


class ArenaMemory:
    """A whole file, mapped shared and writable for as long as something refers to this object."""

    __slots__ = ("bytes", "gone", "memory", "resting", "start")

    def __init__(self, fd: int, nbytes: int) -> None:
        file = mmap.mmap(fd, nbytes)  # holds a duplicate of `fd`
        self.memory = memoryview(file)
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(file, np.uint8)
        self.start: int = self.bytes.__array_interface__["data"][0]
        self.resting = False  # whether leases give freed memory back to the system
        self.gone = False  # whether all memory without a lease was given back

    def give_back(self, start: int, nbytes: int) -> None:
        """Gives the memory of whole pages back to the system; they read as zeros and can be used again."""
        if nbytes:
            file: Any = self.memory.obj
            with contextlib.suppress(OSError):  # the kernel does not support it: they stay until the mapping ends
                file.madvise(mmap.MADV_REMOVE, start, nbytes)


class Extent:
    """A part of a mapping, shown to NumPy as writable bytes that keep it alive."""

    __slots__ = ("__weakref__", "mapping", "nbytes", "start")

    def __init__(self, mapping: ArenaMemory, start: int, nbytes: int) -> None:
        self.mapping = mapping
        self.start, self.nbytes = start, nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = self.mapping.start + self.start, False
        return {"version": 3, "data": data, "shape": (self.nbytes,), "typestr": "|u1"}

    def memory(self) -> memoryview:
        """The bytes."""
        array: Any = np.asarray(self)
        return memoryview(array)


Dead = deque[tuple[int, bool]]  # ticket, whether it may be reused


class SlotLease(Extent):
    """The right to a slot; see NOTE [Leases]."""

    __slots__ = ("dead", "forks", "slot")

    def __init__(self, mapping: ArenaMemory, slot: Slot, forks: int) -> None:
        super().__init__(mapping, *slot[1:])
        self.slot, self.forks = slot, forks
        self.dead: Dead | None = None  # from when it is kept on

    def __del__(self) -> None:
        dead: Dead | None = getattr(self, "dead", None)  # missing if an interrupt came before the constructor's end
        if dead is None:
            return
        ticket, start, size = self.slot
        reuse = self.forks == forks
        if reuse and self.mapping.resting:
            self.mapping.give_back(start, size)  # before the worker can learn of it
        dead.append((ticket, reuse))
        if reuse and self.mapping.gone:
            self.mapping.give_back(start, size)


Leases = dict[int, SlotLease | list[bytearray]]  # by ticket; the leases of one message, and copies


def leased_slot(buffer: Any) -> tuple[int, int] | None:
    """Ticket and bytes of the slot that a buffer keeps leased; None if it is other memory."""
    lease = getattr(memoryview(buffer).obj, "base", None)
    return (lease.slot[0], lease.slot[2]) if isinstance(lease, SlotLease) else None


# See NOTE [Forks]. Module state, because a fork affects all arenas of the process.
forks = 0  # begun so far
forking = 0  # in progress, in all threads


def _before_fork() -> None:
    global forks, forking
    forks += 1
    forking += 1


def _after_fork() -> None:
    global forking
    forking -= 1


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
