"""Where actors may run: which resources they ask Ray for, how long they wait for them, which nodes they must leave.

Promise: workers that cannot get CPUs of their own share them, as torch's do, unless the user's options name a number.
The only state is what was learned about the cluster; any thread may call.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from rayloader.actors import session
from rayloader.actors._compat_ray import may_autoscale, node_first
from rayloader.actors.actor import Actor
from rayloader.errors import WorkerStartError
from rayloader.workers.processes import Verdict

logger = logging.getLogger("rayloader")

# How long an actor may wait for its place. Autoscalers add machines within minutes; without one none will come.
START_TIMEOUT_S = 60.0
AUTOSCALING_START_TIMEOUT_S = 600.0
START_TIMEOUT_VARIABLE = "RAYLOADER_START_TIMEOUT"
# How long actors may wait whose options have found no place before: idle ones that are in their way have ended by then.
ROOM_PATIENCE_S = 5.0
# How long they may wait for CPUs that other work holds before they ask for none: long enough for short tasks to end.
CPU_PATIENCE_S = 10.0
# How long they may wait before running actors of the same loader do their work meanwhile.
OTHERS_PATIENCE_S = 15.0
# How often Ray is asked which nodes will leave, in seconds. Clouds give at least 30 s of notice.
INTERVAL_S = 2.0
# How long before a node leaves its workers move, even if others must do their work: opening a dataset takes a while.
MARGIN_S = 5.0
# For actors that wait only for their processes.
NO_RESOURCES = "no resources"


class Placement:
    """The placement of the actors of one pool."""

    def __init__(self) -> None:
        self._autoscaling = False
        self._others_have_the_cpus = False
        self._not_placed: set[bytes] = set()  # options of actors that were given up

    def options(self, remote_args: dict[str, Any], count: int, wanted: int) -> dict[str, Any]:
        """Each actor's options, except for `where`.

        Args:
            remote_args: the user's options.
            count: how many actors are to be created.
            wanted: how many workers this process has, including these.
        """
        # Ray has no public answer to this one question: would more nodes start if they were requested?
        self._autoscaling = may_autoscale(ray)
        options: dict[str, Any] = {"enable_task_events": False, **remote_args}
        if "num_cpus" not in options:
            options["num_cpus"] = self._cpus_per_worker(count, wanted)
        return options

    def where(self, options: dict[str, Any]) -> dict[str, Any]:
        """The option that says where an actor with these options runs, if they leave it open.

        It is the driver's node as long as that has room: batches take the shortest way from there, and Ray by itself
        fills no node more than half while another one has room. Actors that ask for nothing are left to Ray to spread,
        because on one node they would all share its CPUs. Either way, they stay out of a placement group that Ray Tune
        would use.
        """
        if "scheduling_strategy" in options:
            return {}
        is_open = not options.get("label_selector") and _in_words(options) != NO_RESOURCES
        return {"scheduling_strategy": node_first(ray, session.node_id()) if is_open else "DEFAULT"}

    def _cpus_per_worker(self, count: int, wanted: int) -> float:
        """One if the cluster has, or can get, as many CPUs as this process has workers; otherwise none, as with torch.

        The CPUs that this process itself holds, inside a Ray task or actor, are not available. Whether CPUs that
        others hold become available shows later: see `verdict`.
        """
        total = ray.cluster_resources()
        if session.OVERSUBSCRIBE_RESOURCE in total or self._others_have_the_cpus or not total:  # no node lives
            return 0
        own = session.cpus_of_this_process()
        cpus = total.get("CPU", 0) - own
        if wanted <= cpus or self._autoscaling:
            return 1
        but_own = f", not counting the {own:g} that this process holds" if own else ""
        warnings.warn(
            f"This DataLoader will create {count} worker processes, {wanted} with those that are already running. The "
            f"suggested maximum is {cpus:g} (the CPUs of the Ray cluster{but_own}), so the workers will share CPUs. "
            "Lower num_workers if that is too slow, or have the workers wait for CPUs of their own with "
            'ray_remote_args={"num_cpus": 1}.',
            stacklevel=2,
        )
        return 0

    def lacks_cpus(self, remote_args: dict[str, Any], count: int) -> bool:
        """Whether this many actors may have to wait for CPUs now."""
        return bool(ray.available_resources().get("CPU", 0) < count * (remote_args.get("num_cpus", 1) or 0))

    def verdict(self, pending: Sequence[Actor], waited: float, remote_args: dict[str, Any], *, others: bool) -> Verdict:
        """What to do about actors that have not started for `waited` seconds.

        Args:
            pending: these actors, all created with the same options.
            waited: seconds since they were created, or since any actor of this process got a place or started, because
                starts queue.
            remote_args: the user's options.
            others: whether some actors of that fleet run, which can do the work until these have found a place.
        """
        limit = self.limit
        homeless = [actor for actor in pending if actor.placed_at is None]
        if not homeless:  # they hold what they asked for, and need only time
            return Verdict.GIVE_UP if waited >= self.limit_once_placed else Verdict.WAIT
        if "num_cpus" not in remote_args and pending[0].options["num_cpus"] and not self._autoscaling:
            # If enough CPUs were free, they may hold them: Ray assigns them before it starts the processes.
            had_room = all(actor.had_room for actor in homeless)
            patience = min(limit if had_room else CPU_PATIENCE_S, limit)
            no_cpu_is_free = waited >= patience and ray.available_resources().get("CPU", 0) < 1
            if no_cpu_is_free:
                self._others_have_the_cpus = True
                logger.warning(
                    "rayloader: other Ray work has held all CPUs of the cluster for %.0f s, so the workers of this "
                    "process ask for none from now on and share them; leave CPUs free for the workers, or have them "
                    'wait for CPUs with ray_remote_args={"num_cpus": 1}',
                    waited,
                )
                return Verdict.SHARE_CPUS
        if others:
            limit = self.limit_with_others
        if waited >= (min(ROOM_PATIENCE_S, limit) if pending[0].key in self._not_placed else limit):
            return Verdict.GIVE_UP
        return Verdict.WAIT

    def tell(self, pending: Sequence[Actor], of: int) -> None:
        """Logs what the program waits for: these actors, of so many."""
        homeless, options = sum(not actor.is_placed() for actor in pending), pending[0].options
        logger.warning(
            "rayloader: waiting for %d of %d worker processes. %s",
            len(pending),
            of,
            f"Ray has found no room for {homeless} of them so far. {self.room(options)}"
            if homeless and _in_words(options) != NO_RESOURCES
            else "Ray is starting them, and they import torch",
        )

    def gave_up(self, pending: Sequence[Actor], of: int) -> None:
        """Notes that some actors found no place: the next ones with the same options need not wait as long."""
        self._not_placed.add(pending[0].key)
        logger.warning(
            "rayloader: %d of %d worker processes found no place in the Ray cluster within %g s; until there is room "
            "for them, their work is done by the other %d",
            len(pending),
            of,
            self.limit_with_others,
            of - len(pending),
        )

    def error(self, pending: Sequence[Actor], of: int) -> WorkerStartError:
        """The error for actors that do not start at their place, or have found none, whatever is free."""
        number, options = len(pending), pending[0].options
        if all(actor.placed_at is not None for actor in pending):
            return WorkerStartError(
                f"{number} of {of} DataLoader workers have a process in the Ray cluster that did not start within "
                f"{self.limit_once_placed:g} s: the machine is overloaded, or the process hangs, and Ray's log says "
                f"where. Remedies: lower num_workers; raise the environment variable {START_TIMEOUT_VARIABLE} (seconds)"
            )
        remedies = ["lower num_workers", "ask in ray_remote_args for what the nodes have"]
        if not ray.cluster_resources():
            remedies = ["call ray.shutdown(), after which iter() joins or starts another Ray"]
        elif options.get("num_cpus"):
            remedies[1:] = [
                "leave CPUs free for the workers (training may hold them all)",
                'ask for less with ray_remote_args={"num_cpus": 0}',
            ]
        return WorkerStartError(
            f"{number} of {of} DataLoader workers found no place in the Ray cluster within {self.limit:g} s. "
            f"{self.room(options)}. Remedies: {'; '.join(remedies)}; if nodes or "
            f"processes are still starting, raise the environment variable {START_TIMEOUT_VARIABLE} (seconds). If "
            "there is room for all, Ray's log says why a process did not start"
        )

    def room(self, options: dict[str, Any]) -> str:
        """What each actor asks for, and what is free, in words."""
        total, free = ray.cluster_resources(), ray.available_resources()
        # Placement groups repeat, under Ray's own names, the amounts that stand under the resources' names.
        names = [
            n for n in sorted(total) if not n.startswith(("node:", "object_store", "bundle_")) and "_group_" not in n
        ]
        free_now = ", ".join(f"{name} {free.get(name, 0.0):g} of {total[name]:g}" for name in names) or (
            "nothing: Ray has no live node, and its log says why"
        )
        return f"Each asks for {_in_words(options)}; free now: {free_now}"

    @property
    def limit(self) -> float:
        """How long an actor may wait for its place, in seconds."""
        text = os.environ.get(START_TIMEOUT_VARIABLE, "")
        if not text:
            return AUTOSCALING_START_TIMEOUT_S if self._autoscaling else START_TIMEOUT_S
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if not limit >= 0:
            raise ValueError(
                f"{START_TIMEOUT_VARIABLE} must be a number of seconds >= 0, got {text!r}; leave it out for the default"
            )
        return limit

    @property
    def limit_with_others(self) -> float:
        """How long running actors wait before they do its work meanwhile, in seconds."""
        return min(self.limit, OTHERS_PATIENCE_S)

    @property
    def limit_once_placed(self) -> float:
        """How long an actor with a place may take to start, in seconds."""
        return self.limit if os.environ.get(START_TIMEOUT_VARIABLE) else AUTOSCALING_START_TIMEOUT_S


class Draining:
    """The nodes that Ray drains in one session: they will leave, perhaps at a known time, and get nothing new.

    Ray is asked at most once in `INTERVAL_S`, in the janitor's thread, and only while actors run on other nodes than
    the driver's. Any thread may query this object.

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


def _in_words(options: dict[str, Any]) -> str:
    amounts = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    amounts.update(options.get("resources") or {})
    words = [f"{name} {amount:g}" for name, amount in amounts.items() if amount]
    places = {name: options.get(name) for name in ("accelerator_type", "label_selector", "scheduling_strategy")}
    words += [f"{name} {place}" for name, place in places.items() if place not in (None, "DEFAULT")]
    return ", ".join(words) or NO_RESOURCES
