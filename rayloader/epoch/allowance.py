"""How many tasks of one worker may be under way, by the bytes of their batches.

Promise: pure arithmetic; no clock, no Ray, no torch.

NOTE [bytes]. Each worker may have at most `nbytes` of batches ready, in progress or kept by the user; a further task
waits in the schedule until the user takes one of the worker's batches. The sizes of unbuilt batches are estimated from
recent ones, with room for growth. The worker's first tasks, as many as torch's loader would have given it, never wait.
So there is no deadlock: a worker's ready batches come before its waiting tasks, and once these batches are taken, the
waiting tasks are among its first.
"""

from __future__ import annotations

import math

# An unbuilt batch is assumed to be at most this many times as large as the largest recent one.
GROWTH = 2.0
# The size of the largest recent batch decays by this factor with each smaller batch.
DECAY = 0.98


class Allowance:
    """The allowance of one worker.

    Args:
        first: tasks that never wait: torch's prefetch_factor.
        nbytes: limit for the batches that are ready and under way, beyond those tasks.
        largest: bytes of the largest batch known so far; 0: none is known, and all tasks beyond the first wait.

    Attributes:
        nbytes: the current limit.
        ahead: how many tasks may be unanswered, beyond the first.
    """

    def __init__(self, first: int, nbytes: float, largest: float = 0.0) -> None:
        self._first = first
        self.nbytes = nbytes
        self.ahead: float = math.inf
        self._ready = 0  # batches
        self._ready_bytes = 0
        self._largest = largest

    def allows(self, unanswered: int) -> bool:
        """Whether one more task may be given to the worker, which has this many unanswered ones."""
        if unanswered + self._ready < self._first:
            return True
        under_way = (unanswered + 1) * GROWTH * self._largest
        return bool(self._largest) and unanswered < self.ahead and self._ready_bytes + under_way <= self.nbytes

    def answered(self, nbytes: int) -> None:
        """A batch has come."""
        self._ready += 1
        self._ready_bytes += nbytes
        self._largest = max(nbytes, DECAY * self._largest, 1.0)

    def gone(self, nbytes: int) -> None:
        """A batch that had come was taken or dropped."""
        self._ready -= 1
        self._ready_bytes -= nbytes
