"""Which stretches of an arena are free. Pure bookkeeping: no memory, no processes, no clock.

NOTE [Reuse]. A slot gets the place of a returned one of the same size, the one that came back last first: its memory is
still in the processor's cache. Sizes are rounded up by an eighth at most, so that batches that vary a little meet the
same sizes again. If there is no such slot, all free slots are joined with their neighbours, and the new one is cut from
the lowest stretch that fits: that touches no new page while an old one fits.

NOTE [Cold memory]. A page costs memory once it was touched, even if its slot is free. Memory that no slot has
covered while `COLD_AFTER` slots were taken is *cold*, and may be given back to the system. It is counted in chunks.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np

COLD_AFTER = 256  # slots
CHUNK = 1 << 20  # bytes
PAGE = mmap.PAGESIZE


class FreeSlots:
    """The free list of an arena.

    Args:
        start, end: of its room, in bytes; whole pages.
    """

    def __init__(self, start: int, end: int) -> None:
        self._same_size: dict[int, list[int]] = {}  # starts of free slots by size, in the order of their return
        self._stretches = [(start, end)]  # the other free room: start, end, ascending
        self._taken = 0  # slots so far
        self._uses: dict[tuple[int, int], int] = {}  # since `cold` was called last: `_taken` by start and size
        self._last_use = np.zeros(-(-end // CHUNK), np.int64)  # of each chunk: the value of `_taken`; 0: not touched
        self._touched = 0  # chunks, counted from the lowest

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Start and size of a slot of at least `nbytes` bytes, in whole pages; None if no stretch fits."""
        size = rounded(nbytes)
        starts = self._same_size.get(size)
        start = starts.pop() if starts else self._cut(size)
        if start is None:
            return None
        self._taken += 1
        slot = start, size
        self._uses[slot] = self._taken
        return slot

    def put_back(self, start: int, size: int) -> None:
        """A slot, as returned by `take`, is free again."""
        self._same_size.setdefault(size, []).append(start)

    def cold(self, in_use: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Start and size of memory that was touched and is cold, each only once.

        Args:
            in_use: start and size of all slots that were taken and not put back.
        """
        for (start, size), taken in self._uses.items():
            self._use(start, size, taken)
        self._uses.clear()
        for start, size in in_use:
            self._use(start, size, self._taken)
        last_use = self._last_use[: self._touched]
        cold = np.flatnonzero((last_use > 0) & (last_use <= self._taken - COLD_AFTER))
        last_use[cold] = 0
        return [(int(chunk) * CHUNK, CHUNK) for chunk in cold if chunk]  # not the first: its pages hold more than slots

    def _use(self, start: int, size: int, taken: int) -> None:
        end = -(-(start + size) // CHUNK)
        last_use = self._last_use[start // CHUNK : end]
        np.maximum(last_use, taken, out=last_use)
        self._touched = max(self._touched, end)

    def _cut(self, size: int) -> int | None:
        if any(self._same_size.values()):
            self._join()
        for index, (start, end) in enumerate(self._stretches):
            if end - start >= size:
                self._stretches[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def _join(self) -> None:
        """Turns all free slots into stretches."""
        free = [(start, start + size) for size, starts in self._same_size.items() for start in starts]
        self._same_size.clear()
        joined: list[tuple[int, int]] = []
        for start, end in sorted([*free, *self._stretches]):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._stretches = joined


def rounded(nbytes: int) -> int:
    """The size of a slot for `nbytes` bytes: whole pages, at most an eighth more than needed, or one page."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE
