"""A pace that a test sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class StubPace:
    """Stands for a worker's `Pace`: with the next answer it wants what the test has set by then.

    Attributes:
        worker_bytes: of batches of this worker that may be under way.
        nbytes: of a batch, as known from an earlier epoch; 0: unknown.
        depth: of the window.
        ahead: tasks that the worker may be given before it has answered.
        wanted: `depth` and `ahead` as they are from the next answer on; None: they stay.
        seen: seconds and bytes of each answer.
    """

    worker_bytes: float = math.inf
    nbytes: float = 0.0
    depth: int = 0
    ahead: int = 2
    wanted: tuple[int, int] | None = None
    seen: list[tuple[float, int]] = field(default_factory=list)

    def saw(self, seconds: float, nbytes: int) -> bool:
        """Whether `depth` or `ahead` changed."""
        self.seen.append((seconds, nbytes))
        before = self.depth, self.ahead
        self.depth, self.ahead = self.wanted or before
        self.wanted = None
        return (self.depth, self.ahead) != before
