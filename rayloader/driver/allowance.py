"""How much of one worker's work may be under way, by the bytes of its batches.

Promise: pure arithmetic; no clock, no Ray, no torch.

NOTE [bytes]. Of each worker so many bytes may be ready, under way or kept by the user; a task beyond that waits in the
driver until the user takes one of the worker's batches. What is under way is counted as batches that grow. The worker's
first tasks, as many as torch's loader would have given it, never wait. So nothing can come to a standstill: whatever is
ready of a worker comes before its tasks that wait, and once all of that was taken they are among its first.
"""

from __future__ import annotations

import math

# How much larger than the largest batch of late one that is not built yet is taken to be.
GROWTH = 2.0
# What remains of the largest batch with each that is smaller.
DECAY = 0.98


class Allowance:
    """Of one worker.

    Args:
        first: tasks that never wait, torch's prefetch_factor.
        nbytes: of batches that may be ready and under way, beyond those tasks.
        largest: bytes of a batch, as far as is known; 0: nothing is, and beyond those tasks each waits.

    Attributes:
        nbytes: the same, as it is now.
        ahead: tasks that may be unanswered, beyond those tasks.
    """

    def __init__(self, first: int, nbytes: float, largest: float = 0.0) -> None:
        self._first = first
        self.nbytes = nbytes
        self.ahead: float = math.inf
        self._ready: dict[int, int] = {}  # bytes by task
        self._ready_bytes = 0
        self._largest = largest

    def allows(self, unanswered: int) -> bool:
        """Whether one more task may be given to the worker, which has not answered so many."""
        if unanswered + len(self._ready) < self._first:
            return True
        under_way = (unanswered + 1) * GROWTH * self._largest
        return bool(self._largest) and unanswered < self.ahead and self._ready_bytes + under_way <= self.nbytes

    def answered(self, task_id: int, nbytes: int) -> None:
        """A batch has come; telling it twice does no harm."""
        self._ready_bytes += nbytes - self._ready.get(task_id, 0)
        self._ready[task_id] = nbytes
        self._largest = max(nbytes, DECAY * self._largest, 1.0)

    def gone(self, task_id: int) -> None:
        """A batch was taken or dropped; likewise."""
        self._ready_bytes -= self._ready.pop(task_id, 0)
