"""How many tasks of a worker may be under way, where that is not the user's to say.

Deep enough that a worker never waits for the trainer, or for a message; no deeper, for what is under way takes memory.

Promise: pure arithmetic on what one worker reports; no clock, no Ray, no torch.
"""

from __future__ import annotations

import statistics
from collections import deque

# A *turn* is so many seconds of a worker's work. Whoever is held up for less than the turns that are under way, the
# worker, the trainer or the messages between them, holds up nobody else.
TURN_SECONDS = 0.01
# More gains nothing: by then what a turn costs, such as a process that must be woken, is little per task.
MAX_TASKS_PER_TURN = 128
# How many of the latest turns count: their median, for on a busy machine single times say little.
RECENT_TURNS = 9
# What the worker is at, what it has been given to do next, and what is on its way to the user: with less the worker
# would wait for the user to take a whole turn.
TURNS_UNDER_WAY = 3
# Where any worker takes any task: what the worker is at, and what it does next. The others queue for whoever is free.
TURNS_AHEAD = 2
# Tasks of a worker under way, at most. Where any worker takes any task, all that memory allows up to this: so long a
# straggler may be without idling the others.
MAX_DEPTH = TURNS_UNDER_WAY * MAX_TASKS_PER_TURN


class Pace:
    """Follows one worker's times and sizes.

    Args:
        worker_bytes: bytes of this worker's batches that may be under way.
        dynamic: whether any worker takes any task.

    Attributes:
        depth: tasks that should be under way, per worker; 0 for no opinion.
        ahead: tasks that the worker may be given before it has answered, where any worker takes any task.
    """

    def __init__(self, worker_bytes: float, *, dynamic: bool = False) -> None:
        self.worker_bytes = worker_bytes
        self.dynamic = dynamic
        self._tasks_per_turn = 1
        self._seconds: deque[float] = deque(maxlen=RECENT_TURNS)  # of a task, by turn
        self._nbytes = 0.0  # of a batch
        self._turn: list[tuple[float, int]] = []  # seconds and bytes, by task of the turn that is under way
        self.depth = 0
        self.ahead = TURNS_AHEAD

    @property
    def nbytes(self) -> float:
        """Of a batch, as far as is known; 0 for not at all."""
        return max(self._nbytes, 1.0) if self._seconds else 0.0

    def saw(self, seconds: float, nbytes: int) -> bool:
        """Takes in what a task took, and the bytes of its batch; whether `depth` or `ahead` changed."""
        self._turn.append((seconds, nbytes))
        grown = nbytes * TURNS_UNDER_WAY * self._tasks_per_turn > 2 * self.worker_bytes  # so many would be too much
        if len(self._turn) < self._tasks_per_turn and not grown:
            return False
        if grown:
            self._nbytes = max(nbytes, self._nbytes)
        self._seconds.append(sum(seconds for seconds, _ in self._turn) / len(self._turn))
        self._nbytes = max(sum(nbytes for _, nbytes in self._turn) / len(self._turn), 0.9 * self._nbytes)
        self._turn.clear()
        usual = statistics.median(self._seconds)
        fitting = self.worker_bytes / max(self._nbytes, 1.0)  # batches
        # At most twice as many as now: one quick turn is no proof. A small change is not worth one.
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
