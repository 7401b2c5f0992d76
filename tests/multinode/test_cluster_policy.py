"""What workers ask for in a cluster that was joined, and what happens where there is no room."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import rayloader.actors.actors
import rayloader.actors.placement
import rayloader.actors.pool
from multinode_data import Calls, as_is, difference, epochs, origin, traced, untraced
from multinode_waiting import START_LIMIT, wait_until
from rayloader import DataLoader, WorkerStartError
from rayloader.actors.pool import get_pool

pytestmark = pytest.mark.multinode

CPUS = 3  # of the cluster
# Three workers or more: torch compares their number with this machine's cores when a loader is made.
oversubscribed = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def load(num_workers, length=None, function=None, **options):
    calls = Calls(function or (lambda _: origin()), length or 4 * num_workers)
    return DataLoader(calls, None, num_workers=num_workers, collate_fn=as_is, **options)


def begin(loader):
    """An iterator whose workers all run."""
    iterator = iter(loader)
    for _ in range(loader.num_workers):
        next(iterator)
    return iterator


def free(name="CPU"):
    return ray.available_resources().get(name, 0)


def wait_for_free(expected, name="CPU"):
    wait_until(lambda: free(name) == expected, f"{expected} {name} are free; now {free(name)}")


@pytest.fixture
def short_limit(monkeypatch):
    """For workers that have no place; those that have one may take their time."""
    monkeypatch.setattr(rayloader.actors.placement, "START_TIMEOUT_S", 1.0)


# ---- CPUs


@oversubscribed
def test_each_worker_asks_for_a_cpu_where_there_are_enough(nodes, reference, grace_ends):
    loader = DataLoader(**traced("three workers"))
    recorded, origins = untraced(epochs(loader))
    assert difference(recorded, reference["three workers"]) is None
    assert {node_id for node_id, _ in origins[0]} == {nodes.here, nodes.away}, "one node has no room for three"
    assert origins[1] == origins[2] == origins[0]
    wait_for_free(0)  # warm
    grace_ends()
    wait_for_free(CPUS)
    del loader  # it could have used them


@pytest.mark.full
@oversubscribed
def test_more_workers_than_cpus_are_an_error_that_says_how_to_share_them(short_limit, recwarn):
    with pytest.raises(
        WorkerStartError, match=r"^\d of 4 DataLoader workers did not start .* no room for 1 of them"
    ) as caught:
        list(load(4))
    for part in ("has CPU 0 free of 1", "has CPU 0 free of 2", "num_cpus=0 shares CPUs"):
        assert part in str(caught.value)
    assert len({pid for _, pid in load(4, ray_remote_args={"num_cpus": 0})}) == 4
    assert not [warning for warning in recwarn if "Ray cluster" in str(warning.message)]


@pytest.mark.full
def test_other_loaders_hold_the_cpus_of_their_workers(short_limit):
    training = load(2, length=8)
    iterator = begin(training)
    wait_for_free(1)
    with pytest.raises(WorkerStartError, match=r"^\d of 2 DataLoader workers did not start .* no room for 1 of them"):
        list(load(2))
    assert len(list(iterator)) == 6


def test_workers_of_a_live_iterator_are_kept(grace_ends):
    loader = load(1, persistent_workers=True)
    seen = set(loader)
    grace_ends()
    get_pool().wait()
    assert set(loader) == seen


@pytest.mark.full
def test_fractions_of_a_cpu_and_of_a_resource():
    iterator = begin(load(2, ray_remote_args={"num_cpus": 0.25, "resources": {"away": 0.5}}))
    wait_for_free(CPUS - 0.5)
    wait_for_free(4 - 1, "away")
    assert len(list(iterator)) == 6


def test_workers_within_a_placement_group(short_limit, nodes):
    """As the trainer's own: they take its CPUs, no other ones, and no more than it has."""
    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    try:
        ray.get(group.ready(), timeout=START_LIMIT)
        within = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, -1)}
        loader = load(2, ray_remote_args=within, persistent_workers=True)
        for _ in range(2):
            assert {node_id for node_id, _ in loader} == {nodes.away}
        assert free() == 1, "the group's are taken anyway"
        with pytest.raises(
            WorkerStartError, match=r"^1 of 1 DataLoader workers did not start .* no room for 1 of them"
        ) as caught:
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
    ("remote_args", "asked"),
    [
        ({"num_cpus": 64}, ["CPU 64; ", "has CPU 1 in all", "has CPU 2 in all"]),
        pytest.param({"resources": {"away": 5}}, ["away 5; ", "has away 4 in all"], marks=pytest.mark.full),
        ({"label_selector": {"place": "moon"}}, ["moon", "each of 2 nodes has other labels"]),
        pytest.param({"resources": {"nowhere": 1}}, ["each of 2 nodes has nowhere 0 in all"], marks=pytest.mark.full),
        pytest.param(
            {"accelerator_type": "A100"}, ["accelerator_type:A100 0.001; each of 2 nodes has"], marks=pytest.mark.full
        ),
        pytest.param({"memory": 1 << 45}, ["memory 3.28e+04 GiB; "], marks=pytest.mark.full),
    ],
    ids=["cpus", "resource", "label", "unknown resource", "accelerator", "memory"],
)
def test_workers_without_a_place_are_an_error_that_explains(remote_args, asked, short_limit):
    with pytest.raises(WorkerStartError) as caught:
        list(load(2, ray_remote_args=remote_args))
    text = str(caught.value)
    assert text.startswith("2 of 2 DataLoader workers did not start within 1 s. Ray has ")
    for part in (*asked, "num_cpus=0 shares CPUs", "RAYLOADER_START_TIMEOUT"):
        assert part in text


def training_on_all_cpus():
    """Two actors that run."""

    @ray.remote
    class Training:
        def ready(self):
            return True

    training = [Training.options(num_cpus=cpus).remote() for cpus in (1, 2)]
    assert all(ray.get([actor.ready.remote() for actor in training]))
    return training


@pytest.mark.full
def test_cpus_that_others_hold_are_an_error_and_the_next_try_works(monkeypatch):
    training = training_on_all_cpus()
    loader = load(1, ray_remote_args={"num_cpus": 1})
    monkeypatch.setattr(rayloader.actors.placement, "START_TIMEOUT_S", 1.0)
    with pytest.raises(WorkerStartError, match=r"each asks for CPU 1; .*has CPU 0 free of 2"):
        list(loader)
    for actor in training:
        ray.kill(actor)
    monkeypatch.undo()
    assert len(list(loader)) == 4


@pytest.mark.full
@oversubscribed
def test_what_is_waited_for_is_told(monkeypatch, caplog):
    """Two of three workers have a place: how many have none does not depend on how long the others take to start."""
    monkeypatch.setattr(rayloader.actors.actors, "NOTICE_S", 6.0)  # by then Ray has said who has no place
    monkeypatch.setattr(rayloader.actors.placement, "START_TIMEOUT_S", 7.0)
    keeper = ray.remote(num_cpus=1)(Calls).remote(origin, 1)
    ray.get(keeper.__len__.remote())
    with pytest.raises(WorkerStartError, match=r"^\d of 3 DataLoader workers did not start .* no room for 1 of them"):
        list(load(3))
    ray.kill(keeper)
    (told,) = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert "Ray has found no room for 1 of them: each asks for CPU 1; " in told
    wait_for_free(CPUS)


@pytest.mark.full
def test_the_error_tells_what_this_loader_asked_for(monkeypatch):
    """And not what another asked for meanwhile."""
    known = set(get_pool().actors)
    with ThreadPoolExecutor(1) as thread:  # in a cluster `iter()` waits for the workers
        waiting = thread.submit(list, load(1, ray_remote_args={"resources": {"nowhere": 1}}))
        wait_until(lambda: set(get_pool().actors) - known, "the first loader has asked for its worker")
        list(load(1, ray_remote_args={"resources": {"away": 1}}))
        monkeypatch.setattr(rayloader.actors.placement, "START_TIMEOUT_S", 0.1)
        with pytest.raises(WorkerStartError, match=r"each asks for .*nowhere 1"):
            waiting.result()


# ---- options


@pytest.mark.parametrize(
    ("remote_args", "message"),
    [
        ({"num_cpus": -1}, "num_cpus"),
        ({"num_cpus": "two"}, "num_cpus"),
        ({"resources": 5}, "resources"),
        ({"resources": {"CPU": 1}}, "num_cpus"),
        ({"num_cups": 1}, "num_cups"),
        ({"scheduling_strategy": "here"}, "scheduling_strategy"),
        ({"label_selector": "here"}, "label_selector"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, "env_vars"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_errors_at_the_latest_of_iter(remote_args, message):
    with pytest.raises((ValueError, TypeError), match=message):
        iter(load(1, ray_remote_args=remote_args))


@pytest.mark.full
def test_options_that_say_nothing():
    loader = load(1, ray_remote_args={"label_selector": None, "runtime_env": None, "num_gpus": 0})
    assert len(list(loader)) == 4


@pytest.mark.parametrize("name", ["name", "lifetime", "max_restarts", "max_concurrency", "concurrency_groups"])
def test_options_that_the_loader_needs_for_itself(name):
    with pytest.raises(ValueError, match=rf"ray_remote_args must not hold '{name}'.*leave it out"):
        load(1, ray_remote_args={name: 1})
