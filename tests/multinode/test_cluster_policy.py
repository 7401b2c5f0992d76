"""What workers ask for in a cluster that was joined, and what happens where there is no room."""

import contextlib
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rayloader.actors.placement
from inside import actors_of
from multinode_data import Calls, as_is, difference, epochs, origin, traced, untraced
from multinode_waiting import HANG_LIMIT, START_LIMIT, wait_until
from rayloader import DataLoader, WorkerStartError
from rayloader.actors.actor import Lease, wait_for
from rayloader.actors.pool import get_pool
from rayloader.workers.connection import NONE_YET
from rayloader.workers.fleet import Fleet
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


@pytest.fixture
def room_is_made(monkeypatch):
    """For workers that get a place, soon; a failure need not take the whole minute."""
    monkeypatch.setattr(rayloader.actors.placement, "ROOM_PATIENCE_S", 1.0)
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "20")


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
        "1 idle worker processes end, because they hold what something else in the Ray cluster waits for: CPU 1, here"
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
def an_actor_of_one_node(nodes):
    """As another program's workers are: Ray does not report what they wait for."""
    on = NodeAffinitySchedulingStrategy(nodes.away, soft=False)
    actor = Trainer.options(num_cpus=0, resources={"spare": 1}, scheduling_strategy=on).remote()
    yield actor.is_here.remote()
    ray.kill(actor)


@ray.remote
class Trainer:
    def is_here(self):
        return True


@pytest.mark.parametrize("waiting", [a_task, a_placement_group, an_actor_of_one_node])
def test_whatever_idle_workers_hold_is_given_up_for_whatever_waits_for_it(waiting, nodes):
    """Though they hold no CPU."""
    loader = load(1, ray_remote_args={"num_cpus": 0, "resources": {"spare": 2}})
    before = set(loader)
    wait_for_free(0, "spare")
    with waiting(nodes) as got:
        assert ray.get(got, timeout=START_LIMIT)
    assert not set(loader) & before


@pytest.mark.full
def test_idle_workers_stay_while_nothing_waits_that_they_make_room_for(nodes):
    """What there is room for without them, and what there would be none for in spite of their end."""
    loader = load(1, ray_remote_args={"num_cpus": 0, "resources": {"spare": 1}})
    before = set(loader)
    hopeless = ray.remote(num_cpus=0, resources={"spare": 3})(origin).remote()
    looked = get_pool().demand.look
    looks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_pool().demand, "look", lambda *args: looks.append(looked(*args)) or looks[-1])
        ray.get(ray.remote(num_cpus=0, resources={"spare": 1})(origin).remote(), timeout=START_LIMIT)
        wait_until(lambda: len(looks) >= 3, "the janitor has looked since")
    ray.cancel(hopeless)
    assert set(loader) == before


@pytest.mark.full
def test_fractions_of_a_cpu_and_of_a_resource():
    iterator = begin(load(2, ray_remote_args={"num_cpus": 0.25, "resources": {"away": 0.5}}))
    wait_for_free(CPUS - 0.5)
    wait_for_free(4 - 1, "away")
    assert len(list(iterator)) == 6


# ---- idle workers make room


@pytest.mark.full
def test_idle_workers_of_other_options_give_up_their_cpus(room_is_made, nodes):
    idle = load(2)
    list(idle)
    wait_for_free(1)
    assert {node_id for node_id, _ in load(1, ray_remote_args={"num_cpus": 2})} == {nodes.away}
    assert len(list(idle)) == 8


@pytest.mark.full
def test_idle_workers_give_up_the_cpus_of_the_one_node_that_will_do(room_is_made, nodes):
    """Cluster-wide one CPU is free all the time, but not there."""
    idle = load(2, ray_remote_args={"num_cpus": 1, "resources": {"away": 1}})
    list(idle)
    wait_for_free(1)
    there = {"num_cpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes.away, soft=False)}
    assert {node_id for node_id, _ in load(1, ray_remote_args=there)} == {nodes.away}


@pytest.mark.full
def test_idle_workers_give_up_custom_resources(room_is_made, nodes):
    idle = load(2, ray_remote_args={"num_cpus": 0, "resources": {"away": 2}})
    list(idle)
    wait_for_free(0, "away")
    assert {node_id for node_id, _ in load(1, ray_remote_args={"resources": {"away": 3}})} == {nodes.away}


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
def test_a_worker_whose_node_is_asked_for_dies_and_the_others_go_on(nodes, monkeypatch):
    """Before it has said where it is, and while the second is still to come."""
    begin = Fleet.begin

    def killing(fleet, *arguments):
        begin(fleet, *arguments)
        ray.kill(fleet.hosts[0].handle)
        assert wait_for([fleet.hosts[0].hello.ref], 1, HANG_LIMIT)[0] is not NONE_YET

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
