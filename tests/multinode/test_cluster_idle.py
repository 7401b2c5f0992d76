"""How long idle workers keep what they hold in a cluster, when they make room; what is asked for at once."""

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from inside import actors_of
from multinode_data import Calls, as_is, origin
from multinode_waiting import HANG_LIMIT, wait_until
from rayloader import DataLoader
from rayloader.actors.actor import wait_for
from rayloader.protocol import NONE_YET
from rayloader.workers.fleet import Fleet

pytestmark = pytest.mark.multinode

CPUS = 3  # of the cluster


def load(num_workers, length=None, function=None, **options):
    calls = Calls(function or (lambda _: origin()), length or 4 * num_workers)
    return DataLoader(calls, None, num_workers=num_workers, collate_fn=as_is, **options)


def free(name="CPU"):
    return ray.available_resources().get(name, 0)


def wait_for_free(expected, name="CPU"):
    wait_until(lambda: free(name) == expected, f"{expected} {name} are free; now {free(name)}")


@pytest.mark.full
def test_training_and_validation_share_warm_workers_which_give_up_their_cpus_when_both_are_idle(grace_ends):
    training, validation = load(2), load(2)
    seen = set()
    for loader in (training, validation, training):
        seen |= {pid for _, pid in loader}
    assert len(seen) == 2
    wait_for_free(1)
    grace_ends()
    wait_for_free(CPUS)  # without a further call into the library


# ---- idle workers make room


@pytest.mark.full
def test_idle_workers_of_other_options_give_up_their_cpus(nodes):
    idle = load(2)
    list(idle)
    wait_for_free(1)
    assert {node_id for node_id, _ in load(1, ray_remote_args={"num_cpus": 2})} == {nodes.away}
    assert len(list(idle)) == 8


@pytest.mark.full
def test_idle_workers_give_up_the_cpus_of_the_one_node_that_will_do(nodes):
    """Cluster-wide one CPU is free all the time, but not there."""
    idle = load(2, ray_remote_args={"num_cpus": 1, "resources": {"away": 1}})
    list(idle)
    wait_for_free(1)
    there = {"num_cpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes.away, soft=False)}
    assert {node_id for node_id, _ in load(1, ray_remote_args=there)} == {nodes.away}


@pytest.mark.full
def test_idle_workers_give_up_custom_resources(nodes):
    idle = load(2, ray_remote_args={"num_cpus": 0, "resources": {"away": 2}})
    list(idle)
    wait_for_free(0, "away")
    assert {node_id for node_id, _ in load(1, ray_remote_args={"resources": {"away": 3}})} == {nodes.away}


# ---- several at once


@pytest.mark.full
def test_a_worker_whose_node_is_asked_for_dies_and_the_others_go_on(nodes, monkeypatch):
    """Before it has said where it is, and while the second is still to come."""
    begin = Fleet.begin

    def killing(fleet, *arguments):
        begin(fleet, *arguments)
        ray.kill(fleet.hosts[0].handle)
        assert wait_for([fleet.hosts[0].hello.ref], HANG_LIMIT)[0] is not NONE_YET

    monkeypatch.setattr(Fleet, "begin", killing)
    loader = load(2, function=lambda index: (index, *origin()), ray_remote_args={"resources": {"away": 1}})
    batches = list(loader)
    assert [index for index, *_ in batches] == list(range(8))
    assert {node_id for _, node_id, _ in batches} == {nodes.away}


def test_the_workers_of_several_iterators_are_asked_for_at_once():
    """`iter()` does not wait for workers that are yet to start, be there room for them or not."""
    first = load(2, ray_remote_args={"num_cpus": 0, "resources": {"spare": 1}})
    second = load(1, ray_remote_args={"num_cpus": 0, "resources": {"spare": 2}})
    iterators = [iter(first), iter(second)]
    assert [actor.address for iterator in iterators for actor in actors_of(iterator)] == [None] * 3
    assert len(list(iterators[0])) == 8
    assert len(list(iterators[1])) == 4, "idle workers of the first have made room"
