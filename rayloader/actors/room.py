"""What an actor asks for, and what of that the nodes of a cluster have: in Ray's names, and in words.

Promise: pure functions of the actor's options and of what Ray has said of the cluster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rayloader.actors.cluster import ClusterStatus, Node

_GIB = 1 << 30


def in_words(status: ClusterStatus | None, options: Mapping[str, Any]) -> str:
    """What each actor with these options asks for, and what keeps it from each node."""
    asked = f"each asks for {_asked(options)}"
    if status is None:
        return f"{asked}; Ray's GCS does not answer"
    if not status.nodes:
        return f"{asked}; Ray has no live node, and its log says why"
    nodes = [f"{_whose(nodes)} {text}" for text, nodes in _shortages(status, options).items()]
    coming = [f"an autoscaler is starting {status.coming} more"] if status.coming else []
    return f"{asked}; {', '.join([*nodes, *coming])}"


def remedies(status: ClusterStatus | None, options: Mapping[str, Any]) -> list[str]:
    """What may help actors with these options."""
    if status is None or not status.nodes:
        return ["call ray.shutdown(), after which iter() joins or starts another Ray"]
    needs, found = demand(options), []
    enough = [node for node in status.nodes if not _short(node.total, needs)]
    if not enough:
        found.append("ask in ray_remote_args for no more than a node has")
    elif busy := {_plain(name) for node in enough for name in _short(node.free, needs)}:
        found.append(f"lower num_workers, or end what holds {', '.join(sorted(busy))}")
    if options.get("label_selector") or options.get("scheduling_strategy"):
        found.append("name other nodes in ray_remote_args")
    if options.get("num_cpus"):
        found.append('have the workers share CPUs with ray_remote_args={"num_cpus": 0}')
    return found or ["lower num_workers"]


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


def _plain(name: str) -> str:
    """A resource's name without that of a placement group."""
    return name.partition("_group_")[0]


def is_like(one: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    """Whether Ray's account of a demand is that of actors that need this."""
    amounts = {name: amount for name, amount in one.items() if not name.startswith("bundle_group_")}
    return amounts.keys() == needs.keys() and all(
        math.isclose(amounts[name], needs[name], abs_tol=1e-4) for name in needs
    )


def _short(has: Mapping[str, float], needs: Mapping[str, float]) -> list[str]:
    """The resources of which a node has less than an actor needs."""
    return [name for name, amount in needs.items() if has.get(name, 0.0) < amount - 1e-4]


def most(has: Mapping[str, float], needs: Mapping[str, float]) -> float:
    """For how many actors there is room in what a node has."""
    return min((math.floor(has.get(name, 0.0) / amount + 1e-4) for name, amount in needs.items()), default=math.inf)


def _shortages(status: ClusterStatus, options: Mapping[str, Any]) -> dict[str, list[Node]]:
    """The nodes, by what keeps actors with these options from them, in words."""
    nodes: defaultdict[str, list[Node]] = defaultdict(list)
    for node in status.nodes:
        nodes[_shortage(node, options)].append(node)
    return {
        text.format(**({"has": "has", "is": "is"} if len(those) == 1 else {"has": "have", "is": "are"})): those
        for text, those in nodes.items()
    }


def _shortage(node: Node, options: Mapping[str, Any]) -> str:
    needs, strategy = demand(options), options.get("scheduling_strategy")
    if getattr(strategy, "node_id", node.node_id) != node.node_id and not getattr(strategy, "soft", False):
        return "{is} another"
    if not _matches(node.labels, options.get("label_selector") or {}):
        return "{has} other labels"
    if never := _short(node.total, needs):
        return "{has} " + " and ".join(f"{_amount(name, node.total.get(name, 0.0))} in all" for name in never)
    if busy := _short(node.free, needs):
        return "{has} " + " and ".join(
            f"{_amount(name, node.free.get(name, 0.0))} free of {_number(name, node.total[name])}" for name in busy
        )
    return "{has} room, if the scheduling_strategy allows it" if strategy not in (None, "DEFAULT") else "{has} room now"


def _matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with these labels is one that Ray's `label_selector` selects."""
    for key, text in selector.items():
        wanted = text.removeprefix("!")
        values = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
        if (labels.get(key) in [value.strip() for value in values]) == text.startswith("!"):
            return False
    return True


def _whose(nodes: list[Node]) -> str:
    return f"node {nodes[0].ip}" if len(nodes) == 1 else f"{len(nodes)} nodes"


def _amount(name: str, amount: float) -> str:
    return f"{_plain(name)} {_number(name, amount)}{' in the placement group' if _plain(name) != name else ''}"


def _number(name: str, amount: float) -> str:
    return f"{amount / _GIB:.3g} GiB" if _plain(name) == "memory" else f"{amount:g}"


def _asked(options: Mapping[str, Any]) -> str:
    """What an actor with these options asks for."""
    words = []
    for name, amount in demand({**options, "scheduling_strategy": None, "accelerator_type": None}).items():
        words.append(_amount(name, amount))
    words += [f"{name} {options[name]}" for name in ("accelerator_type", "label_selector") if options.get(name)]
    strategy = options.get("scheduling_strategy")
    if strategy not in (None, "DEFAULT"):
        words.append(f"scheduling_strategy {_strategy_in_words(strategy)}")
    return ", ".join(words) or "no resources"


def _strategy_in_words(strategy: Any) -> str:
    """A strategy by what it names: Ray's own texts of them are addresses in memory."""
    if isinstance(strategy, str):
        return strategy
    if (group := getattr(strategy, "placement_group", None)) is not None:
        index = strategy.placement_group_bundle_index
        return f"placement group {group.id.hex()}" + (f", bundle {index}" if index >= 0 else "")
    if hasattr(strategy, "node_id"):
        return f"node {strategy.node_id}"
    return type(strategy).__name__
