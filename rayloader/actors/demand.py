"""What else in the cluster waits for room, and which idle actors are in its way.

Promise: Ray is asked once in `INTERVAL_S`, in the janitor's thread, and only while idle actors hold something.

Ray reports tasks, actors and placement groups that wait, except those with an affinity to a node: of these, actors are
found in its table of actors, and tasks nowhere. In that table, an actor that waits looks like one whose process starts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rayloader.actors.actor import Actor
from rayloader.actors.room import Amounts, ClusterState, Node, Waiting, Want, add, fits, in_the_way

logger = logging.getLogger("rayloader")

# How often Ray is asked while idle actors hold something, in seconds. Ray itself collects what waits once a second, and
# who waits is to have its place within three.
INTERVAL_S = 1.0
# How long Ray may take to answer, in seconds: the janitor's thread has other work.
ASK_TIMEOUT_S = 1.0
# For how many seconds what an ended actor has held counts as free: what Ray has collected may be a second old.
FREED_S = 1.5
# How long other programs' actors of Ray's table count as starting, in seconds; and those that there was room for when
# they were first seen, so that they have most likely got it, though a busy machine takes long to start their process.
STARTING_S = 2.0
HAD_ROOM_S = 5.0


class Demand:
    """What waits for room in the cluster of one session.

    Args:
        ask: tells the state of the cluster; None if this version of Ray does not tell it.
    """

    def __init__(self, ask: Callable[[], ClusterState | None]) -> None:
        self._ask = ask
        self._due: float | None = None  # time.monotonic(): when to ask next; None: idle actors hold nothing
        self._freed: list[tuple[float, str, Amounts]] = []  # until when what was held on a node counts as free
        self._counts_from: dict[str, float] = {}  # time.monotonic(), by ids of actors of Ray's table

    def hurry(self) -> None:
        """New actors of this process may need what idle ones hold: Ray is asked at once."""
        if self._due is not None:
            self._due = 0.0

    def look(self, idle: Sequence[Actor], pending: Sequence[Actor]) -> tuple[list[Actor], float | None]:
        """Asks Ray, if that is due.

        Args:
            idle: actors of this process.
            pending: those that are to work, and do not run yet.

        Returns:
            The idle actors that are in the way, and the seconds until the next time, None if there is nothing to ask.
        """
        idle, now = [actor for actor in idle if actor.holds and actor.node_id], time.monotonic()
        if not idle:
            self._due = None
            return [], None
        if self._due is None:  # the end of an epoch does not wait for Ray
            self._due = now + INTERVAL_S
        if now < self._due:
            return [], self._due - now
        self._due = now + INTERVAL_S
        try:
            state = self._ask()
        except Exception:  # Ray raises many kinds of errors; it reports the problem itself, and is asked again
            return [], INTERVAL_S
        if state is None:
            return [], None
        nodes = self._with_freed(state.nodes, now)
        found = in_the_way(idle, nodes, [*self._of_actors(state, pending, nodes, now), *state.waiting])
        for actor, _ in found:
            self._freed.append((now + FREED_S, actor.node_id, actor.holds))
        for what, number in Counter(str(one) for _, one in found).items():
            logger.info(
                "rayloader: %d idle worker processes end, because they hold what something else in the Ray cluster "
                "waits for: %s",
                number,
                what,
            )
        return [actor for actor, _ in found], INTERVAL_S

    def _with_freed(self, nodes: Mapping[str, Node], now: float) -> dict[str, Node]:
        """The nodes, with what Ray will soon call free."""
        self._freed = [freed for freed in self._freed if freed[0] > now]
        changed = dict(nodes)
        for _, node_id, amounts in self._freed:
            if node_id in changed:
                free = dict(changed[node_id].free)
                add(free, amounts, 1)
                changed[node_id] = changed[node_id]._replace(free=free)
        return changed

    def _of_actors(
        self, state: ClusterState, pending: Sequence[Actor], nodes: Mapping[str, Node], now: float
    ) -> list[Waiting]:
        """Actors that wait and that Ray does not report: those of other programs, and of this one."""
        ours = {actor.actor_id for actor in pending}
        wants = {
            actor.actor_id: want
            for actor in pending
            if (want := _unreported(actor)) is not None and not actor.is_placed()
        }
        reported = Counter({_shape(one.wants[0].amounts): one.times for one in state.waiting if len(one.wants) == 1})
        for actor_id, amounts in state.actors.items():
            if actor_id in ours:
                continue
            if reported[_shape(amounts)] > 0:  # it is one of these
                reported[_shape(amounts)] -= 1
            else:
                wants[actor_id] = Want(amounts)
        before, self._counts_from = self._counts_from, {}
        for actor_id, want in wants.items():
            if actor_id not in before:
                has_room = any(want.may_be_on(*node) and fits(want.amounts, node[1].free) for node in nodes.items())
                before[actor_id] = now + (HAD_ROOM_S if has_room else 0.0 if actor_id in ours else STARTING_S)
            self._counts_from[actor_id] = before[actor_id]
        return [Waiting([want]) for actor_id, want in wants.items() if now >= self._counts_from[actor_id]]


def _shape(amounts: Amounts) -> frozenset[tuple[str, float]]:
    return frozenset(amounts.items())


def _unreported(actor: Actor) -> Want | None:
    """What an actor of this process asks for, if Ray does not report that: where it has an affinity to a node."""
    strategy = actor.options.get("scheduling_strategy")
    node_id = getattr(strategy, "node_id", None)
    if node_id is not None:
        return Want(actor.holds, node_id=None if getattr(strategy, "soft", False) else node_id)
    return Want(actor.holds) if strategy is None and not actor.options.get("label_selector") else None
