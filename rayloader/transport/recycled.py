"""Memory for the driver's copies, reused once nothing refers to it any more.

Promise: a copy is writable and belongs to nobody else, for as long as any view of it lives, in whatever thread. It
lies in an arena of which this process is the writer as well as the reader, so that NOTE [Leases] and NOTE [Forks] in
leases.py hold for it. Without arenas, or without room, a copy has fresh memory of its own. Nothing waits.
"""

from __future__ import annotations

import threading

import numpy as np

from rayloader.transport import lanes, raw
from rayloader.transport.arena import Arena, ArenaError, ArenaWriter


class Recycled:
    """Makes copies. One thread at a time copies; any may call `close`, more than once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._writer: ArenaWriter | None = None
        self._off = False  # no arena can be made here, or it is closed

    def copy(self, buffer: memoryview) -> memoryview:
        """A copy of flat bytes, in memory from `room`."""
        copied = self.room(buffer.nbytes)
        np.copyto(np.frombuffer(copied, np.uint8), np.frombuffer(buffer, np.uint8))
        return copied

    def room(self, nbytes: int) -> memoryview:
        """Memory for `nbytes` bytes; small sizes get memory of their own, so that keeping them keeps nothing else."""
        if nbytes > lanes.SMALL_BYTES:
            with self._lock:
                leased = self._leased(nbytes)
            if leased is not None:
                return leased
        return raw.new_memory(nbytes)

    def _leased(self, nbytes: int) -> memoryview | None:
        if self._arena is not None:
            freed = self._arena.freed()
            if self._arena.spoiled > lanes.SPOILED_BYTES:
                self._arena = self._writer = None  # it lives on with its leases
            elif self._writer is not None:
                self._writer.free(freed)
        if self._arena is None and not self._off:
            try:
                self._arena = Arena(lanes.ARENA_BYTES, "copies")
            except ArenaError:
                self._off = True
            else:
                self._writer = self._arena.writer()
        if self._arena is None or self._writer is None:
            return None
        self._writer.begin(0)
        where = self._writer.reserve(nbytes)
        return None if where is None else self._arena.view(where, {})

    @property
    def leased_bytes(self) -> int:
        """Bytes of copies that have live views. Any thread may ask."""
        arena = self._arena
        return arena.leased_bytes if arena is not None else 0

    def close(self) -> None:
        """Gives unused memory back to the system at once, and the rest with the last view of each copy."""
        with self._lock:
            self._off = True
            arena, self._arena, self._writer = self._arena, None, None
            if arena is not None:
                arena.close(give_back=True)
