"""A node goes while a worker on it holds work, or between epochs."""

import io
import itertools
import threading
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.feather
import pytest
import ray
import torch
from pyarrow import parquet
from torch.utils.data import default_collate

from multinode_data import Calls, as_is, origin
from multinode_waiting import HANG_LIMIT, remove_nodes, wait_for_exit, wait_until
from rayloader import ArrowDataset, DataLoader, ParquetStream, ShuffleBuffer, WorkerDiedError, cached
from rayloader.data import sample_store

pytestmark = pytest.mark.multinode


@ray.remote(num_cpus=0, resources={"spare": 2})
class Occupant:
    def is_there(self):
        return True


@pytest.fixture
def doomed(nodes):
    """A third node, the only one with the resource `spare` to give, until `doomed.remove(...)` takes it away.

    Then the node `away` has room for the workers: whoever holds its `spare` leaves it.
    """
    occupant = Occupant.remote()
    assert ray.get(occupant.is_there.remote(), timeout=HANG_LIMIT)
    node = nodes.cluster.add_node(num_cpus=1, resources={"spare": 2})

    def remove(graceful):
        nodes.cluster.remove_node(node, allow_graceful=graceful)
        ray.kill(occupant)

    def is_known_to_be_gone():
        return not any(known["Alive"] for known in ray.nodes() if known["NodeID"] == node.node_id)

    yield SimpleNamespace(
        is_known_to_be_gone=is_known_to_be_gone,
        node_id=node.node_id,
        remote_args={"num_cpus": 0, "resources": {"spare": 1}},
        remove=remove,
    )
    if node in nodes.cluster.worker_nodes:
        remove(graceful=True)
    wait_until(is_known_to_be_gone, "Ray knows that the node is gone")


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


def noting_where(origins):
    """Notes the first sample of each worker in each process."""
    noted = set()

    def sample(index):
        if origin() not in noted:
            noted.add(origin())
            origins.note(index)
        return index

    return sample


# One worker on each of the nodes that a test adds.
ONE_A_NODE = {"collate_fn": as_is, "ray_remote_args": {"num_cpus": 0, "resources": {"pair": 1}}}


def one_more(nodes):
    return nodes.cluster.add_node(num_cpus=1, resources={"pair": 1})


def blocking_there(node_id, origins):
    """Sample 0 comes at once; on that node there will be no other."""

    def sample(index):
        if index and origin()[0] == node_id:
            threading.Event().wait()
        origins.note(index)
        return index

    return sample


def loader_there(doomed, origins, **options):
    return DataLoader(
        Calls(blocking_there(doomed.node_id, origins), 4),
        None,
        num_workers=1,
        collate_fn=as_is,
        ray_remote_args=doomed.remote_args,
        **options,
    )


@pytest.mark.parametrize(
    ("graceful", "persistent"),
    [
        pytest.param(True, False, marks=pytest.mark.full),
        pytest.param(True, True, marks=pytest.mark.full),
        (False, False),
    ],
    ids=["removed", "removed, persistent", "killed"],
)
def test_the_work_of_a_node_that_goes_is_done_on_another(graceful, persistent, doomed, nodes, tmp_path):
    """Or is an error, where nothing may be replaced."""
    origins, others = Origins(tmp_path / "origins"), Origins(tmp_path / "others")
    loader = loader_there(doomed, origins, persistent_workers=persistent)
    iterator, lost = iter(loader), iter(loader_there(doomed, others, max_worker_restarts=0))
    assert next(iterator) == next(lost) == 0
    ((index, node_id, pid),) = origins.read()
    assert (index, node_id) == (0, doomed.node_id)
    ((_, _, lost_pid),) = others.read()
    doomed.remove(graceful)
    assert list(iterator) == [1, 2, 3]
    message = rf"^DataLoader worker \(pid\(s\) {lost_pid}\) exited unexpectedly"
    with pytest.raises(WorkerDiedError, match=message) as caught:
        next(lost)
    assert "worker 0" in str(caught.value)
    assert any("batch 1, worker 0" in note for note in caught.value.__notes__)
    wait_for_exit([pid, lost_pid])
    assert list(loader) == [0, 1, 2, 3]
    # The one batch that was delivered before is built again and compared.
    assert [(index, node_id) for index, node_id, _ in origins.read()[1:]] == [(i, nodes.away) for i in [0, 1, 2, 3] * 2]


@pytest.mark.full
def test_a_node_that_is_killed_while_large_results_are_on_their_way(doomed, tmp_path):
    """Some have come, some have not, and some were not copied yet: each comes once, in its turn."""
    origins = Origins(tmp_path / "origins")

    def sample(index):
        origins.note(index)
        return torch.full((1 << 18,), index)

    options = {"num_workers": 1, "collate_fn": as_is, "ray_remote_args": doomed.remote_args}
    iterator = iter(DataLoader(Calls(sample, 60), None, prefetch_factor=20, **options))
    kept = [next(iterator)]
    wait_until(lambda: len(origins.read()) > 10, "the worker has built some more")
    doomed.remove(graceful=False)
    kept += iterator
    assert [batch.unique().tolist() for batch in kept] == [[index] for index in range(60)]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["ArrowDataset", "ParquetStream"])
def test_a_node_that_is_killed_while_it_reads_files_of_columns(kind, doomed, nodes, tmp_path):
    """Another node goes on in the same order, from the row groups of the rows that were not given."""
    origins = Origins(tmp_path / "origins")
    files = tmp_path / "files"
    files.mkdir()
    for number in range(2):
        table = pa.table({"i": range(200 * number, 200 * number + 200)})
        if kind == "ArrowDataset":
            pyarrow.feather.write_feather(table, files / f"{number}.arrow", "uncompressed", chunksize=25)
        else:
            parquet.write_table(table, files / f"{number}.parquet", row_group_size=25)
    if kind == "ArrowDataset":
        dataset, options = ArrowDataset(files), {"shuffle": True}
    else:
        dataset, options = ShuffleBuffer(ParquetStream(files, shuffle=True), 60), {}

    built, there = [], doomed.node_id

    def collate(rows):
        """The eleventh batch never comes from that node."""
        built.append(default_collate(rows)["i"].tolist())
        if len(built) > 10 and origin()[0] == there:
            threading.Event().wait()
        origins.note(built[-1][0])
        return built[-1]

    torch.manual_seed(5)
    forked = {"num_workers": 1, "multiprocessing_context": "fork"}
    expected = [batch["i"].tolist() for batch in torch.utils.data.DataLoader(dataset, 10, **forked, **options)]
    torch.manual_seed(5)
    options |= {"num_workers": 1, "prefetch_factor": 2, "ray_remote_args": doomed.remote_args}
    iterator = iter(DataLoader(dataset, 10, collate_fn=collate, **options))
    found = list(itertools.islice(iterator, 9))
    doomed.remove(graceful=False)
    assert found + list(iterator) == expected
    places = [node_id for _, node_id, _ in origins.read()]
    assert places[:10] == [there] * 10
    assert set(places[10:]) == {nodes.away}


def half_written_there(node_id, origins):
    """On that node, only the first bytes of sample 3 reach a cache, and its process does nothing more."""

    def sample(index):
        if index == 3 and origin()[0] == node_id:

            class Half(io.FileIO):
                def write(self, content):
                    super().write(content[:100])
                    origins.note(index)
                    threading.Event().wait()

            # The process does not outlive the test.
            sample_store.open = lambda path, mode, buffering: Half(path, mode)
        return torch.full((5000,), index)

    return sample


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_node_that_is_killed_while_it_fills_a_cache_costs_no_sample(where, doomed, tmp_path):
    """A later cache of the same folder reads the right samples, too, and builds none."""
    origins = Origins(tmp_path / "origins")
    place = {} if where == "memory" else {"where": tmp_path / "cache", "key": "numbers"}
    kept = cached(Calls(half_written_there(doomed.node_id, origins), 20), **place)
    loader = DataLoader(kept, None, num_workers=1, collate_fn=as_is, ray_remote_args=doomed.remote_args)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(3)]
    wait_until(origins.path.exists, "sample 3 is half written")
    assert kept.stats().present == 3
    doomed.remove(graceful=False)
    batches += iterator
    batches += loader
    assert [(len(batch), batch.unique().tolist()) for batch in batches] == [(5000, [i]) for i in [*range(20)] * 2]
    assert [(index, node_id) for index, node_id, _ in origins.read()] == [(3, doomed.node_id)]
    stats = kept.stats()
    assert (stats.present, stats.built) == (20, 21)
    if where == "folder":
        later = cached(Calls(lambda index: torch.full((5000,), index), 20), **place)
        assert all(later[index].eq(index).all() for index in range(20))
        assert later.stats().built == 21


def take(batches, origins, until):
    """Takes numbered batches until those that noted where they were built are as they should be."""
    for number, index in batches:
        assert index == number
        if number % 100 == 0 and until(origins.read()):
            return
    pytest.fail(f"it did not come to that: {origins.read()}")


@pytest.mark.full
def test_the_worker_of_a_node_that_vanished_gets_a_process_where_room_comes(nodes, tmp_path):
    origins = Origins(tmp_path / "origins")
    one, other = added = [one_more(nodes) for _ in range(2)]
    try:
        loader = DataLoader(Calls(noting_where(origins), 400_000), None, num_workers=2, **ONE_A_NODE)
        iterator = enumerate(loader)
        assert [next(iterator) for _ in range(20)] == [(index, index) for index in range(20)]
        (_, first, _), (_, second, _) = sorted(origins.read())
        assert {first, second} == {one.node_id, other.node_id}
        (lost,) = [node for node in added if node.node_id == first]
        nodes.cluster.remove_node(lost, allow_graceful=False)
        added.remove(lost)
        added.append(one_more(nodes))
        take(iterator, origins, lambda found: len(found) > 2)
        assert [node_id for _, node_id, _ in origins.read()[2:]] == [added[-1].node_id]
        assert loader.stats().epoch.restarts == 1
        del iterator, loader
    finally:
        remove_nodes(nodes, added, one, other)


@pytest.mark.full
def test_a_node_that_goes_between_epochs(doomed, nodes):
    """Its warm worker is replaced."""
    loader = DataLoader(
        Calls(lambda _: origin(), 4), None, num_workers=1, collate_fn=as_is, ray_remote_args=doomed.remote_args
    )
    assert {node_id for node_id, _ in loader} == {doomed.node_id}
    doomed.remove(graceful=True)
    assert [node_id for node_id, _ in loader] == [nodes.away] * 4


@pytest.mark.full
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
