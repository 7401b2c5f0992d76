"""What Ray says of the cluster: its nodes, what finds no room there, the nodes that are on their way; and in words.

Promise: nobody waits for Ray's GCS, which may be away for a minute, except where processes are about to be created,
which need it anyway. It is asked in a thread of its own, for a limited time, and at most once in `INTERVAL_S`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rayloader.actors import session
from rayloader.actors._compat_ray import cluster_status

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
_ROUNDING = 1e-4  # in which Ray counts
_GIB = 1 << 30


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

    def lacks(self, has: Mapping[str, float]) -> list[str]:
        """The resources of which less is there than wanted."""
        return [name for name, amount in self.amounts.items() if has.get(name, 0.0) < amount - _ROUNDING]

    def is_reported_as(self, amounts: Mapping[str, float]) -> bool:
        """Whether Ray's account of a demand may be that of this."""
        others = {name: amount for name, amount in amounts.items() if not name.startswith("bundle_group_")}
        return others.keys() == self.amounts.keys() and all(
            math.isclose(others[name], self.amounts[name], abs_tol=_ROUNDING) for name in others
        )

    def __str__(self) -> str:
        words = [f"{name} {_number(name, amount)}" for name, amount in sorted(self.amounts.items())]
        for alternative in self.labels:
            words += [f"{key} {'of' if wanted else 'not of'} {', '.join(sorted(v))}" for key, v, wanted in alternative]
        words += [] if self.node_id is None else [f"node {self.node_id}"]
        return ", ".join(words) or "no resources"


def wanted(options: Mapping[str, Any]) -> Want:
    """What an actor with these options asks for; Ray itself refuses a selector that is none."""
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
    selector = options.get("label_selector")
    labels = [_label(key, text or "") for key, text in selector.items()] if isinstance(selector, dict) else []
    node_id = None if getattr(strategy, "soft", False) else getattr(strategy, "node_id", None)
    return Want(amounts, [labels] if labels else (), node_id)


def _label(key: str, text: str) -> tuple[str, frozenset[str], bool]:
    """A condition of Ray's `label_selector`, as `Want` has it."""
    value = text.removeprefix("!")
    values = value[3:-1].split(",") if value.startswith("in(") else [value]
    return key, frozenset(one.strip() for one in values), value == text


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment.

    Attributes:
        nodes: that live.
        waiting: what tasks and actors ask for that have no place: one of them, and of how many. Ray leaves out those
            that have to be on a certain node.
        bundles: of placement groups that have no place.
        coming: how many nodes an autoscaler is starting.
        at: when Ray was asked, time.monotonic().
    """

    nodes: tuple[Node, ...]
    waiting: tuple[tuple[Want, int], ...] = ()
    bundles: tuple[Want, ...] = ()
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

    def __init__(self, alive: Callable[[], bool], heard: Callable[[], object]) -> None:
        self._alive = alive
        self._heard = heard
        self._due = -math.inf  # time.monotonic(): when to ask next; infinite while somebody asks
        self.status: ClusterStatus | None = None

    def look(self) -> ClusterStatus | None:
        """What was heard last. Lets the thread ask again if that is old; does not wait for it."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            session.asks.start()
            session.asks.later(self.ask)
            session.asks.later(self._heard)
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
    reply, report = cluster_status(ray, ASK_LIMIT_S)
    state = reply.cluster_resource_state
    return ClusterStatus(
        tuple(_node(node) for node in state.node_states if node.status != _DEAD),
        tuple((_want(one.request), int(one.count)) for one in state.pending_resource_requests),
        tuple(_want(bundle) for group in state.pending_gang_resource_requests for bundle in group.requests),
        _coming(reply.autoscaling_state, report),
        now,
    )


def _node(state: Any) -> Node:
    """A node by Ray's `NodeState`."""
    total, free = dict(state.total_resources), dict(state.available_resources)
    return Node(state.node_id.hex(), state.node_ip_address, total, free, dict(state.labels))


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


# ---- in words


def in_words(status: ClusterStatus | None, options: Mapping[str, Any]) -> str:
    """What each actor with these options asks for, and what keeps it from each node."""
    want = wanted(options)
    asked = f"each asks for {want}"
    if status is None:
        return f"{asked}; Ray's GCS does not answer: ray.shutdown() lets iter() start or join another Ray"
    lacking: defaultdict[str, list[str]] = defaultdict(list)
    for node in status.nodes:
        lacking[_shortage(node, want)].append(f"node {node.ip}")
    said = [f"{ips[0] if len(ips) == 1 else f'each of {len(ips)} nodes'} {text}" for text, ips in lacking.items()]
    coming = [f"an autoscaler is starting {status.coming} more"] if status.coming else []
    return f"{asked}; {', '.join([*(said or ['Ray has no live node']), *coming])}"


def _shortage(node: Node, want: Want) -> str:
    if not want.may_be_on(node):
        return "is another" if want.node_id is not None else "has other labels"
    if never := want.lacks(node.total):
        return "has " + " and ".join(f"{name} {_number(name, node.total.get(name, 0.0))} in all" for name in never)
    if busy := want.lacks(node.free):
        free = {name: _number(name, node.free.get(name, 0.0)) for name in busy}
        return "has " + " and ".join(f"{name} {free[name]} free of {_number(name, node.total[name])}" for name in busy)
    return "has room, if the scheduling_strategy allows it"


def _number(name: str, amount: float) -> str:
    return f"{amount / _GIB:.3g} GiB" if name.partition("_group_")[0] == "memory" else f"{amount:g}"
