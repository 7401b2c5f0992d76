"""Without workers: states in the trainer's process, what of the program's they move, and whom they do not fit.

The conformance suite has cases without workers, which are saved and loaded there.
"""

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import replay_data as data
import stateful
from checkpoint_data import check, make, plain, read, run, save
from probes import Calls, as_is, oversubscribed
from rayloader import DataLoader, ReplayError, SkipLimitError, StateError


class Reads(IterableDataset):
    """Each reading is what a function returns."""

    def __init__(self, read):
        self.read = read

    def __iter__(self):
        return iter(self.read())


CASES = {
    "shuffled": lambda: {"dataset": data.Augmented(), "shuffle": True},
    "generator": lambda: {"dataset": stateful.OwnGenerators(), "shuffle": True, "generator": torch.Generator()},
    "skipping": lambda: {"dataset": stateful.Faulty(), "on_error": "skip"},
    "stream": lambda: {"dataset": Reads(lambda: ((number, random.random()) for number in range(12)))},
}


def seeded(case, number, num_workers=0, **options):
    """A loader of a program with this seed."""
    data.seed(number)
    return make(CASES[case], num_workers, seed=number, **options)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_from_every_point_the_batches_are_those_of_the_run(case, seeding):
    epochs, points = run(seeded(case, 1, seeding=seeding))
    for point in points[1::5]:
        check(epochs, point, seeded(case, 2, seeding=seeding))


@oversubscribed
@pytest.mark.parametrize(("case", "num_workers"), [("shuffled", 2), ("stream", 1)])
def test_with_a_seed_for_each_batch_workers_make_no_difference(case, num_workers):
    """A stream is that of one worker. The program's generators are left alone."""
    options = {"seeding": "batch", "workers": "fork"}
    epochs, points = run(seeded(case, 1, **options), slice(0, None, 9))
    before = generators()
    theirs, their_points = run(seeded(case, 1, num_workers, **options), slice(0, None, 9))
    assert (theirs, len(points)) == (epochs, len(their_points))
    assert generators() == before
    if case == "shuffled":
        for mine, their in zip(points, their_points, strict=True):
            check(epochs, mine, seeded(case, 2, num_workers, **options))
            check(epochs, their, seeded(case, 2, **options))


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


# ---- what does not fit


def test_num_workers_that_are_set_after_loading_are_refused_too():
    loader = seeded("shuffled", 1)
    loader.load_state_dict(loader.state_dict())
    loader.num_workers, loader.prefetch_factor = 2, 2
    with pytest.raises(StateError, match=r"num_workers=0.* this one has .*own random generators"):
        iter(loader)


def from_the_program():
    return Reads(lambda: iter(lambda: torch.rand(1).item(), None))


@pytest.mark.parametrize("stream", [stateful.Entropy, stateful.CountsEpochs, from_the_program])
def test_a_stream_that_cannot_be_read_again_is_an_error(stream):
    loader = DataLoader(stream(), 3)
    iterator = iter(loader)
    next(iterator), torch.rand(1), next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ReplayError, match=r"gave something else than before.*whatever else draws from the global"):
        iter(loader)


def test_another_dataset_is_refused():
    loader = DataLoader(stateful.OwnGenerators(), 4)
    next(iter(loader))
    with pytest.raises(StateError, match=r"generators of dataset and collate_fn: dataset\.\w+ is missing here"):
        DataLoader(stateful.Indices(), 4).load_state_dict(loader.state_dict())


def test_only_who_asks_for_a_state_pays_for_what_cannot_be_told():
    given = [threading.Lock(), threading.Lock()]  # neither these indices nor the batches can be pickled
    iterator = iter(loader := DataLoader(Calls(as_is), None, sampler=given, collate_fn=as_is))
    assert next(iterator) is given[0]
    with pytest.raises(StateError, match="pickle"):
        loader.state_dict()
    assert list(iterator) == given[1:]


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
