"""The nodes that Ray drains: they will leave, perhaps at a known time, and Ray starts nothing new there.

Promise: does not import Ray, which is asked through a function: at most once in `INTERVAL_S`, in the janitor's thread,
and only while actors run on other nodes than the driver's. Any thread may query this object.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger("rayloader")

# How often Ray is asked, in seconds. Clouds give at least 30 s of notice.
INTERVAL_S = 2.0
# How long before a node leaves its workers move, even if others must do their work: opening a dataset takes a while.
MARGIN_S = 5.0


class Draining:
    """The draining nodes of one Ray session.

    Args:
        ask: returns the nodes that Ray drains, with the time at which each will leave, in milliseconds since 1970; 0 if
            that is open.
    """

    def __init__(self, ask: Callable[[], Mapping[str, int]]) -> None:
        self._ask = ask
        self._moments: dict[str, tuple[float, float]] = {}  # by node, see `is_late`; replaced as a whole
        self._due = 0.0  # time.monotonic(): when to ask next

    def __bool__(self) -> bool:
        """Whether any actors are on such nodes."""
        return bool(self._moments)

    def __contains__(self, node_id: str) -> bool:
        """Whether Ray drains that node, if actors are there."""
        return node_id in self._moments

    def is_late(self, node_id: str, *, at_last: bool) -> bool:
        """Whether workers must leave that node now, even if others must do their work.

        Args:
            node_id: that node.
            at_last: whether only the node's own deadline counts; else also how long they have waited for room
                elsewhere.
        """
        return time.monotonic() >= self._moments.get(node_id, (math.inf, math.inf))[at_last]

    def look(self, actors: Mapping[str, int], patience: float) -> float | None:
        """Asks Ray, if that is due; returns the seconds until the next time, None if there is nothing to ask.

        Args:
            actors: how many there are on each other node.
            patience: how many seconds workers wait for room on another node, if their node does not leave earlier.
        """
        if not actors:
            self._moments = {}
            return None
        now = time.monotonic()
        if now < self._due:
            return self._due - now
        self._due = now + INTERVAL_S
        try:
            drained = self._ask()
        except Exception:  # Ray raises many kinds of errors; it reports the problem itself, and is asked again
            return INTERVAL_S
        moments = {}
        for node_id in drained:
            if node_id not in actors:
                continue
            left = drained[node_id] / 1000 - time.time() if drained[node_id] else math.inf
            at_last = now + left - MARGIN_S
            patient = self._moments[node_id][False] if node_id in self._moments else now + patience
            moments[node_id] = min(patient, at_last), at_last
            if node_id not in self._moments:
                logger.warning(
                    "rayloader: Ray drains the node %s%s; its %d worker processes are replaced by others elsewhere",
                    node_id,
                    f", which goes in {max(0.0, left):.0f} s" if left < math.inf else "",
                    actors[node_id],
                )
        self._moments = moments
        return INTERVAL_S
