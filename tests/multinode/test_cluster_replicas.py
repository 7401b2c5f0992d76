"""Replicas on nodes that the driver is not on: one image a node, and errors that name what is missing there."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from inside import image_files
from multinode_data import AWAY, ON_EACH, as_is, origin
from rayloader import DataLoader, ReplicaError
from rayloader.actors.pool import get_pool

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("warm")]

TOTAL = 299_999 * 150_000


class Holds:
    """Sample i is what `function(data)` returns in worker i."""

    def __init__(self, data, function):
        self.data, self.function = data, function

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.function(self.data)


def holding(data, function, **options):
    return DataLoader(
        Holds(data, function), None, num_workers=2, collate_fn=as_is, **{"ray_remote_args": AWAY, **options}
    )


def images():
    """Names of the images that this process has mapped."""
    return set(re.findall(r"rayloader-image-\w+", Path("/proc/self/maps").read_text()))


def look(data):
    return int(data.sum()), origin(), images()


def test_two_workers_of_another_node_share_one_image(nodes):
    loader = holding(np.arange(300_000), look)
    (first, (node, pid), names), (second, (same_node, other_pid), same_names) = loader
    assert (first, second) == (TOTAL, TOTAL)
    assert {node, same_node} == {nodes.away}
    assert pid != other_pid
    assert names == same_names
    assert len(names) == 1
    assert names.isdisjoint(image_files()), "the driver's image was opened from another node"
    assert {names for *_, names in map(tuple_of, loader)} == {frozenset(same_names)}, "it was shipped a second time"
    loader.dataset.data[0] = 1
    assert [total for total, *_ in loader] == [TOTAL + 1] * 2
    assert {frozenset(names) for *_, names in loader}.isdisjoint({frozenset(same_names)})


def tuple_of(seen):
    total, where, names = seen
    return total, where, frozenset(names)


@pytest.mark.full
def test_workers_of_both_nodes():
    loader = holding(torch.arange(300_000), look, ray_remote_args=ON_EACH)
    seen = list(loader)
    assert [total for total, *_ in seen] == [TOTAL] * 2
    assert len({node for _, (node, _), _ in seen}) == 2
    assert len({frozenset(names) for *_, names in seen}) == 2


@pytest.mark.full
def test_a_write_stays_in_the_worker():
    def write(data):
        data += 1
        return int(data.sum())

    data = np.zeros(100_000, np.int64)
    assert list(holding(data, write)) == [100_000] * 2
    assert not data.any()


@pytest.mark.full
def test_a_host_that_has_died_is_replaced(nodes):
    loader = holding(np.arange(300_000), look)
    list(loader)
    hosts = [actor for actor in get_pool().actors if actor.hosted]  # one of them of this replica
    assert hosts
    for host in hosts:
        os.kill(host.address.pid, 9)
    assert [total for total, *_ in loader] == [TOTAL] * 2


@pytest.mark.full
def test_a_file_of_the_same_path_is_mapped(tmp_path):
    np.arange(300_000).tofile(tmp_path / "data")
    data = np.memmap(tmp_path / "data", np.int64)
    (first, *_), (second, *_) = holding(data, look)
    assert (first, second) == (TOTAL, TOTAL)


@pytest.mark.full
def test_a_file_that_is_missing_there_is_named(tmp_path):
    """As one without a name is on any other node: these share their file system."""
    np.arange(1000).tofile(tmp_path / "data")
    data = np.memmap(tmp_path / "data", np.int64, mode="r")
    (tmp_path / "data").unlink()
    with pytest.raises(ReplicaError, match=rf"{tmp_path}/data \(deleted\).*node \S+ does not have.*driver's node"):
        list(holding(data, look))
    here = {"num_cpus": 0, "resources": {"here": 0.01}}
    assert [total for total, *_ in holding(data, look, ray_remote_args=here)] == [499_500] * 2


@pytest.mark.full
def test_an_open_file_is_an_error_that_names_it(tmp_path):
    """On one node its workers would be forks; here some would lack it."""
    (tmp_path / "data").write_bytes(b"0123456789")
    with (tmp_path / "data").open("rb") as file:
        loader = holding({"file": file}, lambda data: data["file"].read(3))
        with pytest.raises(TypeError, match="cannot pickle") as caught:
            list(loader)
    assert "It cannot be sent to the workers: dataset.data['file']" in str(caught.value.__notes__)


@pytest.mark.full
def test_shared_memory_does_not_reach_another_node():
    with pytest.raises(ReplicaError, match=r"/dev/shm/torch_.*can't be opened on node.*another node.*clone"):
        list(holding(torch.zeros(1000).share_memory_(), look))
