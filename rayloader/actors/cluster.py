"""What Ray says of the cluster: its nodes, the demand that finds no room there, and the nodes that are on their way.

Promise: nobody waits for Ray's GCS, which may be away for a minute, except where processes are about to be created,
which need it anyway. It is asked in a thread of its own, for a limited time, and at most once in `INTERVAL_S`.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rayloader.actors import session
from rayloader.actors._compat_ray import cluster_status
from rayloader.workers.janitor import Janitor

# How long an answer is good for, in seconds.
INTERVAL_S = 1.0
# How long each of the two parts of an answer may take, in seconds. A GCS that lives answers in milliseconds.
ASK_LIMIT_S = 5.0
# Version 1 of the autoscaler reports every 5 s. A report that is older than this, in seconds, is of one that has ended.
REPORT_LIMIT_S = 60.0
# How version 1 names the nodes of a cluster that it only watches: there is no autoscaler then.
_WATCHED = "node_"
_DEAD = 2  # `NodeStatus` in Ray's autoscaler.proto
_IN = 1  # `LabelSelectorOperator` in Ray's common.proto


@dataclass(frozen=True, slots=True)
class Node:
    """One that lives.

    Attributes:
        node_id: Ray's.
        ip: its address.
        total: what it has, by the names of resources.
        free: what of that is free.
        labels: Ray's, and those that it was started with.
    """

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Want:
    """What is to have room on one node.

    Attributes:
        amounts: what it asks for, by the names of resources.
        labels: alternatives, each a list of what the node's labels must be: key, values, and whether the node's is to
            be one of them. None: any node will do.
        node_id: of the only node that will do, if there is one.
    """

    amounts: Mapping[str, float]
    labels: Sequence[Sequence[tuple[str, frozenset[str], bool]]] = ()
    node_id: str | None = None

    def may_be_on(self, node: Node) -> bool:
        """Whether a node would do, if it had room."""
        if self.node_id is not None:
            return node.node_id == self.node_id
        return not self.labels or any(
            all((node.labels.get(key) in values) is wanted for key, values, wanted in alternative)
            for alternative in self.labels
        )


@dataclass(frozen=True, slots=True)
class Waiting:
    """So many times, all of this together waits for room: a task, an actor, or the bundles of a placement group."""

    wants: tuple[Want, ...]
    times: int = 1

    def __str__(self) -> str:
        return " and ".join(
            ", ".join(f"{name} {amount:g}" for name, amount in sorted(want.amounts.items())) for want in self.wants
        )


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment.

    Attributes:
        nodes: that live.
        demand: what tasks and actors ask for that have no place: the resources of one of them, and of how many. Ray
            leaves out those that have to be on a certain node. None: it is not known.
        waiting: the same, with what their nodes' labels must be, and placement groups.
        coming: how many nodes an autoscaler is starting.
        at: when Ray was asked, time.monotonic().
    """

    nodes: tuple[Node, ...]
    demand: tuple[tuple[Mapping[str, float], int], ...] | None = None
    waiting: tuple[Waiting, ...] = ()
    coming: int = 0
    at: float = field(default_factory=time.monotonic)


class Cluster:
    """The cluster of one Ray session. Any thread may call.

    Args:
        alive: whether the session still lives.
        heard: called when the thread has an answer for `look`.

    Attributes:
        status: what was heard last; None if there was no answer.
    """

    def __init__(self, alive: Callable[[], bool], heard: Callable[[], object] = lambda: None) -> None:
        self._alive = alive
        self._heard = heard
        self._due = -math.inf  # time.monotonic(): when to ask next; infinite while somebody asks
        self.status: ClusterStatus | None = None

    def look(self) -> ClusterStatus | None:
        """What was heard last. Lets the thread ask again if that is old; does not wait for it."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            asks.start()
            asks.later(self.ask)
            asks.later(self._heard)
        return self.status

    def ask(self) -> ClusterStatus | None:
        """Asks now, and waits for the answer."""
        try:
            self.status = _read() if self._alive() else None
        except Exception:  # Ray's errors have no common type; it reports the problem itself, and is asked again
            self.status = None
        finally:
            self._due = time.monotonic() + INTERVAL_S
        return self.status


def _read() -> ClusterStatus:
    now = time.monotonic()
    known = cluster_status(ray, ASK_LIMIT_S)
    if known is None:  # by Ray's public functions
        living = [node for node in ray.nodes() if node["Alive"]]
        nodes = [(n["NodeID"], n["NodeManagerAddress"], n["Resources"], n["Resources"], n["Labels"]) for n in living]
        return ClusterStatus(tuple(Node(*node) for node in nodes), at=now)
    reply, report = known
    state = reply.cluster_resource_state
    states = [node for node in state.node_states if node.status != _DEAD]
    return ClusterStatus(
        tuple(_node(state) for state in states),
        tuple((dict(one.request.resources_bundle), int(one.count)) for one in state.pending_resource_requests),
        tuple(_waiting(state)),
        _coming(reply.autoscaling_state, report),
        now,
    )


def _node(state: Any) -> Node:
    """A node by Ray's `NodeState`."""
    total, free = dict(state.total_resources), dict(state.available_resources)
    return Node(state.node_id.hex(), state.node_ip_address, total, free, dict(state.labels))


def _waiting(state: Any) -> Iterator[Waiting]:
    for one in state.pending_resource_requests:
        yield Waiting((_want(one.request),), int(one.count))
    for group in state.pending_gang_resource_requests:
        wants = [_want(request) for request in group.requests]
        if any(place.HasField("affinity") for request in group.requests for place in request.placement_constraints):
            together: Counter[str] = Counter()  # on one node
            for want in wants:
                together.update(want.amounts)
            wants = [Want(dict(together))]
        if wants:
            yield Waiting(tuple(wants))


def _want(request: Any) -> Want:
    """By Ray's `ResourceRequest`."""
    labels = [
        [
            (label.label_key, frozenset(label.label_values), label.operator == _IN)
            for label in selector.label_constraints
        ]
        for selector in request.label_selectors
    ]
    return Want(dict(request.resources_bundle), labels)


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


# The thread that asks. Ray is not shut down meanwhile.
asks = Janitor(name="rayloader-asks")
asks.between_jobs = session.no_shutdown_while_asked
os.register_at_fork(after_in_child=asks.forget)
