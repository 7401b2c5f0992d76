"""Workers on a node that the driver is not on, and on both."""

import dataclasses
import sys

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from multinode_data import AWAY, ON_EACH, Calls, as_is, difference, epochs, origin, tensors, traced, untraced
from rayloader import DataLoader
from rayloader.actors import session
from rayloader.actors.pool import get_pool
from rayloader.actors.tcp_line import TcpDriverLine

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("warm")]

ANSWER_LIMIT = 10  # seconds; turns a hang of user code in a worker into an error


def values(function, length=1, num_workers=1, **options):
    """What `function(i)` returns in the workers."""
    options = {"ray_remote_args": AWAY, "timeout": ANSWER_LIMIT, **options}
    return list(DataLoader(Calls(function, length), None, num_workers=num_workers, collate_fn=as_is, **options))


@pytest.mark.parametrize(
    "case", ["augmented", *(pytest.param(c, marks=pytest.mark.full) for c in ("big", "persistent", "stream"))]
)
def test_batches_from_another_node_are_those_of_torch(case, nodes, reference):
    recorded, origins = untraced(epochs(DataLoader(**traced(case), ray_remote_args=AWAY)))
    assert difference(recorded, reference[case]) is None
    assert {node_id for epoch in origins for node_id, _ in epoch} == {nodes.away}
    assert len(origins[0]) == 2
    assert origins[1] == origins[0], "the second epoch was not served by the warm actors of the first"
    assert origins[2] == origins[0]


def ways_to_say_where(nodes):
    yield {"label_selector": {"place": "away"}}
    yield {"label_selector": {"ray.io/node-id": nodes.away}, "num_cpus": 0.5}
    yield {"scheduling_strategy": NodeAffinitySchedulingStrategy(nodes.away, soft=False)}


@pytest.mark.full
@pytest.mark.parametrize("way", range(3), ids=["label", "node id label", "affinity"])
def test_every_way_to_name_a_node(way, nodes, reference):
    remote_args = list(ways_to_say_where(nodes))[way]
    recorded, origins = untraced(epochs(DataLoader(**traced("augmented"), ray_remote_args=remote_args)))
    assert difference(recorded, reference["augmented"]) is None
    assert {node_id for epoch in origins for node_id, _ in epoch} == {nodes.away}


def test_workers_of_another_node_are_reached_by_tcp():
    loader = DataLoader(Calls(lambda index: index, 4), None, num_workers=2, ray_remote_args=AWAY)
    assert list(loader) == [0, 1, 2, 3]
    assert {worker.lane for worker in loader.stats().epoch.workers} == {"TCP line"}


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
        loader = DataLoader(Calls(lambda index: index, 40), None, num_workers=2, **options)
        assert list(loader) == list(range(40))
        assert {worker.lane for worker in loader.stats().epoch.workers} == {"Ray calls"}
    told = [record.getMessage() for record in caplog.records if "by Ray calls" in record.getMessage()]
    assert len(told) == (why == "firewall")
    assert not told or " to port 9 of " in told[0]


@pytest.mark.full
def test_batches_from_another_node_are_writable(reference):
    (batches, _), _ = untraced(epochs(DataLoader(**traced("big"), ray_remote_args=AWAY)))
    for epoch, expected in zip(batches, reference["big"][0], strict=True):
        for batch in epoch:
            for tensor in tensors(batch):
                tensor.add_(1)  # a read-only page would end this process
        assert all(
            torch.equal(ours, theirs + 1) for ours, theirs in zip(tensors(epoch), tensors(expected), strict=True)
        )


def test_a_loader_with_workers_on_both_nodes(nodes, reference):
    recorded, origins = untraced(epochs(DataLoader(**traced("augmented"), ray_remote_args=ON_EACH)))
    assert difference(recorded, reference["augmented"]) is None
    assert {node_id for node_id, _ in origins[0]} == {nodes.here, nodes.away}


# ---- what a worker takes over from a driver on another node


def test_modules_of_the_driver_path_are_found_on_another_node(monkeypatch, tmp_path):
    (tmp_path / "module_of_a_project.py").write_text("def answer(index):\n    return 42 + index\n")
    monkeypatch.syspath_prepend(tmp_path)
    from module_of_a_project import answer

    try:
        assert values(answer, 2) == [42, 43]
    finally:
        del sys.modules["module_of_a_project"]


@pytest.mark.full
def test_the_note_of_an_exception_names_the_node(nodes):
    def fail(index):
        raise LookupError(f"no sample {index}")

    with pytest.raises(LookupError, match="no sample 0") as caught:
        values(fail)
    assert "Caught LookupError in DataLoader worker process 0" in str(caught.value)
    assert any(f"node {nodes.away}" in note for note in caught.value.__notes__)


# ---- what users of Ray put into datasets and batches


@ray.remote(num_cpus=0)
class Memory:
    """A replay buffer, say."""

    def recall(self, index):
        return index * 10


@pytest.mark.full
def test_a_dataset_with_an_actor_handle():
    memory = Memory.remote()
    assert values(lambda index: ray.get(memory.recall.remote(index)), 3) == [0, 10, 20]


@pytest.mark.full
@pytest.mark.parametrize("size", [10, 1_000_000], ids=["small", "big"])
def test_a_dataset_with_an_object_reference(size):
    numbers = ray.put(torch.arange(size).numpy())
    assert values(lambda index: int(ray.get(numbers)[index]), 3) == [0, 1, 2]


@pytest.mark.full
def test_a_batch_with_an_object_reference():
    numbers = ray.put(torch.arange(3).numpy())
    assert [ray.get(reference, timeout=ANSWER_LIMIT)[2] for reference in values(lambda index: numbers, 2)] == [2, 2]


@pytest.mark.full
def test_samples_that_a_worker_computes_with_ray_tasks():
    @ray.remote(num_cpus=0)
    def double(index):
        return 2 * index

    assert values(lambda index: ray.get(double.remote(index)), 3) == [0, 2, 4]


@pytest.mark.full
def test_an_abandoned_epoch_leaves_the_actors_of_another_node_warm(nodes):
    loader = DataLoader(Calls(lambda _: origin(), 8), None, num_workers=2, collate_fn=as_is, ray_remote_args=AWAY)
    whole = list(loader)
    iterator = iter(loader)
    assert next(iterator) in whole
    del iterator
    assert set(loader) == set(whole)
