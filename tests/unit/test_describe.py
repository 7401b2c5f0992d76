"""What a state is, in plain types."""

import copy
import json

import pytest
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler

from rayloader import DataLoader, StateError
from rayloader.cli.states import described
from rayloader.resume.checkpoint import fits_any_ranks, fits_any_workers
from rayloader.resume.state import VERSION, State
from states import Stream, saved


class Remembering(Dataset):
    """A dataset with a state of its own."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index

    def state_dict(self):
        return {"seen": 1}

    def load_state_dict(self, state):
        pass


# ---- what a state is


def test_a_description_is_complete_and_of_plain_types():
    state = saved(3, shuffle=True, skip_steps=[7, (2, 5)], digests=[10, 11])
    found = described(state)
    assert json.loads(json.dumps(found)) == found
    assert found.keys() > {*State._fields}
    assert (found["epoch"], found["step"], found["version"]) == (0, 3, VERSION)
    assert found["fits"].items() >= {"batch_size": 4, "seeding": "worker", "dataset_length": 100}.items()
    assert found["position"]["delivered"] == 3
    assert len(found["position"]["workers"]) == found["num_workers"] == 2
    assert found["skip_steps"] == [[0, 7], [2, 5]]
    assert found["now"]["random"]["torch"].startswith("5056 bytes, checksum ")


# ---- what it continues on


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"num_replicas": 2, "rank": 1}, True),
        ({"num_replicas": 2, "rank": 1, "sampler": RandomSampler(range(100))}, True),
        ({"sampler": DistributedSampler(range(100), 2, 1)}, True),
        ({"sampler": DistributedSampler(range(100), 2, 1), "batch_size": None}, True),
        ({"batch_sampler": BatchSampler(RandomSampler(range(100)), 4, False), "num_replicas": 2, "rank": 1}, True),
        ({"batch_sampler": BatchSampler(DistributedSampler(range(100), 2, 1), 4, False)}, False),
        ({"dataset": Stream(), "num_replicas": 2, "rank": 1}, False),
        ({}, False),
    ],
)
def test_the_ranks_that_a_state_continues_on_are_told(options, changes):
    if "batch_sampler" in options:
        options = {"batch_size": 1, **options}
    state = saved(**options)
    assert fits_any_ranks(state) is changes


def test_any_workers_continue_what_depends_on_none():
    state = saved(seeding="batch")
    assert fits_any_workers(state)
    workers = tuple(worker._replace(remembers=True) for worker in state.position.workers)
    assert not fits_any_workers(state._replace(position=state.position._replace(workers=workers)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("dataset", [range(100), Stream(), Remembering(100)], ids=["map", "stream", "with a state"])
@pytest.mark.parametrize("taken", [0, 3])
def test_a_loader_takes_just_the_states_that_it_is_told_to_continue(num_workers, seeding, dataset, taken):
    state = saved(taken, num_workers=num_workers, seeding=seeding, dataset=dataset)
    if num_workers and isinstance(dataset, Remembering) and taken:
        workers = tuple(worker._replace(remembers=True) for worker in state.position.workers)
        state = state._replace(position=state.position._replace(workers=workers))
    for others in (0, 1):
        loader = DataLoader(dataset, batch_size=4, seeding=seeding, num_workers=others)
        assert loads(loader, state.pack()) is (bool(others) == bool(num_workers) or fits_any_workers(state))


@pytest.mark.parametrize("kind", ["loader", "torch's", "batches", "stream"])
def test_ranks_take_just_the_states_that_they_are_told_to_continue(kind):
    def options(count, rank):
        if kind == "torch's":
            return {"dataset": range(100), "sampler": DistributedSampler(range(100), count, rank), "batch_size": 4}
        if kind == "batches":
            return {
                "dataset": range(100),
                "batch_sampler": BatchSampler(DistributedSampler(range(100), count, rank), 4, False),
                "batch_size": 1,
            }
        dataset = Stream() if kind == "stream" else range(100)
        return {"dataset": dataset, "num_replicas": count, "rank": rank, "batch_size": 4}

    states = [saved(2, num_workers=0, **options(2, rank)) for rank in range(2)]
    packed = [state.pack() for state in states]
    for count in (2, 3):
        for rank in range(count):
            told = count == 2 or fits_any_ranks(states[0])
            assert loads(DataLoader(**options(count, rank)), packed) is told
            assert loads(DataLoader(**options(count, rank)), packed[1]) is ((count, rank) == (2, 1))


def loads(loader, packed):
    try:
        loader.load_state_dict(packed)
    except StateError:
        return False
    return True


# ---- two states


def test_a_state_is_the_same_after_it_was_saved():
    state = saved(digests=[1])
    assert described(state) == described(State.load(copy.deepcopy(state.pack())))


@pytest.mark.parametrize(
    ("options", "section"),
    [
        ({"taken": 4}, "position"),
        ({"seed": 2}, "position"),
        ({"batch_size": 5}, "fits"),
        ({"dataset": range(99)}, "fits"),
        ({"num_workers": 3}, "num_workers"),
        ({"digests": [1]}, "position"),
        ({"skip_steps": [3]}, "skip_steps"),
    ],
)
def test_states_that_differ_have_other_descriptions(options, section):
    assert described(saved(shuffle=True))[section] != described(saved(**{"shuffle": True, **options}))[section]
