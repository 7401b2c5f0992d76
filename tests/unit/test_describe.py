"""What a state is, in plain types and in words, and how two states differ."""

import json

import pytest
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler

from rayloader import DataLoader, StateError
from rayloader.replay.describe import described, differences, in_words, relation, together_in_words
from rayloader.resume.checkpoint import fits_any_ranks, fits_any_workers
from rayloader.resume.state import State
from states import Stream, of_ranks, saved


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


def words(state):
    return dict(in_words(described(state)))


def names(a, b):
    return [one.name for one in differences(described(a), described(b))]


# ---- what a state is


def test_a_description_is_complete_and_of_plain_types():
    found = described(saved(3, shuffle=True, skip_steps=[7, (2, 5)], digests=[10, 11]))
    assert json.loads(json.dumps(found)) == found
    assert found["position"].items() >= {"epoch": 0, "between_epochs": False, "next_step": 3, "taken": 3}.items()
    assert found["loader"] == {
        "batch_size": 4,
        "drop_last": False,
        "seeding": "worker",
        "scheduling": "static",
        "in_order": True,
    }
    assert found["dataset"] == {"kind": "map", "length": 100}
    assert [sampler["name"] for sampler in found["samplers"]] == ["BatchSampler", "RandomSampler"]
    assert found["workers"]["num_workers"] == 2
    assert found["workers"]["each"][0]["rebuilds"] == {"1": "0000000a", "2": "0000000b"}
    assert found["skip_steps"] == [[0, 7], [2, 5]]
    assert found["versions"].keys() >= {"python", "torch", "numpy"}
    assert found["seeds"]["now"]["torch_seed"] == 1
    assert found["ranks"] is None


def test_a_state_is_told_in_words():
    told = words(saved(3, shuffle=True, skip_steps=[7, 8, 9, 12, (2, 5)], digests=[10, 11]))
    assert told["position"] == "epoch 0, 3 batches taken; step 3 comes next"
    assert told["skip_steps"] == "epoch 0: 7-9, 12; epoch 2: 5"
    assert told["dataset"] == "a map-style dataset of 100 samples, in batches of 4"
    assert told["samplers"] == "BatchSampler of RandomSampler(replacement=False)"
    assert "base seed is" in told["seeds"]
    assert told["workers"].startswith('2 workers, scheduling="static"; when resumed, at most 2 of the batches')
    assert told["ranks"] == "not one of several ranks"
    assert told["saved with"].startswith("python 3.")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_sampler": BatchSampler(RandomSampler(range(100)), 8, False), "batch_size": 1}, "in batches of 8"),
        ({"batch_size": None}, "in batches as its sampler gives them"),
    ],
)
def test_batches_of_a_sampler_are_told_in_words(options, text):
    assert words(saved(**options))["dataset"] == f"a map-style dataset of 100 samples, {text}"


def test_a_state_without_workers_is_told_in_words():
    told = words(saved(0, num_workers=0, drop_last=True))
    assert told["position"] == "epoch 0 comes next"
    assert "skip_steps" not in told
    assert told["dataset"].endswith("in batches of 4, without an incomplete last one")
    assert told["workers"] == "none: the program itself builds the batches"


def test_the_states_of_all_ranks_are_told_together():
    told = dict(together_in_words([described(state) for state in of_ranks(6)]))
    assert told["position"] == "epoch 0, 3 batches taken; step 3 comes next"
    assert told["ranks"] == "0 to 5, of one loader"
    assert told["samplers"] == "BatchSampler of DistributedSampler(epoch=0, shuffle=True, seed=0)"
    assert told["continues on"].endswith("; all together on any number of ranks")


def test_ranks_that_differ_are_told_apart():
    states = of_ranks(3)
    states[1] = saved(2, num_replicas=3, rank=1, shuffle=True)
    told = dict(together_in_words([described(state) for state in states]))
    assert told["position"].splitlines() == [
        "ranks 0, 2: epoch 0, 3 batches taken; step 3 comes next",
        "rank 1: epoch 0, 2 batches taken; step 2 comes next",
    ]


def test_many_ranks_that_differ_are_told_in_short():
    states = [described(saved(rank + 1, num_replicas=6, rank=rank, batch_size=2)) for rank in range(6)]
    lines = dict(together_in_words(states))["position"].splitlines()
    assert len(lines) == 5
    assert lines[-1] == "and 2 more, see --json"


# ---- what it continues on


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "any num_workers from 1 on, with the rest of this epoch as 2 workers would build it"),
        ({"taken": 0}, "any num_workers from 1 on"),
        ({"num_workers": 0}, "num_workers=0 only"),
        ({"seeding": "batch"}, "any num_workers, 0 too"),
        ({"seeding": "batch", "num_workers": 0}, "any num_workers, 0 too"),
        ({"seeding": "batch", "dataset": Stream()}, "any num_workers from 1 on, with the rest of this epoch as 2"),
    ],
)
def test_the_workers_that_a_state_continues_on_are_told(options, text):
    assert words(saved(**options))["continues on"].startswith(text)


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
    text = words(state)["continues on"]
    assert ("on rank 1 of 2" in text) is (state.fits.num_replicas is not None)
    assert ("any number of ranks" in text) is changes


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
    on = described(state)["continues_on"]
    for others, told in ((0, on["no_workers"]), (1, on["workers"])):
        loader = DataLoader(dataset, batch_size=4, seeding=seeding, num_workers=others)
        assert loads(loader, state.pack()) is told


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
            told = count == 2 or described(states[0])["continues_on"]["other_ranks"]
            assert loads(DataLoader(**options(count, rank)), packed) is told
            assert loads(DataLoader(**options(count, rank)), packed[1]) is ((count, rank) == (2, 1))


def loads(loader, packed):
    try:
        loader.load_state_dict(packed)
    except StateError:
        return False
    return True


# ---- how two states differ


def test_a_state_is_the_same_after_it_was_saved():
    state = saved(digests=[1])
    assert names(state, State.load(json.loads(json.dumps(state.pack())))) == []


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        ({"taken": 4}, "position.next_step", "of the same epoch with the same seeds and order, at steps 3 and 4"),
        ({"seed": 2}, "seeds.base_seed", "of runs that began it with other seeds or another order"),
        ({"batch_size": 5}, "loader.batch_size", "of different loaders"),
        ({"dataset": range(99)}, "dataset.length", "of different loaders"),
        ({"skip_steps": [9]}, "skip_steps", "the same seeds, the same order and at the same step, 3"),
        ({"num_workers": 3}, "workers.num_workers", "the same seeds, the same order and at the same step, 3"),
        ({"taken": 0}, "position.taken", "Both are of epoch 0, and at least one of them is from before its first"),
        ({"taken": 25}, "position.epoch", "of different epochs, 0 and 1"),
    ],
)
def test_what_differs_is_named(options, name, text):
    a, b = saved(shuffle=True), saved(**{"shuffle": True, **options})
    if options == {"taken": 25}:
        b = b._replace(epoch=1)
    assert name in names(a, b)
    assert text in relation(a, b)


def test_states_of_two_ranks_are_told_apart():
    a, b = of_ranks(2)
    assert "ranks.rank" in names(a, b)
    assert relation(a, b) == "They are of different ranks, 0 and 1"


def test_other_indices_from_the_same_seeds_are_noticed():
    a = saved(shuffle=True)
    b = a._replace(position=a.position._replace(checksum=1))
    assert names(a, b) == ["position.indices_checksum"]
    assert "before step 3 the sampler gave other indices" in relation(a, b)


def test_a_version_that_changed_is_named():
    a = saved()
    b = a._replace(versions={**a.versions, "torch": "1.0"})
    assert [*differences(described(a), described(b))] == [("versions.torch", a.versions["torch"], "1.0")]


def test_a_batch_with_another_content_is_named():
    assert names(saved(4, digests=[1, 2]), saved(4, digests=[1, 3])) == ["workers.each[0].rebuilds.3"]


def test_when_snapshots_were_taken_is_no_difference():
    assert names(saved(4, digests=[1, 2]), saved(4, digests=[2])) == []
    assert names(saved(4, digests=[1, 2]), saved(4, digests=[3])) == ["workers.each[0].rebuilds.3"]
