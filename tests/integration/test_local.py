"""Without workers: states in the trainer's process, and what of the program's they move.

The conformance suite has cases without workers, which are saved and loaded there.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import checkpoint_data as data
from checkpoint_data import batches, check, make, plain, read, run, save
from probes import Calls, as_is, oversubscribed
from rayloader import DataLoader, ReplayError, SkipLimitError, StateError
from wrapped_data import IsItsIterator, Shuffled


class Jitter:
    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self, samples):
        return [samples, self.generator.random()]


CASES = {
    "shuffled": lambda: {"dataset": data.Augmented(), "shuffle": True, "generator": torch.Generator()},
    "collate_fn with a generator": lambda: {"dataset": data.Augmented(), "collate_fn": Jitter()},
    "own generators": lambda: {"dataset": data.OwnGenerators()},
    "stateful map": lambda: {"dataset": data.Counting()},
    "skipping map": lambda: {"dataset": data.Faulty(), "on_error": "skip"},
    "skipping stream": lambda: {"dataset": data.StreamOfStatefulIterators(faulty=True), "on_error": "skip"},
    "shuffled stream": lambda: {"dataset": data.Shuffled()},
    "own iterator": lambda: {"dataset": IsItsIterator(), "batch_size": None},
    "draws as it begins": lambda: {"dataset": Shuffled(), "batch_size": None},
}


def seed(number):
    random.seed(number)
    np.random.seed(number)


def elsewhere(arguments, **options):
    """A loader for which nothing is as it was where the state was saved."""
    seed(2)
    return make(arguments, 0, seed=2, **options)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_from_every_point_the_batches_are_those_of_a_run_whose_state_nobody_takes(case, seeding):
    def options():
        return {**CASES[case](), "seeding": seeding}

    seed(1)
    undisturbed = make(options, 0)
    expected = [list(batches(undisturbed)) for _ in range(data.EPOCHS)]
    seed(1)
    epochs, points = run(make(options, 0))
    assert epochs == expected
    for point in points[1::4]:
        check(epochs, point, elsewhere(options))


# ---- what a state moves


def generators():
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("case", ["shuffled", "shuffled stream"])
def test_loading_moves_the_programs_generators_and_going_on_leaves_them_alone(case):
    """What the program does after loading counts."""
    loader = make(CASES[case], 0)
    next(iter(loader))
    saved, before = save(loader), generators()
    other = elsewhere(CASES[case])
    other.load_state_dict(read(saved))
    assert generators() == before
    random.seed(5)
    before = generators()
    iterator = iter(other)
    assert generators() == before
    first = plain(next(iterator))
    random.seed(5)
    assert random.random() in (first[1][0], first[2][0])


# ---- `seeding="batch"`: any number of workers, none included


@oversubscribed
def test_with_a_seed_for_each_batch_workers_make_no_difference(ray_session):
    def loader(count, seed=1):
        return make(lambda: {"dataset": data.Noise(), "shuffle": True}, count, seed=seed, seeding="batch")

    (epochs, points), (theirs, their_points) = (run(loader(count), slice(0, None, 7)) for count in (0, 2))
    assert theirs == epochs
    for mine, their in zip(points, their_points, strict=True):
        check(epochs, mine, loader(2, seed=2))
        check(epochs, their, loader(0, seed=2))


@oversubscribed
def test_a_stream_seeded_by_batch_is_that_of_one_worker_and_leaves_the_programs_generators_alone(ray_session):
    local, one_worker = (make(CASES["draws as it begins"], count, seeding="batch") for count in (0, 1))
    expected = list(batches(one_worker))
    torch.manual_seed(1)
    iterator = iter(local)
    before = generators()
    assert list(batches(iterator)) == expected
    assert generators() == before


# ---- what does not fit


def test_num_workers_that_are_set_after_loading_are_refused_too():
    loader = make(CASES["shuffled"], 0)
    loader.load_state_dict(loader.state_dict())
    loader.num_workers, loader.prefetch_factor = 2, 2
    with pytest.raises(StateError, match="num_workers"):
        iter(loader)


class DrawsFromTheProgram(IterableDataset):
    def __iter__(self):
        while True:
            yield [torch.rand(1).item()]


@pytest.mark.parametrize("dataset", [data.Entropy, data.Unseeded, data.CountsEpochs, DrawsFromTheProgram])
def test_a_stream_that_cannot_be_read_again_is_an_error(dataset):
    loader = make(lambda: {"dataset": dataset()}, 0)
    iterator = iter(loader)
    next(iterator), torch.rand(1), next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ReplayError, match=r"gave something else than before.*whatever else draws from the global"):
        iter(loader)


def test_another_dataset_is_refused():
    loader = make(CASES["own generators"], 0)
    next(iter(loader))
    with pytest.raises(StateError, match=r"generators of dataset and collate_fn: dataset\.\w+.* is missing here"):
        elsewhere(CASES["shuffled"], generator=None, shuffle=False).load_state_dict(loader.state_dict())


class Unpicklable:
    def __init__(self, index):
        self.index = index

    def __reduce__(self):
        raise TypeError("not this one")


class OfUnpicklable:
    def __iter__(self):
        return map(Unpicklable, range(4))


def test_only_who_asks_for_a_state_pays_for_what_cannot_be_told():
    samples = Calls(lambda unpicklable: lambda: unpicklable.index, 4)  # batches need not be picklable either
    iterator = iter(loader := DataLoader(samples, None, sampler=OfUnpicklable(), collate_fn=as_is))
    assert next(iterator)() == 0
    with pytest.raises(StateError, match="not this one"):
        loader.state_dict()
    assert [sample() for sample in iterator] == [1, 2, 3]


# ---- skipped samples


def test_samples_that_raise_are_left_out_until_there_are_too_many():
    loader = make(CASES["skipping map"], 0)
    found = [plain(batch)[0] for batch in loader]
    assert found == [[0, 2], [3, 4, 5], [9, 10, 11], [12, 14], [15, 16, 17], [18, 19, 20], [21]]
    assert loader.skipped == 5
    iterator = iter(make(CASES["skipping map"], 0, max_skipped=2))
    assert len([next(iterator), next(iterator)]) == 2
    for _ in range(2):
        with pytest.raises(SkipLimitError, match="4 samples have raised"):
            next(iterator)
