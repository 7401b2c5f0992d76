"""Loaders inside Ray tasks, actors and placement groups."""

import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from multinode_data import CASES, Calls, as_is, difference, epochs, origin, traced, untraced
from multinode_waiting import START_LIMIT, wait_for_exit, wait_until
from rayloader import DataLoader

pytestmark = pytest.mark.multinode


def get(reference):
    return ray.get(reference, timeout=START_LIMIT)


def pids_of(origins):
    return {pid for epoch in origins for _, pid in epoch}


def wait_for_all_cpus():
    wait_until(lambda: ray.available_resources().get("CPU") == 3, "all CPUs are free")


@ray.remote(num_cpus=1)
def train(case):
    return untraced(epochs(DataLoader(**traced(case))))


@ray.remote(num_cpus=1)
def train_with(loader):
    return untraced(epochs(loader))


@ray.remote(num_cpus=1)
class Trainer:
    """Keeps its loader, as trainers do."""

    def __init__(self, case):
        self.loader = DataLoader(**traced(case))

    def train(self):
        return untraced(epochs(self.loader))

    def begin(self):
        self.iterator = iter(self.loader)
        return next(self.iterator) is not None


@pytest.mark.full
def test_in_a_task(reference):
    recorded, origins = get(train.remote("augmented"))
    assert difference(recorded, reference["augmented"]) is None
    assert len(pids_of(origins)) == 2
    wait_for_exit(pids_of(origins))
    wait_for_all_cpus()


@pytest.mark.full
def test_a_loader_as_argument_of_a_task(reference):
    recorded, origins = get(train_with.remote(DataLoader(**traced("stream"))))
    assert difference(recorded, reference["stream"]) is None
    wait_for_exit(pids_of(origins))
    wait_for_all_cpus()


@pytest.mark.full
@pytest.mark.parametrize("case", ["augmented", "persistent"])
def test_in_an_actor(case, reference):
    trainer = Trainer.remote(case)
    recorded, origins = get(trainer.train.remote())
    assert difference(recorded, reference[case]) is None
    assert origins[0] == origins[1] == origins[2]
    assert get(trainer.begin.remote())
    ray.kill(trainer)  # in mid-epoch
    wait_for_exit(pids_of(origins))
    wait_for_all_cpus()


@pytest.mark.full
def test_two_ranks_at_once(reference):
    """Each in a task of its own, with one worker of its own."""
    ranks = ["rank 0", "rank 1"]
    answers = get([train.options(num_cpus=0.5).remote(rank) for rank in ranks])
    assert difference([recorded for recorded, _ in answers], [reference[rank] for rank in ranks]) is None
    for _, origins in answers:
        wait_for_exit(pids_of(origins))


@pytest.mark.full
def test_workers_are_not_captured_by_a_placement_group(reference):
    """A bundle of one CPU, taken by the task itself: captured workers would wait for ever."""
    group = placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)

    def work():
        def inside(_):
            return ray.util.get_current_placement_group() is not None

        loader = DataLoader(Calls(inside, 2), None, num_workers=1, collate_fn=as_is)
        return ray.util.get_current_placement_group() is not None, list(loader)

    try:
        assert get(ray.remote(work).options(num_cpus=1, scheduling_strategy=strategy).remote()) == (True, [False] * 2)
    finally:
        remove_placement_group(group)


@pytest.mark.full
def test_workers_in_a_placement_group_where_that_was_asked_for(nodes):
    group = placement_group([{"CPU": 1, "away": 1}] * 2)
    strategy = PlacementGroupSchedulingStrategy(group)
    remote_args = {"num_cpus": 1, "scheduling_strategy": strategy}

    def where(_):
        return ray.util.get_current_placement_group().id.hex(), *origin()

    loader = DataLoader(Calls(where, 2), None, num_workers=2, collate_fn=as_is, ray_remote_args=remote_args)
    try:
        for _ in range(2):
            (first_group, first_node, first), (second_group, second_node, second) = loader
            assert first_group == second_group == group.id.hex()
            assert first_node == second_node == nodes.away
            assert first != second
    finally:
        remove_placement_group(group)


def test_cases_have_two_workers():
    """What the arithmetic of CPUs above relies on: one for the trainer, two for its workers."""
    assert {CASES[case]()["num_workers"] for case in ("augmented", "stream", "persistent")} == {2}
