"""Which idle actors are in the way: they hold what something else in the cluster waits for.

Promise: pure functions of what Ray has said of the cluster; the only state is what was ended last. Ray reports tasks,
actors and placement groups that wait, except for those that have to be on a certain node; of these only this process's
own actors are known.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from rayloader.actors.actor import Actor
from rayloader.actors.cluster import ClusterStatus, Node, Waiting, Want
from rayloader.actors.room import demand

logger = logging.getLogger("rayloader")

# How many seconds before it answers Ray may have collected what is free, and what waits.
STALE_S = 1.5
ROUNDING = 1e-4  # in which Ray counts


class Demand:
    """What waits for room in the cluster of one session."""

    def __init__(self) -> None:
        self._looked_at = 0.0  # `ClusterStatus.at` of the last one
        self._freed: list[tuple[float, str, Mapping[str, float]]] = []  # when what was held on which node was given up

    def in_the_way(self, status: ClusterStatus, idle: Sequence[Actor], pending: Sequence[Actor]) -> list[Actor]:
        """Which of some idle actors must end, and tells the log why; none if this was asked for that status before.

        Args:
            status: of the cluster.
            idle: actors of this process that hold something.
            pending: those that are to work, and do not run yet.
        """
        if status.at <= self._looked_at:
            return []
        self._looked_at = status.at
        self._freed = [freed for freed in self._freed if freed[0] + STALE_S > status.at]
        free = {node.node_id: dict(node.free) for node in status.nodes}
        for _, node_id, amounts in self._freed:
            if node_id in free:
                _add(free[node_id], amounts, 1)
        own = [Waiting((want,)) for want in map(_unreported, pending) if want is not None]
        found = in_the_way(idle, status.nodes, free, [*own, *status.waiting])
        for what, number in Counter(str(one) for _, one in found).items():
            logger.info(
                "rayloader: %d idle worker processes end, because they hold what is waited for in the Ray cluster, "
                "by this program or another one: %s",
                number,
                what,
            )
        for actor, _ in found:
            assert actor.address is not None
            self._freed.append((status.at, actor.address.node_id, actor.holds))
        return [actor for actor, _ in found]


def _unreported(actor: Actor) -> Want | None:
    """What an actor of this process waits for that has to be on a certain node, where there was no room for it."""
    if actor.had_room is not False:
        return None
    strategy = actor.options.get("scheduling_strategy")
    node_id = None if getattr(strategy, "soft", False) else getattr(strategy, "node_id", None)
    return Want(demand(actor.options), node_id=node_id)


def in_the_way(
    idle: Sequence[Actor], nodes: Sequence[Node], free: Mapping[str, dict[str, float]], waiting: Sequence[Waiting]
) -> list[tuple[Actor, Waiting]]:
    """The actors that must end so that what waits has room, each with what needs it.

    An actor is none of them if what waits has room without its end, or has none in spite of it.

    Args:
        idle: the actors.
        nodes: of the cluster.
        free: what is free on each node, by id.
        waiting: what waits.
    """
    ending: list[tuple[Actor, Waiting]] = []
    left = list(idle)
    for one in waiting:
        for _ in range(one.times if left else 0):
            tried, leaving = dict(free), list[Actor]()
            if not all(_place(want, nodes, tried, left, leaving) for want in one.wants):
                break  # nor would there be room for another one of these
            free, left = tried, [actor for actor in left if actor not in leaving]
            ending += [(actor, one) for actor in leaving]
    return ending


def _place(
    want: Want, nodes: Sequence[Node], free: dict[str, dict[str, float]], idle: Sequence[Actor], leaving: list[Actor]
) -> bool:
    """Takes what is wanted from what is free; if needed, more idle actors leave. Returns whether there is room."""
    fitting = [node.node_id for node in nodes if want.may_be_on(node)]
    for may_leave in (False, True):
        for node_id in fitting:
            room, more = dict(free[node_id]), list[Actor]()
            for actor in idle if may_leave else ():
                if not (short := _short(room, want)):
                    break
                is_there = actor.address is not None and actor.address.node_id == node_id and actor not in leaving
                if is_there and not short.isdisjoint(actor.holds):
                    more.append(actor)
                    _add(room, actor.holds, 1)
            if not _short(room, want):
                _add(room, want.amounts, -1)
                free[node_id] = room
                leaving += more
                return True
    return False


def _short(free: Mapping[str, float], want: Want) -> set[str]:
    """The resources of which less is free than wanted."""
    return {name for name, amount in want.amounts.items() if free.get(name, 0.0) < amount - ROUNDING}


def _add(free: dict[str, float], amounts: Mapping[str, float], sign: int) -> None:
    for name, amount in amounts.items():
        free[name] = free.get(name, 0.0) + sign * amount
