"""Without workers: states in the trainer's process, what of the program's they move, and whom they do not fit.

The conformance suite has cases without workers, which are saved and loaded there.
"""

import itertools
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import replay_data as data
from checkpoint_data import batches, check, make, plain, read, run, save
from probes import Calls, as_is, oversubscribed
from rayloader import DataLoader, ReplayError, SkipLimitError, StateError


class Jitter:
    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self, samples):
        return [samples, self.generator.random()]


CASES = {
    "shuffled": lambda: {"dataset": data.Augmented(), "shuffle": True},
    "collate_fn with a generator": lambda: {"dataset": data.Augmented(), "collate_fn": Jitter()},
    "generator": lambda: {"dataset": data.WithGenerator(), "shuffle": True, "generator": torch.Generator()},
    "skipping": lambda: {"dataset": data.Raising(), "on_error": "skip"},
    "stream": lambda: {"dataset": data.StreamWithoutState()},
}


def seeded(case, number, num_workers=0, **options):
    """A loader of a program with this seed."""
    data.seed(number)
    return make(CASES[case], num_workers, seed=number, **options)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_from_every_point_the_batches_are_those_of_a_run_whose_state_nobody_takes(case, seeding):
    undisturbed = seeded(case, 1, seeding=seeding)
    expected = [list(batches(undisturbed)) for _ in range(3)]
    epochs, points = run(seeded(case, 1, seeding=seeding))
    assert epochs == expected
    for point in points[1::5]:
        check(epochs, point, seeded(case, 2, seeding=seeding))


# ---- what a state moves


def generators():
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("case", ["shuffled", "stream"])
def test_loading_moves_the_programs_generators_and_going_on_leaves_them_alone(case):
    """What the program does after loading counts."""
    loader = seeded(case, 1)
    next(iter(loader))
    saved, before = save(loader), generators()
    other = seeded(case, 2)
    other.load_state_dict(read(saved))
    assert generators() == before
    random.seed(5)
    before = generators()
    iterator = iter(other)
    assert generators() == before
    columns = plain(next(iterator))
    random.seed(5)
    assert random.random() in [column[0] for column in columns]


# ---- `seeding="batch"`: any number of workers, none included


@oversubscribed
def test_with_a_seed_for_each_batch_workers_make_no_difference(ray_session):
    options = {"seeding": "batch"}
    (epochs, points), (theirs, their_points) = (
        run(seeded("shuffled", 1, count, **options), slice(0, None, 9)) for count in (0, 2)
    )
    assert theirs == epochs
    for mine, their in zip(points, their_points, strict=True):
        check(epochs, mine, seeded("shuffled", 2, 2, **options))
        check(epochs, their, seeded("shuffled", 2, 0, **options))


@oversubscribed
def test_a_stream_seeded_by_batch_is_that_of_one_worker_and_leaves_the_programs_generators_alone(ray_session):
    expected = list(batches(seeded("stream", 1, 1, seeding="batch")))
    iterator = iter(seeded("stream", 1, seeding="batch"))
    before = generators()
    assert list(batches(iterator)) == expected
    assert generators() == before


# ---- what does not fit


def test_num_workers_that_are_set_after_loading_are_refused_too():
    loader = seeded("shuffled", 1)
    loader.load_state_dict(loader.state_dict())
    loader.num_workers, loader.prefetch_factor = 2, 2
    with pytest.raises(StateError, match=r"num_workers=0.* this one has .*own random generators"):
        iter(loader)


class Reads(IterableDataset):
    """Each reading is what a function returns."""

    def __init__(self, read):
        self.read = read

    def __iter__(self):
        return iter(self.read())


EPOCHS = itertools.count()
UNLIKE = {
    "entropy": lambda: os.urandom(20),
    "unseeded": lambda: np.random.default_rng().random(10).tolist(),
    "counts epochs": lambda: random.Random(next(EPOCHS)).sample(range(10), 10),
    "draws from the program": lambda: iter(lambda: torch.rand(1).item(), None),
}


@pytest.mark.parametrize("read", UNLIKE.values(), ids=UNLIKE)
def test_a_stream_that_cannot_be_read_again_is_an_error(read):
    loader = DataLoader(Reads(read), 3)
    iterator = iter(loader)
    next(iterator), torch.rand(1), next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ReplayError, match=r"gave something else than before.*whatever else draws from the global"):
        iter(loader)


def test_another_dataset_is_refused():
    loader = DataLoader(data.WithGenerator(), 4)
    next(iter(loader))
    with pytest.raises(StateError, match=r"generators of dataset and collate_fn: dataset\.generator is missing here"):
        DataLoader(data.Augmented(), 4).load_state_dict(loader.state_dict())


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
    def get(index):
        return index if index not in (1, 6, 7) else {}[index]

    loader = DataLoader(Calls(get, 10), 2, on_error="skip")
    assert [plain(batch) for batch in loader] == [[0], [2, 3], [4, 5], [8, 9]]
    assert loader.skipped == 3
    iterator = iter(DataLoader(Calls(get, 10), 2, on_error="skip", max_skipped=2))
    assert len([next(iterator) for _ in range(3)]) == 3
    for _ in range(2):
        with pytest.raises(SkipLimitError, match="3 samples have raised"):
            next(iterator)
