"""Memory for what the driver has to copy, used again once nobody can look at it any more.

Promise: a copy is writable and nobody else's, and stays so for as long as any view of it lives, in whatever thread. It
lies in an arena of which this process is the writer as well as the reader, so that NOTE [Leases] and NOTE [Forks] in
arena.py hold for it. Without arenas, or without room, a copy has fresh memory of its own. Nobody waits.
"""

from __future__ import annotations

import threading

from rayloader.transport import codec, lanes
from rayloader.transport.arena import Arena, ArenaError, ArenaWriter


class Recycled:
    """Makes copies. One thread at a time copies; `close` may be called by any, more than once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._writer: ArenaWriter | None = None
        self._off = False  # no arena can be made here, or it is closed

    def copy(self, buffer: memoryview) -> memoryview:
        """A copy of flat bytes; a small one has memory of its own, so that whoever keeps it keeps nothing else."""
        if buffer.nbytes > lanes.SMALL_BYTES:
            with self._lock:
                copied = self._leased_copy(buffer)
            if copied is not None:
                return copied
        return codec.writable_copies([buffer])[0]

    def _leased_copy(self, buffer: memoryview) -> memoryview | None:
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
        place = self._writer.place(buffer)
        return None if place is None else self._arena.view(place, {})

    @property
    def leased_bytes(self) -> int:
        """Of copies of which views live. Any thread may ask."""
        arena = self._arena
        return arena.leased_bytes if arena is not None else 0

    def close(self) -> None:
        """Gives memory that nobody uses back to the system at once, and the rest with the last view of each copy."""
        with self._lock:
            self._off = True
            arena, self._arena, self._writer = self._arena, None, None
            if arena is not None:
                arena.close(give_back=True)
