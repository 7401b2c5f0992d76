"""How many tasks of a worker may be under way: by its pace, if the user has not set it, and by its batches' bytes.

Deep enough that a worker never waits for the trainer, or for a message; no deeper, because batches take memory.

Promise: pure arithmetic on what one worker reports; no clock, no Ray, no torch.

NOTE [bytes]. Each worker may have at most `nbytes` of batches ready, in progress or kept by the user; a further task
waits in the schedule until the user takes one of the worker's batches. The sizes of unbuilt batches are estimated from
recent ones, with room for growth. The worker's first tasks, as many as torch's loader would have given it, never wait.
So there is no deadlock: a worker's ready batches come before its waiting tasks, and once these batches are taken, the
waiting tasks are among its first.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

# A *turn* is so many seconds of a worker's work. A delay shorter than the turns under way, in the worker, the trainer
# or the messages, delays no one else.
TURN_SECONDS = 0.01
# More gains nothing: by then the cost of a turn, such as waking a process, is small per task.
MAX_TASKS_PER_TURN = 128
# How many of the latest turns count: their median, because single times say little on a busy machine.
RECENT_TURNS = 9
# The turn in progress, the next one, and one on its way to the user: with less the worker would wait for the user to
# take a whole turn.
TURNS_UNDER_WAY = 3
# If any worker may take any task: the turn in progress and the next one. Other tasks queue for the next free worker.
TURNS_AHEAD = 2
# Maximum number of tasks of a worker under way. If any worker may take any task, all that memory allows up to this: a
# straggler may take that long without idling the others.
MAX_DEPTH = TURNS_UNDER_WAY * MAX_TASKS_PER_TURN
# An unbuilt batch is assumed to be at most this many times as large as the largest recent one.
GROWTH = 2.0
# The size of the largest recent batch decays by this factor with each smaller batch.
DECAY = 0.98


class Pace:
    """Follows one worker's times and sizes.

    Args:
        worker_bytes: bytes of this worker's batches that may be under way.
        dynamic: whether any worker may take any task.

    Attributes:
        depth: tasks that should be under way, per worker; 0: no opinion.
        ahead: tasks that the worker may be given before it has answered, if any worker may take any task.
    """

    def __init__(self, worker_bytes: float, *, dynamic: bool = False) -> None:
        self.worker_bytes = worker_bytes
        self.dynamic = dynamic
        self._tasks_per_turn = 1
        self._seconds: deque[float] = deque(maxlen=RECENT_TURNS)  # per task, for each turn
        self._nbytes = 0.0  # size of a batch
        self._turn_tasks = self._turn_seconds = self._turn_bytes = 0.0  # tasks of the current turn, and their sums
        self.depth = 0
        self.ahead = TURNS_AHEAD

    @property
    def nbytes(self) -> float:
        """Size of a batch in bytes; 0 if unknown."""
        return max(self._nbytes, 1.0) if self._seconds else 0.0

    def saw(self, seconds: float, nbytes: int) -> bool:
        """Records the time of a task and the bytes of its batch; returns whether `depth` or `ahead` changed."""
        self._turn_tasks += 1
        self._turn_seconds += seconds
        self._turn_bytes += nbytes
        grown = nbytes * TURNS_UNDER_WAY * self._tasks_per_turn > 2 * self.worker_bytes  # this would take too much
        if self._turn_tasks < self._tasks_per_turn and not grown:
            return False
        if grown:
            self._nbytes = max(nbytes, self._nbytes)
        self._seconds.append(self._turn_seconds / self._turn_tasks)
        self._nbytes = max(self._turn_bytes / self._turn_tasks, 0.9 * self._nbytes)
        self._turn_tasks = self._turn_seconds = self._turn_bytes = 0.0
        usual = statistics.median(self._seconds)
        fitting = self.worker_bytes / max(self._nbytes, 1.0)  # batches
        # At most twice as many as now: one quick turn proves nothing. A small change is not worth a message.
        wanted = min(TURN_SECONDS / max(usual, 1e-9), fitting / TURNS_UNDER_WAY)
        tasks = max(1, int(min(wanted, 2 * self._tasks_per_turn, MAX_TASKS_PER_TURN)))
        if abs(tasks - self._tasks_per_turn) * 4 > self._tasks_per_turn:
            self._tasks_per_turn = tasks
        return self._set(fitting)

    def _set(self, fitting: float) -> bool:
        tasks, before = self._tasks_per_turn, (self.depth, self.ahead)
        self.depth = TURNS_UNDER_WAY * tasks if tasks > 1 else 0
        if self.dynamic:
            self.depth = max(1, int(min(fitting, MAX_DEPTH)))
        self.ahead = TURNS_AHEAD * tasks
        return (self.depth, self.ahead) != before


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
