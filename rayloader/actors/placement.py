"""Where actors run: what they ask Ray for, how long they wait for it, and what is said of those that find no room.

Promise: actors ask for what the user's options name, and otherwise for one CPU each in a Ray that was joined, for none
in one that was started here. They wait for that with one limit, longer where something still happens: processes or
nodes start, or Ray is to answer. Any thread may call. Nobody waits for Ray's GCS, which may be away for a minute,
except where processes are about to be created, which need it anyway: the janitor's thread asks it, for a limited time,
and at most once in `INTERVAL_S`. Ray reports actors that wait, except for those that have to be on a certain node.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rayloader.actors import session
from rayloader.actors._compat_ray import cluster_status, node_first
from rayloader.actors.actor import Actor
from rayloader.errors import WorkerStartError
from rayloader.workers.janitor import janitor

logger = logging.getLogger("rayloader")

# How long an actor may wait for its place where nothing happens.
START_TIMEOUT_S = 60.0
# How long where it has its place, and Ray starts its process, where an autoscaler starts nodes, and where Ray has not
# said yet whether there is room. These take minutes.
LONG_START_TIMEOUT_S = 600.0
START_TIMEOUT_VARIABLE = "RAYLOADER_START_TIMEOUT"
# When Ray is asked this long after an actor was created, the answer tells whether it has a place. A node reports ten
# times a second what it has no room for, but may be busy.
REPORTED_S = 3.0
# How long an answer is good for, in seconds.
INTERVAL_S = 1.0
# How long each of the two parts of an answer may take, in seconds. A GCS that lives answers in milliseconds.
ASK_LIMIT_S = 5.0
# Version 1 of the autoscaler reports every 5 s. A report that is older than this, in seconds, is of one that has ended.
REPORT_LIMIT_S = 60.0
# How version 1 names the nodes of a cluster that it only watches: there is no autoscaler then.
_WATCHED = "node_"
_DEAD = 2  # `NodeStatus` in Ray's autoscaler.proto
_ROUNDING = 1e-4  # in which Ray counts
_GIB = 1 << 30

Amounts = Mapping[str, float]  # by the names of resources


@dataclass(frozen=True, slots=True)
class Node:
    """One that lives.

    Attributes:
        node_id: Ray's.
        ip: its address.
        total: what it has.
        free: what of that is free.
    """

    node_id: str
    ip: str
    total: Amounts
    free: Amounts


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment.

    Attributes:
        nodes: that live.
        waiting: what tasks and actors ask for that have no place: one of them, and of how many. Ray leaves out those
            that have to be on a certain node.
        coming: how many nodes an autoscaler is starting.
        at: when Ray was asked, time.monotonic().
    """

    nodes: tuple[Node, ...]
    waiting: tuple[tuple[Amounts, int], ...] = ()
    coming: int = 0
    at: float = field(default_factory=time.monotonic)


class Placement:
    """The placement of the actors of one pool.

    Args:
        alive: whether the Ray session of the actors still lives.

    Attributes:
        status: of the cluster, as Ray has told last; None if it has not.
    """

    status: ClusterStatus | None = None

    def __init__(self, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._due = -math.inf  # time.monotonic(): when to ask next; infinite while somebody asks
        self._nodes_came_at = -math.inf  # time.monotonic() when nodes were on their way last

    def options(self, remote_args: dict[str, Any]) -> dict[str, Any]:
        """Each actor's options, except for `where`: those of the user, and one CPU if they name no number.

        Asks Ray what there is, for all that follows.
        """
        self._ask()
        nodes = [] if self.status is None else self.status.nodes
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
        want, status, strategy = wanted(options), self.status, options.get("scheduling_strategy")
        node_id = session.node_id() if strategy is None else getattr(strategy, "node_id", "")
        nodes = [] if status is None else [node for node in status.nodes if node.node_id == node_id]
        most = max(0.0, sum(_most(node.free, want) for node in nodes) - starting)
        if strategy is not None:
            return [({}, number < most if node_id else None) for number in range(count)]
        near = 0 if options.get("label_selector") or not want else int(min(most, count))
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
        now = time.monotonic()
        if now >= self._due:
            self._due = math.inf
            janitor.later(self._ask)
        if self.status is not None and self.status.coming:
            self._nodes_came_at = now
        things_happen = not self.lacking(pending) or now - self._nodes_came_at <= START_TIMEOUT_S
        limit = LONG_START_TIMEOUT_S if things_happen else START_TIMEOUT_S
        if text := os.environ.get(START_TIMEOUT_VARIABLE):
            limit = _seconds(text)
        if waited >= limit:
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
            known.append(f"Ray has {said}: {_in_words(self.status, pending[0].options)}")
        if lacking is not None and (starting := len(pending) - lacking):
            known.append(f"{starting} of them have their place: Ray is starting these processes, and they import torch")
        return ". ".join(known)

    def lacking(self, pending: Sequence[Actor]) -> int | None:
        """How many of these actors, which have not started, have no place; None if Ray has not said it yet."""
        options, status = pending[0].options, self.status
        want = wanted(options)
        if not want and not options.get("label_selector"):
            return 0
        if status is None or status.at < max(actor.created_at for actor in pending) + REPORTED_S:
            return None
        told = sum(count for amounts, count in status.waiting if _is_reported_as(want, amounts))
        unknown = [actor for actor in pending if actor.had_room is None]
        return min(len(unknown), told) + sum(actor.had_room is False for actor in pending)

    def _ask(self) -> None:
        """Asks Ray, and waits for the answer."""
        try:
            self.status = _read() if self._alive() else None
        except Exception:  # Ray's errors have no common type; it reports the problem itself, and is asked again
            self.status = None
        finally:
            self._due = time.monotonic() + INTERVAL_S


# ---- what actors ask for


def wanted(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor with these options asks for."""
    needs = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    needs |= options.get("resources") or {}
    if options.get("accelerator_type"):
        needs[f"accelerator_type:{options['accelerator_type']}"] = 0.001
    amounts = {name: float(amount) for name, amount in needs.items() if amount}
    strategy: Any = options.get("scheduling_strategy")
    if (group := getattr(strategy, "placement_group", None)) is not None:
        index = strategy.placement_group_bundle_index
        ends = ["", *([f"{index}_"] if index >= 0 else [])]
        amounts = {f"{name}_group_{end}{group.id.hex()}": amount for name, amount in amounts.items() for end in ends}
    return amounts


def _most(has: Amounts, want: Amounts) -> float:
    """How often there is room for this in what a node has."""
    return min((math.floor(has.get(name, 0.0) / amount + _ROUNDING) for name, amount in want.items()), default=math.inf)


def _lacks(has: Amounts, want: Amounts) -> list[str]:
    """The resources of which less is there than wanted."""
    return [name for name, amount in want.items() if has.get(name, 0.0) < amount - _ROUNDING]


def _is_reported_as(want: Amounts, amounts: Amounts) -> bool:
    """Whether Ray's account of a demand may be that of this."""
    others = {name: amount for name, amount in amounts.items() if not name.startswith("bundle_group_")}
    return others.keys() == want.keys() and all(
        math.isclose(others[name], want[name], abs_tol=_ROUNDING) for name in others
    )


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


# ---- what Ray says of the cluster


def _read() -> ClusterStatus:
    now = time.monotonic()
    reply, report = cluster_status(ray, ASK_LIMIT_S)
    state = reply.cluster_resource_state
    return ClusterStatus(
        tuple(_node(node) for node in state.node_states if node.status != _DEAD),
        tuple((dict(one.request.resources_bundle), int(one.count)) for one in state.pending_resource_requests),
        _coming(reply.autoscaling_state, report),
        now,
    )


def _node(state: Any) -> Node:
    """A node by Ray's `NodeState`."""
    total, free = dict(state.total_resources), dict(state.available_resources)
    return Node(state.node_id.hex(), state.node_ip_address, total, free)


def _coming(state: Any, report: Mapping[str, Any]) -> int:
    """How many nodes an autoscaler is starting.

    Without a configuration, its process only watches the nodes that join, and calls that autoscaling too. So it counts
    only what it starts.

    Args:
        state: the `AutoscalingState` of version 2.
        report: that of version 1.
    """
    starting = sum(one.count for one in state.pending_instance_requests) + len(state.pending_instances)
    if time.time() - report.get("time", 0.0) < REPORT_LIMIT_S:
        summary = report.get("autoscaler_report") or {}
        launches: dict[str, int] = summary.get("pending_launches", {})
        types = [node_type for _, node_type, _ in summary.get("pending_nodes", ())]
        starting += sum(launches.values()) + sum(not node_type.startswith(_WATCHED) for node_type in types)
    return int(starting)


# ---- in words


def _in_words(status: ClusterStatus | None, options: Mapping[str, Any]) -> str:
    """What each actor with these options asks for, and what keeps it from each node."""
    want = wanted(options)
    words = [f"{name} {_number(name, amount)}" for name, amount in sorted(want.items())]
    words += [f"label_selector {options['label_selector']}"] if options.get("label_selector") else []
    if node_id := getattr(options.get("scheduling_strategy"), "node_id", None):
        words.append(f"node {node_id}")
    asked = f"each asks for {', '.join(words)}"
    if status is None:
        return f"{asked}; Ray's GCS does not answer: ray.shutdown() lets iter() start or join another Ray"
    lacking: defaultdict[str, list[str]] = defaultdict(list)
    for node in status.nodes:
        lacking[_shortage(node, want)].append(f"node {node.ip}")
    said = [f"{ips[0] if len(ips) == 1 else f'each of {len(ips)} nodes'} {text}" for text, ips in lacking.items()]
    coming = [f"an autoscaler is starting {status.coming} more"] if status.coming else []
    return f"{asked}; {', '.join([*(said or ['Ray has no live node']), *coming])}"


def _shortage(node: Node, want: Amounts) -> str:
    if never := _lacks(node.total, want):
        return "has " + " and ".join(f"{name} {_number(name, node.total.get(name, 0.0))} in all" for name in never)
    if busy := _lacks(node.free, want):
        free = {name: _number(name, node.free.get(name, 0.0)) for name in busy}
        return "has " + " and ".join(f"{name} {free[name]} free of {_number(name, node.total[name])}" for name in busy)
    return "has room, if the scheduling_strategy or label_selector allows it"


def _number(name: str, amount: float) -> str:
    return f"{amount / _GIB:.3g} GiB" if name.partition("_group_")[0] == "memory" else f"{amount:g}"
