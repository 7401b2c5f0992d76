"""Where actors run: what they ask Ray for, how long they wait for it, what is said meanwhile.

Promise: actors ask for what the user's options name, and otherwise for one CPU each in a Ray that was joined, for none
in one that was started here. They wait for that with one limit. Any thread may call, and none waits for Ray, except
before actors are created.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from rayloader.actors import session, start
from rayloader.actors._compat_ray import node_first
from rayloader.actors.actor import Actor
from rayloader.actors.cluster import Cluster, demand, in_words, is_like, most
from rayloader.errors import WorkerStartError

logger = logging.getLogger("rayloader")

# How long actors may take to start, after the last one of this process has: an autoscaler's nodes take minutes.
START_TIMEOUT_S = 300.0
START_TIMEOUT_VARIABLE = "RAYLOADER_START_TIMEOUT"
# When Ray is asked this long after an actor was created, the answer tells whether it has a place. A node reports ten
# times a second what it has no room for, but may be busy.
REPORTED_S = 3.0


class Placement:
    """The placement of the actors of one pool.

    Args:
        cluster: where they run.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def options(self, remote_args: dict[str, Any]) -> dict[str, Any]:
        """Each actor's options, except for `where`: those of the user, and one CPU if they name no number.

        Asks Ray what there is, for all that follows.
        """
        status = self._cluster.ask()
        ours = status is not None and any(start.OVERSUBSCRIBE_RESOURCE in node.total for node in status.nodes)
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
        needs, status, strategy = demand(options), self._cluster.status, options.get("scheduling_strategy")
        node_id = session.node_id() if strategy is None else getattr(strategy, "node_id", "")
        nodes = [] if status is None else [node for node in status.nodes if node.node_id == node_id]
        fit = max(0.0, sum(most(node.free, needs) for node in nodes) - starting)
        if strategy is not None:
            return [({}, number < fit if node_id else None) for number in range(count)]
        near = 0 if options.get("label_selector") or not needs else int(min(fit, count))
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
        self._cluster.look()
        text = os.environ.get(START_TIMEOUT_VARIABLE)
        limit = _seconds(text) if text else START_TIMEOUT_S
        if waited >= limit:
            raise WorkerStartError(
                f"{len(pending)} of {of} DataLoader workers did not start within {limit:g} s: {self._why(pending)}. "
                'Lower num_workers, ask for less in ray_remote_args ({"num_cpus": 0} shares CPUs), or raise '
                f"{START_TIMEOUT_VARIABLE} (seconds)"
            )

    def tell(self, pending: Sequence[Actor], of: int) -> None:
        """Logs what the program waits for: these actors, of so many."""
        logger.warning("rayloader: waiting for %d of %d worker processes: %s", len(pending), of, self._why(pending))

    def _why(self, pending: Sequence[Actor]) -> str:
        """What these actors wait for."""
        lacking = self.lacking(pending)
        if lacking == 0:
            return "they have a place in the Ray cluster, and Ray is starting their processes"
        known = "has not said yet whether there is room" if lacking is None else f"has no room for {lacking} of them"
        return f"Ray {known}; {in_words(self._cluster.status, pending[0].options)}"

    def lacking(self, pending: Sequence[Actor]) -> int | None:
        """How many of these actors, which have not started, have no place; None if Ray has not said it yet."""
        options, status = pending[0].options, self._cluster.status
        needs = demand(options)
        if not needs and not options.get("label_selector"):
            return 0
        asked = max(actor.created_at for actor in pending) + REPORTED_S
        if status is None or status.demand is None or status.at < asked:
            return None
        told = sum(count for one, count in status.demand if is_like(one, needs))
        unknown = [actor for actor in pending if actor.had_room is None]
        return min(len(unknown), told) + sum(actor.had_room is False for actor in pending)


def _seconds(text: str) -> float:
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit >= 0:
        raise ValueError(f"{START_TIMEOUT_VARIABLE} must be a number of seconds >= 0, got {text!r}; leave it out")
    return limit
