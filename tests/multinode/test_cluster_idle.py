"""How long idle workers keep what they hold in a cluster, and whom they make room for; what is asked for at once."""

import contextlib
import logging

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from inside import actors_of
from multinode_data import Calls, as_is, origin
from multinode_waiting import HANG_LIMIT, START_LIMIT, wait_until
from rayloader import DataLoader
from rayloader.actors import placement
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


def interrupted(loader):
    """Begins an epoch and takes a batch."""
    with contextlib.suppress(LookupError):
        for _ in loader:
            raise LookupError


def broken_off(loader):
    """Begins an epoch and takes a batch."""
    for _ in loader:
        break


@pytest.mark.parametrize(
    "epoch", [broken_off, *(pytest.param(epoch, marks=pytest.mark.full) for epoch in (list, interrupted))]
)
def test_a_task_of_the_program_gets_the_cpu_of_workers_that_are_idle(epoch, nodes, caplog):
    """Their loader lives, and the program waits for the task."""
    caplog.set_level(logging.INFO, "rayloader")
    loader = load(1, length=40)
    epoch(loader)
    task = ray.remote(resources={"here": 0.1})(origin).remote()  # where the worker has the only CPU
    assert ray.get(task, timeout=START_LIMIT)[0] == nodes.here
    text = (
        "1 idle worker processes end, because they hold what is waited for in the Ray cluster, by this program or "
        "another one: CPU 1, here"
    )
    assert [text in message for message in caplog.messages].count(True) == 1
    assert len(list(loader)) == 40


@contextlib.contextmanager
def a_task(_):
    yield ray.remote(num_cpus=0, resources={"spare": 1})(origin).remote()


@contextlib.contextmanager
def a_placement_group(_):
    group = ray.util.placement_group([{"spare": 1}] * 2, strategy="STRICT_PACK")
    yield group.ready()
    ray.util.remove_placement_group(group)


@contextlib.contextmanager
def an_actor_of_nodes_with_a_label(_):
    actor = Trainer.options(num_cpus=0, resources={"spare": 1}, label_selector={"place": "away"}).remote()
    yield actor.is_here.remote()
    ray.kill(actor)


@ray.remote
class Trainer:
    def is_here(self):
        return True


@pytest.mark.parametrize("waiting", [a_task, a_placement_group, an_actor_of_nodes_with_a_label])
def test_whatever_idle_workers_hold_is_given_up_for_whatever_waits_for_it(waiting, nodes):
    """Though they hold no CPU."""
    loader = load(1, ray_remote_args={"num_cpus": 0, "resources": {"spare": 2}})
    before = set(loader)
    wait_for_free(0, "spare")
    with waiting(nodes) as got:
        assert ray.get(got, timeout=START_LIMIT)
    assert not set(loader) & before


@pytest.mark.full
def test_idle_workers_stay_while_nothing_waits_that_they_make_room_for(monkeypatch):
    """What there is room for without them, and what there would be none for in spite of their end."""
    loader = load(1, ray_remote_args={"num_cpus": 0, "resources": {"spare": 1}})
    before = set(loader)
    hopeless = ray.remote(num_cpus=0, resources={"spare": 3})(origin).remote()
    looked, seen = placement.in_the_way, []

    def look(idle, nodes, waiting):
        seen.extend(str(want) for want, _ in waiting)
        return looked(idle, nodes, waiting)

    monkeypatch.setattr(placement, "in_the_way", look)
    ray.get(ray.remote(num_cpus=0, resources={"spare": 1})(origin).remote(), timeout=START_LIMIT)
    wait_until(lambda: "spare 3" in seen, "the janitor has looked")
    ray.cancel(hopeless)
    assert set(loader) == before


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
