"""The bytes that one epoch's batches may take: each worker has a share, less what the program keeps.

Promise: an `Allowance` for each worker whose depth is automatic, kept up to date as the user is given batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rayloader.driver.allowance import Allowance
from rayloader.driver.tables import Tables

logger = logging.getLogger("rayloader")

# How many times to check how much the program keeps, for every `nbytes` of batches that it is given.
LOOKS = 16
# Unanswered calls that one worker may have if a thread of ours receives answers and sends the next calls. A Ray call
# takes some milliseconds, of which about one is work: with this many, the worker need not wait. More would only risk
# larger batches than expected.
CALLS_AHEAD = 8

_told = False  # that the program keeps as much as is allowed; the warning appears once for all loaders


class Budget:
    """The budget of one epoch.

    Args:
        tables: of the epoch.
        nbytes: in all, the loader's prefetch_bytes.
        first: tasks of a worker that never wait, see NOTE [bytes] in allowance.py.
        held: returns the bytes of shared memory that the program keeps through batches that it was given.
    """

    def __init__(self, tables: Tables, nbytes: int, first: int, held: Callable[[], int]) -> None:
        self._tables = tables
        self._nbytes = nbytes
        self._held = held
        self._given = 0  # bytes since the last check
        self._limits = tables.schedule.is_paced  # whether workers have allowances
        for slot in tables.slots:
            if slot.pace is not None:  # it knows the sizes of the worker's batches in the previous epoch
                slot.allowance = Allowance(first, nbytes / len(tables.slots), slot.pace.nbytes)
                if tables.crew.ways.copies:
                    slot.allowance.ahead = CALLS_AHEAD  # until the worker's channel, and the time of a task, are known

    def gave(self, nbytes: int) -> None:
        """The user was given a batch of this many bytes."""
        self._given += nbytes
        if not self._limits or self._given * LOOKS < self._nbytes:
            return
        self._given = 0
        kept = self._held()
        for slot in self._tables.slots:
            if slot.allowance is not None:
                slot.allowance.nbytes = max(0, self._nbytes - kept) / len(self._tables.slots)
        if kept >= self._nbytes:
            self._tell(kept)

    def _tell(self, kept: int) -> None:
        global _told
        if not _told:
            _told = True
            ready = sum(result.nbytes for result in self._tables.untaken)
            unanswered = sum(len(slot.calls) for slot in self._tables.slots)
            logger.warning(
                "rayloader: the program keeps %d MB of batches, %d MB are ready, and %d batches are under way, where "
                "prefetch_bytes is %d MB. Meanwhile the workers are given no more to do than torch's would be. Drop "
                "batches once they are used, or raise prefetch_bytes",
                *(kept >> 20, ready >> 20, unanswered, self._nbytes >> 20),
            )
