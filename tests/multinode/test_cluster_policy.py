"""Where workers are placed, what is said where there is no room, and whom idle ones make room for."""

import contextlib
import gc
import logging
from collections import Counter

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import rayloader
from multinode_data import calls, origin
from multinode_waiting import get, wait_for_free
from rayloader import WorkerStartError

# Three workers or more: torch compares their number with this machine's cores when a loader is made.
pytestmark = [pytest.mark.multinode, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]

CPUS = 3  # of the cluster
full = pytest.mark.full


def load(num_workers, **options):
    """Four samples of each worker."""
    return calls(origin, 4 * num_workers, num_workers, **options)


# ---- where they are


def test_each_worker_asks_for_a_cpu_and_keeps_it_while_it_is_warm(nodes, grace_ends):
    loader = load(3)
    processes = set(loader)
    assert Counter(node_id for node_id, _ in processes) == {nodes.here: 1, nodes.away: 2}
    assert set(loader) == processes
    wait_for_free(0)
    grace_ends()
    wait_for_free(CPUS)  # though the loader lives


def test_workers_within_a_placement_group(short_limit, nodes):
    """As the trainer's own: they take its CPUs, no other ones, and no more than it has."""
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    try:
        get(group.ready())
        within = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, -1)}
        loader = load(2, ray_remote_args=within, persistent_workers=True)
        assert {node_id for node_id, _ in loader} == {nodes.away}
        wait_for_free(1)  # the group's are taken anyway
        with pytest.raises(WorkerStartError) as caught:
            list(load(1, ray_remote_args=within))
        assert f"each asks for CPU_group_{group.id.hex()} 1; " in str(caught.value)
        assert f"has CPU_group_{group.id.hex()} 0 free of 2" in str(caught.value)
        del loader
    finally:
        gc.collect()
        rayloader.shutdown()
        ray.util.remove_placement_group(group)
    wait_for_free(CPUS)


# ---- no room


@pytest.mark.parametrize(
    ("count", "remote_args", "asked"),
    [
        (2, {"num_cpus": 64}, ["CPU 64; ", "has CPU 1 in all", "has CPU 2 in all"]),
        (2, {"label_selector": {"place": "moon"}}, ["moon", "each of 2 nodes has other labels"]),
    ],
    ids=["cpus", "label"],
)
def test_workers_without_a_place_are_an_error_that_explains(count, remote_args, asked, short_limit):
    with pytest.raises(WorkerStartError) as caught:
        list(load(count, ray_remote_args=remote_args))
    for part in (
        f" of {count} DataLoader workers did not start within 1 s. Ray has ",
        *asked,
        "num_cpus=0 shares CPUs",
    ):
        assert part in str(caught.value)
    assert len(set(load(count, ray_remote_args={"num_cpus": 0}))) == count, "which is a remedy"


@pytest.mark.parametrize(
    ("remote_args", "message"),
    [
        ({"num_cups": 1}, "num_cups"),
        ({"label_selector": "here"}, "label_selector"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, "env_vars"),
    ],
)
def test_options_that_ray_refuses_are_errors_at_the_latest_of_iter(remote_args, message):
    with pytest.raises((ValueError, TypeError), match=message):
        iter(load(1, ray_remote_args=remote_args))


# ---- idle workers make room


@contextlib.contextmanager
def a_task():
    yield ray.remote(num_cpus=0, resources={"spare": 1})(origin).remote()


@contextlib.contextmanager
def a_placement_group():
    group = ray.util.placement_group([{"spare": 1}] * 2, strategy="STRICT_PACK")
    yield group.ready()
    ray.util.remove_placement_group(group)


@pytest.mark.parametrize("waiting", [a_task, a_placement_group])
def test_whatever_idle_workers_hold_is_given_up_for_whatever_waits_for_it(waiting):
    """Though they hold no CPU."""
    loader = load(1, ray_remote_args={"num_cpus": 0, "resources": {"spare": 2}})
    before = set(loader)
    wait_for_free(0, "spare")
    with waiting() as got:
        assert get(got)
    assert not set(loader) & before


@pytest.mark.parametrize("batches", [1, pytest.param(4, marks=full)], ids=["after a break", "after an epoch"])
def test_a_task_of_the_program_gets_the_cpu_of_workers_that_are_idle(batches, nodes, caplog):
    """Their loader lives, and the program waits for the task."""
    caplog.set_level(logging.INFO, "rayloader")
    loader = load(1)
    for _ in zip(range(batches), loader, strict=False):
        pass
    task = ray.remote(resources={"here": 0.1})(origin).remote()  # where the worker has the only CPU
    assert get(task)[0] == nodes.here
    text = (
        "1 idle worker processes end, because they hold what is waited for in the Ray cluster, by this program or "
        "another one: CPU 1, here"
    )
    assert [text in message for message in caplog.messages].count(True) == 1
    assert len(list(loader)) == 4
