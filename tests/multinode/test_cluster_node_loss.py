"""A node goes while a worker on it holds work, or between epochs."""

import threading
from types import SimpleNamespace

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from multinode_data import Calls, as_is, origin
from multinode_waiting import HANG_LIMIT, wait_for_exit
from rayloader import DataLoader, WorkerDiedError

pytestmark = pytest.mark.multinode


@pytest.fixture
def doomed(nodes):
    """A third node; `doomed.remove(...)` takes it away."""
    node = nodes.cluster.add_node(num_cpus=1)

    only_there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    hello = ray.remote(num_cpus=0, scheduling_strategy=only_there)(origin)
    assert ray.get(hello.remote(), timeout=HANG_LIMIT)[0] == node.node_id  # now all others know of it
    there = NodeAffinitySchedulingStrategy(node.node_id, soft=True)  # and where it is gone anywhere else
    yield SimpleNamespace(
        node_id=node.node_id,
        remote_args={"num_cpus": 0, "scheduling_strategy": there},
        remove=lambda graceful: nodes.cluster.remove_node(node, allow_graceful=graceful),
    )
    if node in nodes.cluster.worker_nodes:
        nodes.cluster.remove_node(node)


def blocking_there(node_id):
    """Sample 0 comes at once; on that node there will be no other."""

    def sample(index):
        if index and origin()[0] == node_id:
            threading.Event().wait()
        return index, *origin()

    return sample


@pytest.mark.parametrize(
    ("graceful", "persistent"),
    [(True, False), (True, True), (False, False)],
    ids=["removed", "removed, persistent", "killed"],
)
def test_a_node_that_goes_with_work_in_hand_is_an_error_not_a_hang(graceful, persistent, doomed):
    loader = DataLoader(
        Calls(blocking_there(doomed.node_id), 4),
        None,
        num_workers=1,
        collate_fn=as_is,
        persistent_workers=persistent,
        ray_remote_args=doomed.remote_args,
    )
    iterator = iter(loader)
    _, node_id, pid = next(iterator)
    assert node_id == doomed.node_id
    doomed.remove(graceful)
    with pytest.raises(WorkerDiedError, match=rf"^DataLoader worker \(pid\(s\) {pid}\) exited unexpectedly") as caught:
        next(iterator)
    assert "worker 0" in str(caught.value)
    assert any("batch 1 from worker 0" in note for note in caught.value.__notes__)
    wait_for_exit([pid])
    again = list(loader)
    assert [index for index, *_ in again] == [0, 1, 2, 3]
    assert doomed.node_id not in {node_id for _, node_id, _ in again}


def test_a_node_that_goes_between_epochs(doomed):
    """Its warm workers are replaced."""
    loader = DataLoader(
        Calls(lambda _: origin(), 4), None, num_workers=2, collate_fn=as_is, ray_remote_args=doomed.remote_args
    )
    assert {node_id for node_id, _ in loader} == {doomed.node_id}
    doomed.remove(graceful=True)
    again = list(loader)
    assert len(again) == 4
    assert doomed.node_id not in {node_id for node_id, _ in again}


def test_a_node_that_goes_when_all_its_work_is_done(doomed):
    """What was delivered stays, and what the others do goes on."""
    stay = DataLoader(Calls(lambda _: origin(), 4), None, num_workers=1, collate_fn=as_is)
    iterator = iter(stay)
    first = next(iterator)
    elsewhere = DataLoader(
        Calls(lambda index: ray.get_runtime_context().get_node_id(), 2),
        None,
        num_workers=1,
        collate_fn=as_is,
        ray_remote_args=doomed.remote_args,
    )
    assert list(elsewhere) == [doomed.node_id] * 2
    doomed.remove(graceful=True)
    assert list(iterator) == [first] * 3
