"""A node goes while a worker on it holds work, or has done it all: the same batches come, from another node."""

import threading
from types import SimpleNamespace

import pytest
import ray

from multinode_data import calls, origin
from multinode_waiting import get, wait_for_exit
from rayloader import WorkerDiedError

pytestmark = pytest.mark.multinode

THERE = {"num_cpus": 0, "resources": {"spare": 1}}
full = pytest.mark.full


@ray.remote(num_cpus=0, resources={"spare": 2})
class Occupant:
    def is_there(self):
        return True


@pytest.fixture
def doomed(nodes, add_node):
    """A third node, the only one with the resource `spare` to give, until `doomed.remove(...)` takes it away.

    Then the node `away` has room for the workers: whoever holds its `spare` leaves it.
    """
    occupant = Occupant.remote()
    assert get(occupant.is_there.remote())
    node = add_node(spare=2)

    def remove(graceful):
        nodes.cluster.remove_node(node, allow_graceful=graceful)
        ray.kill(occupant)

    yield SimpleNamespace(node_id=node.node_id, remove=remove)
    ray.kill(occupant)


class Origins:
    """Where each sample was built, in a file: the batches do not show it, for they must be the same everywhere."""

    def __init__(self, path):
        self.path = path

    def note(self, index):
        with open(self.path, "a") as file:  # one short line is written in one piece
            file.write(f"{index} {' '.join(map(str, origin()))}\n")

    def read(self):
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [(int(index), node_id, int(pid)) for index, node_id, pid in lines]


def blocking_there(node_id, origins):
    """Sample 0 comes at once; on that node there will be no other."""

    def sample(index):
        if index and origin()[0] == node_id:
            threading.Event().wait()
        origins.note(index)
        return index

    return sample


@pytest.mark.parametrize(
    ("graceful", "persistent"),
    [pytest.param(True, False, marks=full), pytest.param(True, True, marks=full), (False, False)],
    ids=["removed", "removed, persistent", "killed"],
)
def test_the_work_of_a_node_that_goes_is_done_on_another(graceful, persistent, doomed, nodes, tmp_path):
    """Or is an error, where nothing may be replaced; and what others do goes on."""
    origins, others = Origins(tmp_path / "origins"), Origins(tmp_path / "others")
    sample = blocking_there(doomed.node_id, origins)
    loader = calls(sample, ray_remote_args=THERE, persistent_workers=persistent)
    never_replaced = {"ray_remote_args": THERE, "max_worker_restarts": 0}
    elsewhere = iter(calls(origin))
    iterator, lost = iter(loader), iter(calls(blocking_there(doomed.node_id, others), **never_replaced))
    first = next(elsewhere)
    assert next(iterator) == next(lost) == 0
    ((_, node_id, pid),) = origins.read()
    ((_, _, lost_pid),) = others.read()
    assert node_id == doomed.node_id
    doomed.remove(graceful)
    assert list(iterator) == [1, 2, 3]
    message = rf"^DataLoader worker \(pid\(s\) {lost_pid}\) exited unexpectedly"
    with pytest.raises(WorkerDiedError, match=message) as caught:
        next(lost)
    assert any("batch 1, worker 0" in note for note in caught.value.__notes__)
    wait_for_exit([pid, lost_pid])
    assert list(elsewhere) == [first] * 3
    assert list(loader) == [0, 1, 2, 3]
    # The one batch that was delivered before is built again and compared.
    assert [(index, node_id) for index, node_id, _ in origins.read()[1:]] == [(i, nodes.away) for i in [0, 1, 2, 3] * 2]


@full
def test_a_node_that_goes_between_epochs(doomed, nodes):
    """Its warm worker is replaced."""
    loader = calls(origin, ray_remote_args=THERE)
    assert {node_id for node_id, _ in loader} == {doomed.node_id}
    doomed.remove(graceful=True)
    assert [node_id for node_id, _ in loader] == [nodes.away] * 4
