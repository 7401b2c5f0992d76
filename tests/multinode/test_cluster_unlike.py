"""Nodes that are not alike: the driver's own, of other sizes, and slow ones."""

from collections import Counter

import pytest
import ray

from multinode_data import Calls, as_is, origin
from multinode_waiting import START_LIMIT, wait_until
from rayloader import DataLoader

pytestmark = [pytest.mark.multinode, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]


def where(num_workers, **options):
    """How many workers run on which node."""
    loader = DataLoader(
        Calls(lambda _: origin(), 2 * num_workers), None, num_workers=num_workers, collate_fn=as_is, **options
    )
    found = list(loader)
    assert found[num_workers:] == found[:num_workers]
    return Counter(node_id for node_id, _ in found[:num_workers])


def test_the_drivers_node_is_filled_before_others(add_node):
    """Ray by itself fills half of it, and goes on elsewhere."""
    own = add_node(num_cpus=4, own=1)
    driver = ray.remote(where).options(num_cpus=0, resources={"own": 1})
    assert ray.get(driver.remote(5), timeout=START_LIMIT)[own] == 4


@pytest.mark.full
def test_a_drivers_node_without_a_cpu_takes_workers_from_the_others(add_node):
    bare = add_node(num_cpus=0, bare=1)
    driver = ray.remote(where).options(num_cpus=0, resources={"bare": 1})
    found = ray.get(driver.remote(2), timeout=START_LIMIT)
    assert bare not in found
    assert found.total() == 2


@pytest.mark.full
def test_nodes_of_other_sizes_have_as_many_workers_as_they_have_room_for(add_node):
    small, large = add_node(pair=1), add_node(pair=3)
    found = where(4, ray_remote_args={"num_cpus": 0, "resources": {"pair": 1}})
    assert found == {small: 1, large: 3}


@pytest.mark.full
def test_a_slow_node_does_not_set_the_pace_of_a_dynamic_schedule(add_node, tmp_path):
    """While it is at its first sample the other one builds more than its half of what may be under way."""
    slow, _ = add_node(pair=1), add_node(pair=1)
    length, depth, built, waited = 100, 20, tmp_path / "built", tmp_path / "waited"

    def sample(index):
        if origin()[0] == slow and not waited.exists():
            waited.touch()
            wait_until(lambda: built.exists() and built.stat().st_size >= 2 * depth - 4, "the other one builds these")
        with open(built, "a") as file:
            file.write(".")
        return index

    loader = DataLoader(
        Calls(sample, length),
        None,
        num_workers=2,
        prefetch_factor=depth,
        seeding="batch",
        scheduling="dynamic",
        ray_remote_args={"num_cpus": 0, "resources": {"pair": 1}},
    )
    assert list(loader) == list(range(length))
    assert waited.exists()
