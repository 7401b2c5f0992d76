"""Where actors run: what they ask Ray for, how long they wait for it, and which idle ones are in the way of others.

Promise: actors ask for what the user's options name, and otherwise for one CPU each in a Ray that was joined, for none
in one that was started here. They wait for that with one limit, longer where something still happens: processes or
nodes start. Any thread may call, and none waits for Ray, except before actors are created. Idle actors end where what
they hold makes room for something else in the cluster that waits. Ray reports tasks, actors and placement groups that
wait, except for those that have to be on a certain node; of these only this process's own actors are known.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rayloader.actors import session
from rayloader.actors._compat_ray import node_first
from rayloader.actors.actor import Actor
from rayloader.actors.cluster import ASK_LIMIT_S, INTERVAL_S, Cluster, Node, Want, in_words, wanted
from rayloader.errors import WorkerStartError

logger = logging.getLogger("rayloader")

# How long an actor may wait for its place where nothing happens.
START_TIMEOUT_S = 60.0
# How long where it has its place, and Ray starts its process, or where an autoscaler starts nodes. These take minutes.
LONG_START_TIMEOUT_S = 600.0
START_TIMEOUT_VARIABLE = "RAYLOADER_START_TIMEOUT"
# When Ray is asked this long after an actor was created, the answer tells whether it has a place. A node reports ten
# times a second what it has no room for, but may be busy.
REPORTED_S = 3.0
# How much longer they wait for such an answer, before the error says that there is none.
ANSWER_PATIENCE_S = INTERVAL_S + 2 * ASK_LIMIT_S
# How many seconds before it answers Ray may have collected what is free, and what waits. So long after some idle actors
# have ended nobody knows whether more must.
STALE_S = 1.5


class Placement:
    """The placement of the actors of one pool.

    Args:
        cluster: where they run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nodes_came_at = -math.inf  # time.monotonic() when nodes were on their way last
        self._looked_at = 0.0  # `ClusterStatus.at`: until then, what waits was looked at

    def options(self, remote_args: dict[str, Any]) -> dict[str, Any]:
        """Each actor's options, except for `where`: those of the user, and one CPU if they name no number.

        Asks Ray what there is, for all that follows.
        """
        status = self._cluster.ask()
        nodes = [] if status is None else status.nodes
        ours = session.started_here() or any(session.OVERSUBSCRIBE_RESOURCE in node.total for node in nodes)
        return {"enable_task_events": False, "num_cpus": 0 if ours else 1, **remote_args}

    def where(self, options: dict[str, Any], count: int, starting: int) -> list[tuple[dict[str, Any], bool | None]]:
        """The option that says where each of `count` actors with these options runs, if they leave it open.

        It is the driver's node for as many as have room there: batches take the shortest way from there, and Ray by
        itself fills no node more than half while another one has room. Ray does not tell an autoscaler of actors that
        ask for a certain node, so all others ask for none. They stay out of a placement group that Ray Tune would use.
        Actors that ask for nothing are left to Ray to spread, because on one node they would all share its CPUs.

        Args:
            options: from `options`.
            count: how many are to be created.
            starting: how many of this process have not started, and may take room that counts as free.

        Returns:
            For each also `Actor.had_room`.
        """
        want, status, strategy = wanted(options), self._cluster.status, options.get("scheduling_strategy")
        node_id = session.node_id() if strategy is None else getattr(strategy, "node_id", "")
        nodes = [] if status is None else [node for node in status.nodes if node.node_id == node_id]
        most = max(0.0, sum(_most(node.free, want) for node in nodes) - starting)
        if strategy is not None:
            return [({}, number < most if node_id else None) for number in range(count)]
        near = 0 if want.labels or not want.amounts else int(min(most, count))
        first = [({"scheduling_strategy": node_first(ray, node_id)}, True)]
        rest: list[tuple[dict[str, Any], bool | None]] = [({"scheduling_strategy": "DEFAULT"}, None)]
        return [*first * near, *rest * (count - near)]

    def check(self, pending: Sequence[Actor], of: int, waited: float) -> None:
        """Raises WorkerStartError if actors have not started for too long.

        Args:
            pending: these actors, all created with the same options.
            of: how many the fleet has.
            waited: seconds since they were created, or since any actor of this process started, because starts queue.
        """
        status, now = self._cluster.look(), time.monotonic()
        if status is not None and status.coming:
            self._nodes_came_at = now
        things_happen = self.lacking(pending) == 0 or now - self._nodes_came_at <= START_TIMEOUT_S
        limit = LONG_START_TIMEOUT_S if things_happen else START_TIMEOUT_S
        if text := os.environ.get(START_TIMEOUT_VARIABLE):
            limit = _seconds(text)
        if waited >= limit and (self._is_current(pending) or waited >= limit + ANSWER_PATIENCE_S):
            raise WorkerStartError(
                f"{len(pending)} of {of} DataLoader workers did not start within {limit:g} s. {self._known(pending)}. "
                "Remedies: lower num_workers, end what holds these resources, ask for others in ray_remote_args "
                f"(num_cpus=0 shares CPUs), or raise the environment variable {START_TIMEOUT_VARIABLE} (seconds) if "
                "nodes or processes are still starting"
            )

    def tell(self, pending: Sequence[Actor], of: int) -> None:
        """Logs what the program waits for: these actors, of so many."""
        logger.warning("rayloader: waiting for %d of %d worker processes. %s", len(pending), of, self._known(pending))

    def _known(self, pending: Sequence[Actor]) -> str:
        """What is known of these actors, which have not started, in sentences."""
        lacking, known = self.lacking(pending), []
        if lacking != 0:
            said = "not said yet whether there is room" if lacking is None else f"found no room for {lacking} of them"
            known.append(f"Ray has {said}: {in_words(self._cluster.status, pending[0].options)}")
        if lacking is not None and (starting := len(pending) - lacking):
            known.append(f"{starting} of them have their place: Ray is starting these processes, and they import torch")
        return ". ".join(known)

    def _is_current(self, pending: Sequence[Actor]) -> bool:
        """Whether the last answer tells of the places of these actors."""
        status = self._cluster.status
        return status is not None and status.at >= max(actor.created_at for actor in pending) + REPORTED_S

    def lacking(self, pending: Sequence[Actor]) -> int | None:
        """How many of these actors, which have not started, have no place; None if Ray has not said it yet."""
        want, status = wanted(pending[0].options), self._cluster.status
        if not want.amounts and not want.labels:
            return 0
        if status is None or not self._is_current(pending):
            return None
        told = sum(count for one, count in status.waiting if want.is_reported_as(one.amounts))
        unknown = [actor for actor in pending if actor.had_room is None]
        return min(len(unknown), told) + sum(actor.had_room is False for actor in pending)

    def in_the_way(self, idle: Sequence[Actor], pending: Sequence[Actor]) -> list[Actor]:
        """Which of some idle actors must end, and tells the log why; none if Ray has said nothing new.

        Args:
            idle: actors of this process that hold something.
            pending: those that are to work, and do not run yet.
        """
        status = self._cluster.look()
        if status is None or status.at <= self._looked_at:
            return []
        own = [(wanted(actor.options), 1) for actor in pending if actor.had_room is False]
        found = in_the_way(idle, status.nodes, [*own, *status.waiting, *((bundle, 1) for bundle in status.bundles)])
        self._looked_at = status.at + (STALE_S if found else 0.0)
        for what, number in Counter(str(want) for _, want in found).items():
            logger.info(
                "rayloader: %d idle worker processes end, because they hold what is waited for in the Ray cluster, "
                "by this program or another one: %s",
                number,
                what,
            )
        return [actor for actor, _ in found]


def _most(has: Mapping[str, float], want: Want) -> float:
    """How often there is room for this in what a node has."""
    return min(
        (math.floor(has.get(name, 0.0) / amount + 1e-4) for name, amount in want.amounts.items()), default=math.inf
    )


def in_the_way(
    idle: Sequence[Actor], nodes: Sequence[Node], waiting: Sequence[tuple[Want, int]]
) -> list[tuple[Actor, Want]]:
    """The actors that must end so that what waits has room, each with what needs it.

    An actor is none of them if what waits has room without its end, or has none in spite of it.

    Args:
        idle: the actors.
        nodes: of the cluster.
        waiting: what waits, and how many times.
    """
    free = {node.node_id: Counter(node.free) for node in nodes}
    ending: list[tuple[Actor, Want]] = []
    left = list(idle)
    for want, times in waiting:
        fitting = [node.node_id for node in nodes if want.may_be_on(node)]
        for _ in range(times if left else 0):
            found = [(node_id, _leaving(want, node_id, free[node_id], left)) for node_id in fitting]
            room = [(node_id, leaving) for node_id, leaving in found if leaving is not None]
            if not room:
                break  # nor would there be room for another one of these
            node_id, leaving = min(room, key=lambda one: len(one[1]))
            for actor in leaving:
                left.remove(actor)
                free[node_id].update(actor.holds)
            free[node_id].subtract(want.amounts)
            ending += [(actor, want) for actor in leaving]
    return ending


def _leaving(want: Want, node_id: str, free: Mapping[str, float], idle: Sequence[Actor]) -> list[Actor] | None:
    """The idle actors whose end makes room on a node; None if there is none in spite of it."""
    room, leaving = Counter(free), list[Actor]()
    for actor in idle:
        if actor.node_id == node_id and any(name in actor.holds for name in want.lacks(room)):
            leaving.append(actor)
            room.update(actor.holds)
    return None if want.lacks(room) else leaving


def _seconds(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ValueError(
            f"{START_TIMEOUT_VARIABLE} must be a number of seconds >= 0, got {text!r}; leave it out for the default"
        )
    return limit
