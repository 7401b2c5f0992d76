"""How many tasks make a call: enough to hide what a call costs, few enough to keep the window small.

Promise: pure arithmetic on what one worker reports; no clock, no Ray, no torch.
"""

from __future__ import annotations

import statistics
from collections import deque

# A call costs 0.3 to 0.5 ms of CPU over driver, actor and raylet: a tenth of a call of this length.
CALL_SECONDS = 0.005
# More gains nothing: by then a call costs less per task than the rest of a task's way.
MAX_TASKS_PER_CALL = 64
# How many of the latest calls count: their median, for on a busy machine single times say little.
RECENT_CALLS = 9
# A worker that cannot publish withholds a finished batch for as long as the rest of its call takes. So its calls carry
# several tasks only once so many calls in a row took much the same time: the longest STEADY times the shortest.
STEADY_CALLS = 32
STEADY = 4.0


class Pace:
    """Follows one worker's times and sizes.

    Args:
        call_bytes: bytes of batches that a call may bring.
        max_tasks: tasks that a call carries at most.
    """

    def __init__(self, call_bytes: float, max_tasks: int = MAX_TASKS_PER_CALL) -> None:
        self.max_tasks = max_tasks
        self.call_bytes = call_bytes
        self._seconds: deque[float] = deque(maxlen=STEADY_CALLS)  # of a task, by call
        self._nbytes = 0.0  # of a batch
        self.tasks_per_call = 1

    def begin(self) -> None:
        """A new epoch: its first calls are short ones, for the user waits for them."""
        self.tasks_per_call = 1

    def saw(self, num_tasks: int, seconds: float, nbytes: int, *, publishes: bool) -> bool:
        """Takes in a call's report; whether `tasks_per_call` changed.

        Args:
            num_tasks: built in the call.
            seconds: that building them took.
            nbytes: of their batches.
            publishes: whether the worker shows each batch as soon as it has it.
        """
        if not num_tasks:
            return False
        self._seconds.append(seconds / num_tasks)
        self._nbytes = max(nbytes / num_tasks, 0.9 * self._nbytes)
        usual = statistics.median(list(self._seconds)[-RECENT_CALLS:])
        fitting = min(CALL_SECONDS / max(usual, 1e-9), self.call_bytes / max(self._nbytes, 1.0))
        # At most twice as many as now: one quick call is no proof. A small change is not worth one.
        wanted = max(1, min(int(fitting), 2 * self.tasks_per_call, self.max_tasks))
        if not publishes and not self._steady():
            wanted = 1
        if abs(wanted - self.tasks_per_call) * 4 <= self.tasks_per_call:
            return False
        self.tasks_per_call = wanted
        return True

    def _steady(self) -> bool:
        return len(self._seconds) == STEADY_CALLS and max(self._seconds) <= STEADY * min(self._seconds)
