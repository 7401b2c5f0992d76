"""Which idle processes must end so that something else in the cluster has room.

Promise: pure; standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

ROUNDING = 1e-6  # Ray counts in units of 1e-4

Amounts = Mapping[str, float]  # by Ray's names of resources
Label = tuple[str, frozenset[str], bool]  # key, values, and whether the node's value is to be one of them


class Node(NamedTuple):
    """What a node has free, and its labels."""

    free: Amounts
    labels: Mapping[str, str]


class Want(NamedTuple):
    """What is to have room on one node.

    Attributes:
        amounts: what it asks for.
        labels: alternatives, each a list of what the node's labels must be; none: any node will do.
        node_id: of the only node that will do, if there is one.
    """

    amounts: Amounts
    labels: Sequence[Sequence[Label]] = ()
    node_id: str | None = None

    def may_be_on(self, node_id: str, node: Node) -> bool:
        """Whether a node would do, if it had room."""
        if self.node_id is not None:
            return node_id == self.node_id
        return not self.labels or any(
            all((node.labels.get(key) in values) is wanted for key, values, wanted in alternative)
            for alternative in self.labels
        )


class Waiting(NamedTuple):
    """So many times, all of this together waits for room: a task, an actor, or the bundles of a placement group."""

    wants: Sequence[Want]
    times: int = 1

    def __str__(self) -> str:
        return " and ".join(
            ", ".join(f"{name} {amount:g}" for name, amount in sorted(want.amounts.items())) for want in self.wants
        )


class ClusterState(NamedTuple):
    """What Ray says of the cluster.

    Attributes:
        nodes: by id.
        waiting: what Ray reports.
        actors: what each actor without a process asks for, by id.
    """

    nodes: Mapping[str, Node]
    waiting: Sequence[Waiting]
    actors: Mapping[str, Amounts]


class Idle(Protocol):
    """An idle process, as far as it is looked at."""

    @property
    def holds(self) -> Amounts:
        """What it takes from others until it ends."""

    @property
    def node_id(self) -> str:
        """Where it is."""


_Idle = TypeVar("_Idle", bound=Idle)


def in_the_way(
    idle: Sequence[_Idle], nodes: Mapping[str, Node], waiting: Sequence[Waiting]
) -> list[tuple[_Idle, Waiting]]:
    """The processes that must end so that what waits has room, each with what needs it.

    A process is none of them if what waits has room without its end, or has none in spite of it.
    """
    free = {node_id: dict(node.free) for node_id, node in nodes.items()}
    ending: list[tuple[_Idle, Waiting]] = []
    left = list(idle)
    for one in waiting:
        for _ in range(one.times if left else 0):
            tried = dict(free)
            leaving: list[_Idle] = []
            if not all(_place(want, nodes, tried, left, leaving) for want in one.wants):
                break  # nor would there be room for another one of these
            free, left = tried, [process for process in left if process not in leaving]
            ending += [(process, one) for process in leaving]
    return ending


def _place(
    want: Want,
    nodes: Mapping[str, Node],
    free: dict[str, dict[str, float]],
    idle: Sequence[_Idle],
    leaving: list[_Idle],
) -> bool:
    """Takes what is wanted from what is free; if needed, more idle processes leave. Returns whether there is room."""
    fitting = [node_id for node_id, node in nodes.items() if want.may_be_on(node_id, node)]
    for may_leave in (False, True):
        for node_id in fitting:
            room, more = dict(free[node_id]), []
            for process in idle if may_leave else ():
                if fits(want.amounts, room):
                    break
                is_there = process.node_id == node_id and process not in leaving
                if is_there and any(room.get(name, 0) < want.amounts.get(name, 0) - ROUNDING for name in process.holds):
                    more.append(process)
                    add(room, process.holds, 1)
            if fits(want.amounts, room):
                add(room, want.amounts, -1)
                free[node_id] = room
                leaving += more
                return True
    return False


def fits(amounts: Amounts, free: Amounts) -> bool:
    """Whether so much is free."""
    return all(free.get(name, 0) >= amount - ROUNDING for name, amount in amounts.items())


def add(free: dict[str, float], amounts: Amounts, sign: int) -> None:
    """Makes that much more free, or less."""
    for name, amount in amounts.items():
        free[name] = free.get(name, 0) + sign * amount
