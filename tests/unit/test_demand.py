"""Which idle workers end so that something else in a cluster has room: without Ray."""

import logging
from types import SimpleNamespace

import pytest

from rayloader.actors.placement import STALE_S, ClusterStatus, Node, Placement, Want


class Idle:
    """The part of an `Actor` that is looked at."""

    had_room = None

    def __init__(self, node_id="a", **holds):
        self.address = SimpleNamespace(node_id=node_id)
        self.options = {"resources": holds}

    def __repr__(self):
        return f"{self.options} on {self.address.node_id}"


def node(node_id="a", labels=None, **free):
    return Node(node_id, "10.0.0.1", free, free, labels or {})


def wait(times=1, labels=(), node_id=None, **amounts):
    return Want(amounts, labels, node_id), times


def status(nodes, *waiting, bundles=(), at=1.0):
    return ClusterStatus(tuple(nodes), waiting, bundles, at=at)


def in_the_way(status, idle, pending=(), placement=None):
    placement = placement or Placement(lambda: True, lambda: None)
    placement._look = lambda: status
    return placement.in_the_way(idle, pending)


ONE, TWO = Idle(CPU=1), Idle(CPU=1)
FAR = Idle("b", CPU=2)
GPU, SPARE, MEMORY = Idle(CPU=1, GPU=1), Idle(spare=1), Idle(memory=1 << 30)
FULL = [node(CPU=0)]
AWAY = [[("place", frozenset({"away"}), True)]]


@pytest.mark.parametrize(
    ("idle", "nodes", "waiting", "ending"),
    [
        ([ONE, TWO], FULL, [], []),
        ([ONE, TWO], FULL, [wait(CPU=1)], [ONE]),
        ([ONE, TWO], FULL, [wait(CPU=2)], [ONE, TWO]),
        ([ONE, TWO], FULL, [wait(CPU=3)], []),
        ([ONE, TWO], [node(CPU=1)], [wait(CPU=1)], []),
        ([ONE, TWO], [node(CPU=1)], [wait(CPU=2)], [ONE]),
        ([ONE, TWO], [node(CPU=1)], [wait(2, CPU=1)], [ONE]),
        ([ONE, TWO], FULL, [wait(1_000_000, CPU=1)], [ONE, TWO]),
        ([ONE, TWO], FULL, [wait(CPU=1), wait(CPU=0.5)], [ONE, TWO]),
        ([ONE, TWO], FULL, [wait(CPU=0.5), wait(CPU=0.5)], [ONE]),
        ([ONE, SPARE, MEMORY], FULL, [wait(spare=1)], [SPARE]),
        ([ONE, SPARE, MEMORY], FULL, [wait(memory=5)], [MEMORY]),
        ([ONE, GPU], FULL, [wait(CPU=1, GPU=1)], [ONE, GPU]),
        ([GPU, ONE], FULL, [wait(CPU=1, GPU=1)], [GPU]),
        ([ONE, FAR], [*FULL, node("b")], [wait(CPU=2)], [FAR]),
        ([ONE, FAR], [*FULL, node("b", CPU=1)], [wait(CPU=1)], []),
        ([ONE, FAR], [*FULL, node("b", CPU=1)], [wait(CPU=1, node_id="a")], [ONE]),
        ([ONE, FAR], [*FULL, node("b", {"place": "away"})], [wait(CPU=1, labels=AWAY)], [FAR]),
        ([ONE], FULL, [wait(CPU=1, labels=AWAY)], []),
        ([ONE], FULL, [wait(CPU=1, labels=[[("place", frozenset({"away"}), False)]])], [ONE]),
        ([FAR], [node("a", CPU=1)], [wait(2, CPU=1)], []),  # its node is gone
    ],
)
def test_as_few_end_as_make_room_and_none_in_vain(idle, nodes, waiting, ending):
    assert in_the_way(status(nodes, *waiting), idle) == ending


@pytest.mark.parametrize(("cpus", "ending"), [([1, 1], [ONE, FAR]), ([2], [FAR]), ([3], [])])
def test_room_is_made_for_the_bundles_of_a_placement_group(cpus, ending):
    bundles = tuple(Want({"CPU": amount}) for amount in cpus)
    assert in_the_way(status([*FULL, node("b")], bundles=bundles), [ONE, FAR]) == ending


def test_what_was_just_given_up_is_not_made_room_for_again():
    """Ray's answer may be older than the end of a worker; later it counts as it is."""
    placement, waiting = Placement(lambda: True, lambda: None), wait(CPU=1)
    assert in_the_way(status(FULL, waiting, at=1.0), [ONE, TWO], [], placement) == [ONE]
    assert in_the_way(status(FULL, waiting, at=1.0), [TWO], [], placement) == [], "that answer was looked at"
    assert in_the_way(status(FULL, waiting, at=1.0 + STALE_S / 2), [TWO], [], placement) == []
    assert in_the_way(status(FULL, waiting, at=1.1 + STALE_S), [TWO], [], placement) == [TWO]


def test_a_worker_of_this_process_that_must_be_on_a_full_node_is_made_room_for():
    """Ray does not report that it waits."""
    pending = Idle(CPU=1)
    pending.options = {"num_cpus": 1, "scheduling_strategy": SimpleNamespace(node_id="b", soft=False)}
    for pending.had_room, ending in ((None, []), (True, []), (False, [FAR])):
        assert in_the_way(status([*FULL, node("b")]), [ONE, FAR], [pending]) == ending


def test_the_log_says_what_they_end_for(caplog):
    caplog.set_level(logging.INFO, "rayloader")
    in_the_way(status(FULL, wait(2, CPU=0.5, TPU=0), bundles=(Want({"CPU": 1}),)), [ONE, TWO])
    assert [message.rpartition("or another one: ")[2] for message in caplog.messages] == ["CPU 0.5, TPU 0", "CPU 1"]
    assert caplog.messages[0].startswith("rayloader: 1 idle worker processes end, because they hold what is waited for")
