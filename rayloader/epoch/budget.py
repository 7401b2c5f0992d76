"""The bytes that one epoch's batches may take: each worker has a share, less what the program keeps.

Promise: an `Allowance` for each worker whose depth is automatic, kept up to date as the user is given batches. A depth
that the user has set is not lowered. Whichever it is, one warning says who holds what when it is too much.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from rayloader.epoch.tables import Tables
from rayloader.workers.allowance import Allowance
from rayloader.workers.ways import Ways

logger = logging.getLogger("rayloader")

# How many times to check how much the program keeps, for every `nbytes` of batches that it is given.
LOOKS = 16
# Unanswered calls that one worker may have if a thread of ours receives answers and sends the next calls. A Ray call
# takes some milliseconds, of which about one is work: with this many, the worker need not wait. More would only risk
# larger batches than expected.
CALLS_AHEAD = 8
# Likewise of a worker on another node, while its batches are so small that the user's thread receives them. With half
# as many, a tiny batch takes a fifth longer, because fewer answers come at once; twice as many gain nothing.
TASKS_AHEAD = 16

_told = False  # that batches take more than was agreed; all loaders say it once


def most_ahead(ways: Ways, ahead: float) -> float:
    """How many calls of one worker may be unanswered, beyond its first; `ahead`: as many as its pace suggests."""
    if ways.copies:
        return min(ahead, CALLS_AHEAD)
    return min(ahead, TASKS_AHEAD) if ways.reaches_far else math.inf


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
                slot.allowance.ahead = most_ahead(tables.crew.ways, math.inf)

    def gave(self, nbytes: int) -> None:
        """The user was given a batch of this many bytes."""
        self._given += nbytes
        if self._given * LOOKS < self._nbytes or (_told and not self._limits):
            return
        self._given = 0
        kept = self._held()
        for slot in self._tables.slots:
            if slot.allowance is not None:
                slot.allowance.nbytes = max(0, self._nbytes - kept) / len(self._tables.slots)
        if _told or (self._limits and kept < self._nbytes):
            return
        ready, under_way = self._ready(), self._under_way(nbytes)
        # With allowances the rest is bounded, but for the first tasks of each worker, which are torch's too.
        if self._limits or kept + sum(ready) + sum(under_way) >= self._nbytes:
            self._tell(kept, ready, under_way)

    def _ready(self) -> list[int]:
        """Bytes of batches that were not taken, by worker."""
        nbytes = [0] * len(self._tables.slots)
        for task, result in self._tables.deliverable:
            nbytes[task.worker_id] += result.nbytes
        for task_id, result in self._tables.results.items():
            if (known := self._tables.schedule.task(task_id)) is not None:
                nbytes[known.worker_id] += result.nbytes
        return nbytes

    def _under_way(self, nbytes: int) -> list[int]:
        """Bytes of what workers are building or will, by worker: each batch taken for one of so many bytes."""
        return [slot.unanswered * nbytes for slot in self._tables.slots]

    def _tell(self, kept: int, ready: list[int], under_way: list[int]) -> None:
        global _told
        _told = True
        logger.warning(
            "rayloader: the program keeps %d MB of batches, %d MB are ready, and about %d MB are under way, where "
            "prefetch_bytes is %d MB%s. %s",
            *(kept >> 20, sum(ready) >> 20, sum(under_way) >> 20, self._nbytes >> 20),
            self._most([sum(both) for both in zip(ready, under_way, strict=True)]),
            "Meanwhile the workers are given no more to do than torch's would be. Drop batches once they are used, or "
            "raise prefetch_bytes"
            if self._limits
            else "The workers are given as many batches to build as prefetch_factor says, or torch's would be. Drop "
            "batches once they are used, lower prefetch_factor, or raise prefetch_bytes",
        )

    def _most(self, nbytes: list[int]) -> str:
        """Which worker accounts for most of what is ready and under way; which node, where there are several."""
        crew = self._tables.crew
        of_node: dict[str, int] = {}
        for slot in crew.slots:
            if (address := crew.address(slot)) is not None:
                where = f"the workers of node {address.node_id} ({address.hostname})"
                of_node[where] = of_node.get(where, 0) + nbytes[slot.worker_id]
        holders = of_node if len(of_node) > 1 else {f"worker {number}": n for number, n in enumerate(nbytes)}
        holder = max(holders, key=lambda name: holders[name])
        return f"; most of what is ready and under way, {holders[holder] >> 20} MB, is of {holder}" if holders else ""
