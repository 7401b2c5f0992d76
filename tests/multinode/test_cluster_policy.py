"""What workers ask for in a cluster that was joined, and what happens where there is no room."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

import rayloader.actors.placement
from multinode_data import Calls, as_is, difference, epochs, origin, traced, untraced
from multinode_waiting import START_LIMIT, wait_until
from rayloader import DataLoader, WorkerStartError
from rayloader.actors.actor import Lease
from rayloader.actors.pool import get_pool
from rayloader.workers.processes import Verdict

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
    """For workers that have no place."""
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "1")


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
def test_more_workers_than_cpus_share_them_with_a_warning():
    training = load(2, length=8)
    iterator = begin(training)
    wait_for_free(1)
    validation = load(2)
    with pytest.warns(UserWarning, match=r"will create 2 worker processes, 4 with those.* is 3 \(the CPUs of the Ray"):
        assert len(list(validation)) == 8
    assert free() == 1, "they were to ask for none"
    assert len(list(iterator)) == 6


@pytest.mark.full
@oversubscribed
def test_one_loader_with_more_workers_than_cpus(recwarn):
    assert len({pid for _, pid in load(4)}) == 4
    assert [str(warning.message) for warning in recwarn if "the CPUs of the Ray cluster" in str(warning.message)]


@pytest.mark.full
@oversubscribed
def test_the_cpu_of_the_actor_that_loads_is_not_to_be_had():
    """Three CPUs, of which the trainer itself has one: its three workers share them instead of waiting for ever."""

    def train():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            return len({pid for _, pid in load(3)}), [str(warning.message) for warning in told]

    class Trainer:
        def train(self):
            return train()

    trainer = ray.remote(num_cpus=1)(Trainer).remote()
    try:
        number, told = ray.get(trainer.train.remote(), timeout=START_LIMIT)
    finally:
        ray.kill(trainer)
    text = "is 2 (the CPUs of the Ray cluster, not counting the 1 that this process holds)"
    assert number == 3
    assert [text in warning for warning in told].count(True) == 1
    wait_for_free(CPUS)


@pytest.mark.full
def test_fractions_of_a_cpu_and_of_a_resource():
    iterator = begin(load(2, ray_remote_args={"num_cpus": 0.25, "resources": {"away": 0.5}}))
    wait_for_free(CPUS - 0.5)
    wait_for_free(4 - 1, "away")
    assert len(list(iterator)) == 6


# ---- no room


@pytest.mark.parametrize(
    ("remote_args", "asked"),
    [
        ({"num_cpus": 64}, "CPU 64"),
        pytest.param({"resources": {"away": 5}}, "away 5", marks=pytest.mark.full),
        ({"label_selector": {"place": "moon"}}, "moon"),
        pytest.param({"resources": {"nowhere": 1}}, "nowhere 1", marks=pytest.mark.full),
        pytest.param({"accelerator_type": "A100"}, "A100", marks=pytest.mark.full),
    ],
    ids=["cpus", "resource", "label", "unknown resource", "accelerator"],
)
def test_workers_without_a_place_are_an_error_that_explains(remote_args, asked, short_limit):
    with pytest.raises(WorkerStartError) as caught:
        list(load(2, ray_remote_args=remote_args))
    text = str(caught.value)
    assert text.startswith("2 of 2 DataLoader workers found no place in the Ray cluster within 1 s. Each asks for ")
    assert asked in text
    assert "free now: CPU 3 of 3, away 4 of 4, here 4 of 4," in text
    for remedy in ("num_workers", 'ray_remote_args={"num_cpus": 0}', "RAYLOADER_START_TIMEOUT"):
        assert remedy in text


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
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "1")
    with pytest.raises(WorkerStartError, match="Each asks for CPU 1; free now: CPU 0 of 3"):
        list(loader)
    for actor in training:
        ray.kill(actor)
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "20")
    assert len(list(loader)) == 4


@pytest.mark.full
def test_cpus_that_others_have_and_keep_are_done_without(monkeypatch, caplog):
    """Where the user's options name no number: the workers share CPUs, as torch's do, rather than fail."""
    monkeypatch.setattr(rayloader.actors.placement, "CPU_PATIENCE_S", 1.0)

    training = training_on_all_cpus()
    try:
        assert len({pid for _, pid in load(2)}) == 2
    finally:
        for actor in training:
            ray.kill(actor)
    assert ["ask for none from now on" in record.getMessage() for record in caplog.records] == [True]
    rayloader.shutdown()  # the pool has learned it for good
    wait_for_free(CPUS)


@oversubscribed
def test_cpus_that_slow_workers_of_our_own_hold_are_not_others(monkeypatch):
    """As on a busy machine, where a process takes longer than the patience to import torch."""
    for patience in ("CPU_PATIENCE_S", "ROOM_PATIENCE_S"):
        monkeypatch.setattr(rayloader.actors.placement, patience, 0.0)
    pool = get_pool()
    lease = Lease(print)
    actors = pool.lend(lease, {}, CPUS, fresh=True)
    wait_until(lambda: all(actor.is_placed() for actor in actors) and free() == 0, "all have a place")
    assert pool.verdict(actors, {}, others=False) is Verdict.WAIT
    pool.end(lease, busy=False, reuse=False)
    wait_for_free(CPUS)


def test_a_worker_without_a_place_is_hosted_by_the_others(monkeypatch, caplog):
    """One node has two CPUs, the other one."""
    first = load(1, ray_remote_args={"num_cpus": 2})
    assert len(list(first)) == 4  # its actor is warm: the limit is for the other one
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "1")
    loader = load(2, function=lambda index: (index, *origin()), ray_remote_args={"num_cpus": 2})
    for _ in range(2):
        batches = list(loader)
        assert [index for index, *_ in batches] == list(range(8))
        assert len({pid for *_, pid in batches}) == 1
    text = (
        "1 of 2 worker processes found no place in the Ray cluster within 1 s; until there is room for them, their "
        "work is done by the other 1"
    )
    assert [text in record.getMessage() for record in caplog.records] == [True, True]


@pytest.mark.full
def test_the_error_tells_what_this_loader_asked_for(monkeypatch):
    """And not what another asked for meanwhile."""
    known = set(get_pool().actors)
    with ThreadPoolExecutor(1) as thread:  # in a cluster `iter()` waits for the workers
        waiting = thread.submit(list, load(1, ray_remote_args={"resources": {"nowhere": 1}}))
        wait_until(lambda: set(get_pool().actors) - known, "the first loader has asked for its worker")
        list(load(1, ray_remote_args={"resources": {"away": 1}}))
        monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "0.1")
        with pytest.raises(WorkerStartError, match=r"Each asks for .*nowhere 1"):
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
