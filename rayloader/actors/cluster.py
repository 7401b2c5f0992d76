"""What Ray says of the cluster: its nodes, and the demand that finds no room there; and what an actor asks for.

Promise: nobody waits for Ray's GCS, which may be away for a minute, except where processes are about to be created,
which need it anyway. It is asked in a thread of its own, for a limited time, and at most once in `INTERVAL_S`.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
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
_DEAD = 2  # `NodeStatus` in Ray's autoscaler.proto


@dataclass(frozen=True, slots=True)
class Node:
    """One that lives.

    Attributes:
        node_id: Ray's.
        total: what it has, by the names of resources.
        free: what of that is free.
    """

    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster at one moment.

    Attributes:
        nodes: that live.
        demand: what tasks and actors ask for that have no place: the resources of one of them, and of how many. Ray
            leaves out those that have to be on a certain node. None: it is not known.
        at: when Ray was asked, time.monotonic().
    """

    nodes: tuple[Node, ...]
    demand: tuple[tuple[Mapping[str, float], int], ...] | None = None
    at: float = field(default_factory=time.monotonic)


class Cluster:
    """The cluster of one Ray session. Any thread may call.

    Args:
        alive: whether the session still lives.

    Attributes:
        status: what was heard last; None if there was no answer.
    """

    def __init__(self, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._due = -math.inf  # time.monotonic(): when to ask next; infinite while somebody asks
        self.status: ClusterStatus | None = None

    def look(self) -> ClusterStatus | None:
        """What was heard last. Lets the thread ask again if that is old; does not wait for it."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            asks.start()
            asks.later(self.ask)
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
    reply = cluster_status(ray, ASK_LIMIT_S)
    if reply is None:  # by Ray's public functions
        living = [node for node in ray.nodes() if node["Alive"]]
        return ClusterStatus(tuple(Node(n["NodeID"], n["Resources"], n["Resources"]) for n in living), at=now)
    state = reply.cluster_resource_state
    nodes = [
        Node(node.node_id.hex(), dict(node.total_resources), dict(node.available_resources))
        for node in state.node_states
        if node.status != _DEAD
    ]
    demand = [(dict(one.request.resources_bundle), int(one.count)) for one in state.pending_resource_requests]
    return ClusterStatus(tuple(nodes), tuple(demand), now)


# ---- what an actor asks for


def demand(options: Mapping[str, Any]) -> dict[str, float]:
    """What an actor with these options asks for, by the names that Ray gives to resources on nodes."""
    needs = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    needs |= options.get("resources") or {}
    if options.get("accelerator_type"):
        needs[f"accelerator_type:{options['accelerator_type']}"] = 0.001
    amounts = {name: float(amount) for name, amount in needs.items() if amount}
    group = getattr(options.get("scheduling_strategy"), "placement_group", None)
    if group is None:
        return amounts
    index = options["scheduling_strategy"].placement_group_bundle_index
    ends = ["", *([f"{index}_"] if index >= 0 else [])]
    return {f"{name}_group_{end}{group.id.hex()}": amount for name, amount in amounts.items() for end in ends}


def is_like(one: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    """Whether Ray's account of a demand is that of actors that need this."""
    amounts = {name: amount for name, amount in one.items() if not name.startswith("bundle_group_")}
    return amounts.keys() == needs.keys() and all(
        math.isclose(amounts[name], needs[name], abs_tol=1e-4) for name in needs
    )


def most(has: Mapping[str, float], needs: Mapping[str, float]) -> float:
    """For how many actors there is room in what a node has."""
    return min((math.floor(has.get(name, 0.0) / amount + 1e-4) for name, amount in needs.items()), default=math.inf)


def in_words(status: ClusterStatus | None, options: Mapping[str, Any]) -> str:
    """What each actor with these options asks for, and what the nodes have of that."""
    needs = demand(options)
    chosen = {name: options.get(name) for name in ("label_selector", "scheduling_strategy")}
    asked = [f"{name} {_number(name, amount)}" for name, amount in needs.items()]
    asked += [  # Ray's own texts of strategies are addresses in memory
        f"{name} {value if isinstance(value, (str, dict)) else type(value).__name__}"
        for name, value in chosen.items()
        if value not in (None, "DEFAULT")
    ]
    said = f"each asks for {', '.join(asked) or 'no resources'}"
    if status is None:
        return f"{said}; Ray's GCS does not answer"
    rooms = Counter(", ".join(_room(node, name) for name in needs) or "room" for node in status.nodes)
    nodes = (f"{count} node{'s have' if count > 1 else ' has'} {text}" for text, count in rooms.items())
    return "; ".join([said, *nodes])


def _room(node: Node, name: str) -> str:
    free, total = (_number(name, has.get(name, 0.0)) for has in (node.free, node.total))
    return f"{name} {free} free of {total}"


def _number(name: str, amount: float) -> str:
    return f"{amount / (1 << 30):.3g} GiB" if name.startswith("memory") else f"{amount:g}"


# The thread that asks. Ray is not shut down meanwhile.
asks = Janitor(name="rayloader-asks")
asks.between_jobs = session.no_shutdown_while_asked
os.register_at_fork(after_in_child=asks.forget)
