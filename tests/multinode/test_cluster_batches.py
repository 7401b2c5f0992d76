"""Batches are what forks of one machine give, wherever the workers are, and wherever the loader is."""

import dataclasses

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from multinode_data import AWAY, ON_EACH, calls, check_batches, epochs, made, origin
from multinode_waiting import get
from rayloader.actors import session
from rayloader.actors.pool import get_pool
from rayloader.actors.tcp_line import TcpDriverLine
from rayloader.transport.lanes import SMALL_BYTES

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("warm")]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("samples", AWAY),
        ("stream", ON_EACH),
        pytest.param("big", AWAY, marks=pytest.mark.full),
        pytest.param("samples", {"label_selector": {"place": "away"}}, marks=pytest.mark.full),
        pytest.param("samples", "a node", marks=pytest.mark.full),
    ],
)
def test_batches_of_other_nodes_are_those_of_forks(case, options, nodes):
    if options == "a node":
        options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes.away, soft=False)}
    loader = made(case, ray_remote_args=options)
    found = epochs(loader)
    workers = loader.stats().total.workers
    assert {worker.node for worker in workers} == {nodes.away} | ({nodes.here} if options is ON_EACH else set())
    assert {worker.lane for worker in workers if worker.node == nodes.away} == {"TCP line"}
    check_batches(found, case)


@pytest.mark.full
@pytest.mark.parametrize("why", ["firewall", "TLS", "arenas=False"])
def test_where_tcp_is_not_possible_or_not_wanted_batches_come_by_ray_calls(why, monkeypatch, caplog):
    """It is said once, though there are two workers and two loaders, where it is not what the user has asked for."""

    def elsewhere(line, *arguments, init=TcpDriverLine.__init__):
        init(line, *arguments)
        line.address = dataclasses.replace(line.address, port=9)  # "discard": nobody listens there

    if why == "firewall":
        monkeypatch.setattr(get_pool(), "without_lines", set())
        monkeypatch.setattr(TcpDriverLine, "__init__", elsewhere)
    elif why == "TLS":
        monkeypatch.setattr(session, "uses_tls", lambda: True)
    for _ in range(2):
        options = {"ray_remote_args": AWAY, "fresh_processes": True, "arenas": why != "arenas=False"}
        loader = calls(int, 40, 2, **options)
        assert list(loader) == list(range(40))
        assert {worker.lane for worker in loader.stats().epoch.workers} == {"Ray calls"}
    told = [record.getMessage() for record in caplog.records if "by Ray calls" in record.getMessage()]
    assert [" to port 9 of " in message for message in told] == [True] * (why == "firewall")


def sample(index):
    """Every third is small, and every seventh an error."""
    if index % 7 == 3:
        raise LookupError(f"no sample {index}")
    return torch.full((8 if index % 3 == 0 else 4 * SMALL_BYTES + index,), index), f"sample {index}"


def is_sample(batch, index):
    expected, name = sample(index)
    return torch.equal(batch[0], expected) and batch[1] == name


@pytest.mark.parametrize("depth", [3, pytest.param(None, marks=pytest.mark.full)])
def test_whatever_is_kept_later_batches_come_in_memory_of_their_own(depth, nodes):
    loader, kept = calls(sample, 40, 2, prefetch_factor=depth, ray_remote_args=AWAY), []
    for _ in range(2):
        iterator = iter(loader)
        for index in range(40):
            if index % 7 == 3:
                with pytest.raises(LookupError, match=f"no sample {index}") as caught:
                    next(iterator)
                assert any(f"node {nodes.away}" in note for note in caught.value.__notes__)
                continue
            batch = next(iterator)
            assert is_sample(batch, index)
            batch[0].zero_()  # a read-only page would end this process
            if index % 2:
                kept.append(batch[0])
        assert list(iterator) == []
    assert not any(tensor.any() for tensor in kept)


def test_an_epoch_that_is_broken_off_leaves_the_actors_of_another_node_warm():
    """While large batches are under way, which a thread copies: that it ends is proved after each test."""
    loader = calls(lambda index: (*origin(), torch.full((1 << 18,), index)), 60, 2, ray_remote_args=AWAY)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    del iterator
    processes = {(node_id, pid) for node_id, pid, _ in loader}
    assert len(processes) == 2
    assert {(node_id, pid) for node_id, pid, _ in kept} <= processes
    assert [tensor.unique().item() for *_, tensor in kept] == [0, 1, 2]


# ---- what users of Ray put into datasets and batches


@pytest.mark.full
def test_datasets_and_batches_may_hold_references_of_any_size():
    small, large = (ray.put(torch.arange(size).numpy()) for size in (10, 1_000_000))

    def sample(index):
        return [int(ray.get(numbers)[index]) for numbers in (small, large)], small

    batches = list(calls(sample, 3, ray_remote_args=AWAY))
    assert [read for read, _ in batches] == [[index, index] for index in range(3)]
    assert [get(reference)[2] for _, reference in batches] == [2] * 3


@pytest.mark.full
def test_workers_are_not_captured_by_a_placement_group():
    """A bundle of one CPU, taken by the task itself: captured workers would wait for ever."""
    group = ray.util.placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    def inside(_=None):
        return ray.util.get_current_placement_group() is not None

    def work():
        return inside(), list(calls(inside, 2))

    try:
        assert get(ray.remote(work).options(num_cpus=1, scheduling_strategy=strategy).remote()) == (True, [False] * 2)
    finally:
        ray.util.remove_placement_group(group)
