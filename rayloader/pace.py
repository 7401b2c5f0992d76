"""How many tasks make a call, and how many may be under way.

A call carries enough of them to hide what a call costs, few enough to keep the window small.

Promise: pure arithmetic on what one worker reports; no clock, no Ray, no torch.
"""

from __future__ import annotations

import statistics
from collections import deque

# A call costs about 1 ms of CPU over driver, actor and raylet: a tenth of a call of this length.
CALL_SECONDS = 0.01
# More gains nothing: by then a call costs less per task than the rest of a task's way.
MAX_TASKS_PER_CALL = 128
# How many of the latest calls count: their median, for on a busy machine single times say little.
RECENT_CALLS = 9
# The call that the worker is at, the next one, and one on its way to the user: with less the worker would wait for the
# user to take a whole call before the next one fills.
CALLS_UNDER_WAY = 3
# Tasks of a worker under way, at most. Where any worker takes any task, all that memory allows up to this: so long a
# straggler may be without idling the others.
MAX_PLACES = CALLS_UNDER_WAY * MAX_TASKS_PER_CALL
# A worker that cannot publish withholds a finished batch for as long as the rest of its call takes. So its calls carry
# several tasks only once so many calls in a row took much the same time: the longest STEADY times the shortest.
STEADY_CALLS = 32
STEADY = 4.0


class Pace:
    """Follows one worker's times and sizes.

    Args:
        worker_bytes: bytes of this worker's batches that may be under way.
        max_tasks: tasks that a call carries at most.
        dynamic: whether any worker takes any task.

    Attributes:
        tasks_per_call: that make a call of the right length.
        places: tasks that should be under way, per worker; 0 for no opinion.
    """

    def __init__(self, worker_bytes: float, max_tasks: int = MAX_TASKS_PER_CALL, *, dynamic: bool = False) -> None:
        self.worker_bytes = worker_bytes
        self.max_tasks = max_tasks
        self.dynamic = dynamic
        self._seconds: deque[float] = deque(maxlen=STEADY_CALLS)  # of a task, by call
        self._nbytes = 0.0  # of a batch
        self.tasks_per_call = 1
        self.places = 0

    def saw(self, num_tasks: int, seconds: float, nbytes: int, *, publishes: bool) -> bool:
        """Takes in a call's report; whether `tasks_per_call` or `places` changed.

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
        fitting = self.worker_bytes / max(self._nbytes, 1.0)  # batches
        # At most twice as many as now: one quick call is no proof. A small change is not worth one.
        wanted = min(CALL_SECONDS / max(usual, 1e-9), fitting / CALLS_UNDER_WAY)
        tasks = max(1, min(int(wanted), 2 * self.tasks_per_call, self.max_tasks))
        if not publishes and not self._steady():
            tasks = 1
        if abs(tasks - self.tasks_per_call) * 4 <= self.tasks_per_call:
            tasks = self.tasks_per_call
        places = CALLS_UNDER_WAY * tasks if tasks > 1 else 0
        if self.dynamic:
            places = min(max(1, int(fitting)), MAX_PLACES)
        changed = (tasks, places) != (self.tasks_per_call, self.places)
        self.tasks_per_call, self.places = tasks, places
        return changed

    def _steady(self) -> bool:
        return len(self._seconds) == STEADY_CALLS and max(self._seconds) <= STEADY * min(self._seconds)
