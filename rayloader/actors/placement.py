"""Where actors run: what they ask Ray for, how long they wait for it, and which idle ones are in the way of others.

Promise: actors ask for what the user's options name, and otherwise for one CPU each in a Ray that was joined, for none
in one that was started here. They wait for that with one limit, longer where something still happens: processes or
nodes start, or Ray is to answer. Idle actors end where what they hold makes room for something else in the cluster that
waits. Ray reports tasks, actors and placement groups that wait, except for those that have to be on a certain node; of
these only this process's own actors are known.

Any thread may call. Nobody waits for Ray's GCS, which may be away for a minute, except where processes are about to be
created, which need it anyway: a thread of its own asks it, for a limited time, and at most once in `INTERVAL_S`.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rayloader.actors import session
from rayloader.actors._compat_ray import cluster_status, node_first
from rayloader.actors.actor import Actor
from rayloader.errors import WorkerStartError

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
# How many seconds before it answers Ray may have collected what is free, and what waits. So long after some idle actors
# have ended nobody knows whether more must.
STALE_S = 1.5
# Version 1 of the autoscaler reports every 5 s. A report that is older than this, in seconds, is of one that has ended.
REPORT_LIMIT_S = 60.0
# How version 1 names the nodes of a cluster that it only watches: there is no autoscaler then.
_WATCHED = "node_"
_DEAD = 2  # `NodeStatus` in Ray's autoscaler.proto
_IN = 1  # `LabelSelectorOperator` in Ray's common.proto
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
        labels: Ray's, and those that it was started with.
    """

    node_id: str
    ip: str
    total: Amounts
    free: Amounts
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Want:
    """What is to have room on one node.

    Attributes:
        amounts: what it asks for.
        labels: alternatives, each a list of what the node's labels must be: key, values, and whether the node's is to
            be one of them. If there are none, any node will do.
        node_id: of the only node that will do, if there is one.
    """

    amounts: Amounts
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

    def lacks(self, has: Amounts) -> list[str]:
        """The resources of which less is there than wanted."""
        return [name for name, amount in self.amounts.items() if has.get(name, 0.0) < amount - _ROUNDING]

    def is_reported_as(self, amounts: Amounts) -> bool:
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


class Placement:
    """The placement of the actors of one pool.

    Args:
        alive: whether the Ray session of the actors still lives.
        heard: called when the thread that asks Ray has an answer.

    Attributes:
        status: of the cluster, as Ray has told last; None if it has not.
    """

    status: ClusterStatus | None = None

    def __init__(self, alive: Callable[[], bool], heard: Callable[[], object]) -> None:
        self._alive = alive
        self._heard = heard
        self._due = -math.inf  # time.monotonic(): when to ask next; infinite while somebody asks
        self._nodes_came_at = -math.inf  # time.monotonic() when nodes were on their way last
        self._looked_at = 0.0  # `ClusterStatus.at`: until then, what waits was looked at

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
        most = max(0.0, sum(_most(node.free, want.amounts) for node in nodes) - starting)
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
        status, now = self._look(), time.monotonic()
        if status is not None and status.coming:
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
        want, status = wanted(pending[0].options), self.status
        if not want.amounts and not want.labels:
            return 0
        if status is None or status.at < max(actor.created_at for actor in pending) + REPORTED_S:
            return None
        told = sum(count for one, count in status.waiting if want.is_reported_as(one.amounts))
        unknown = [actor for actor in pending if actor.had_room is None]
        return min(len(unknown), told) + sum(actor.had_room is False for actor in pending)

    def in_the_way(self, idle: Sequence[Actor], pending: Sequence[Actor]) -> list[Actor]:
        """Which of some idle actors must end, and tells the log why; none if Ray has said nothing new.

        Args:
            idle: actors of this process that run and hold something.
            pending: those that are to work, and do not run yet.
        """
        status = self._look()
        if status is None or status.at <= self._looked_at:
            return []
        own = [(wanted(actor.options), 1) for actor in pending if actor.had_room is False]
        found = in_the_way(idle, status.nodes, [*own, *status.waiting, *((bundle, 1) for bundle in status.bundles)])
        self._looked_at = status.at + (STALE_S if found else 0.0)
        for what, number in Counter(str(want) for want in found.values()).items():
            logger.info(
                "rayloader: %d idle worker processes end, because they hold what is waited for in the Ray cluster, "
                "by this program or another one: %s",
                number,
                what,
            )
        return list(found)

    def _look(self) -> ClusterStatus | None:
        """What Ray has told last. Lets the thread ask again if that is old; does not wait for it."""
        if time.monotonic() >= self._due:
            self._due = math.inf
            session.asks.start()
            session.asks.later(self._ask)
            session.asks.later(self._heard)
        return self.status

    def _ask(self) -> None:
        """Asks Ray, and waits for the answer."""
        try:
            self.status = _read() if self._alive() else None
        except Exception:  # Ray's errors have no common type; it reports the problem itself, and is asked again
            self.status = None
        finally:
            self._due = time.monotonic() + INTERVAL_S


# ---- what actors ask for


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


def _most(has: Amounts, amounts: Amounts) -> float:
    """How often there is room for this in what a node has."""
    return min(
        (math.floor(has.get(name, 0.0) / amount + _ROUNDING) for name, amount in amounts.items()), default=math.inf
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


# ---- which idle actors end


def in_the_way(idle: Sequence[Actor], nodes: Sequence[Node], waiting: Sequence[tuple[Want, int]]) -> dict[Actor, Want]:
    """The actors that must end so that what waits has room, each with what needs it.

    An actor is none of them if what waits has room without its end, or has none in spite of it.

    Args:
        idle: the actors, which run.
        nodes: of the cluster.
        waiting: what waits, and how many times.
    """
    free = {node.node_id: Counter(node.free) for node in nodes}
    held = {actor: wanted(actor.options).amounts for actor in idle}
    ending: dict[Actor, Want] = {}
    for want, times in waiting:
        fitting = [node.node_id for node in nodes if want.may_be_on(node)]
        for _ in range(times if held else 0):
            found = [(_leaving(want, node_id, free[node_id], held), node_id) for node_id in fitting]
            room = [(leaving, node_id) for leaving, node_id in found if leaving is not None]
            if not room:
                break  # nor would there be room for another one of these
            leaving, node_id = min(room, key=lambda one: len(one[0]))
            for actor in leaving:
                free[node_id].update(held.pop(actor))
                ending[actor] = want
            free[node_id].subtract(want.amounts)
    return ending


def _leaving(want: Want, node_id: str, free: Amounts, held: Mapping[Actor, Amounts]) -> list[Actor] | None:
    """The idle actors whose end makes room on a node; None if there is none in spite of it."""
    room, leaving = Counter(free), list[Actor]()
    for actor, holds in held.items():
        if actor.address and actor.address.node_id == node_id and any(name in holds for name in want.lacks(room)):
            leaving.append(actor)
            room.update(holds)
    return None if want.lacks(room) else leaving


# ---- what Ray says of the cluster


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
        [(one.label_key, frozenset(one.label_values), one.operator == _IN) for one in selector.label_constraints]
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


def _in_words(status: ClusterStatus | None, options: Mapping[str, Any]) -> str:
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
