"""What the command line measures, how it sums that up, and what it recommends from given rates."""

import re

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from rayloader import DataLoader
from rayloader.cli.bench import ROUNDS, Rate, fastest, for_step, numbers_of_workers, spread
from rayloader.cli.bench import rates_of_rounds as of_rounds
from rayloader.cli.given import Subject


def rate(num_workers, batches, wait_share=0.5):
    return Rate(num_workers, 1.0, batches, batches, batches, wait_share)


@pytest.mark.parametrize(
    ("most", "numbers"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])]
)
def test_numbers_of_workers_double_up_to_the_most(most, numbers):
    assert numbers_of_workers(most) == numbers


@pytest.mark.parametrize(
    ("measured", "number", "reason"),
    [
        ({0: 10.0}, 0, "10.0 batches a second with 0 workers, the most of those tried"),
        ({0: 10.0, 1: 19.5, 2: 20.0}, 1, "19.5 batches a second with 1 worker, 98% of the rate with 2 workers"),
        ({0: 1.0, 4: 50.0, 8: 40.0}, 4, "50.0 batches a second with 4 workers, the most of those tried"),
    ],
)
def test_the_fewest_workers_that_are_about_as_fast_as_any(measured, number, reason):
    assert fastest([rate(workers, batches) for workers, batches in measured.items()]) == (number, reason)


@pytest.mark.parametrize(
    ("measured", "number", "reason"),
    [
        (
            [(10.0, 0.6), (15.0, 0.1), (20.0, 0.01)],
            2,
            "with 2 workers a trainer of 50 ms a step waits 1.0% of its time",
        ),
        ([(10.0, 0.6), (15.0, 0.1)], 1, "even with 1 worker a trainer of 50 ms a step waits 10% .*: try more workers"),
        ([(10.0, 0.6), (15.0, 0.1), (14.0, 0.2)], 1, "even with 1 worker .*: more workers did not help; make the"),
    ],
)
def test_for_a_step_the_fewest_workers_with_which_the_trainer_hardly_waits(measured, number, reason):
    found, said = for_step([rate(workers, *one) for workers, one in enumerate(measured)], 0.05)
    assert found == number
    assert re.match(reason, said)


# ---- the spread


def test_rounds_have_equally_many_batches_and_few_batches_are_a_round_each():
    ends = [0.0]
    for seconds in [1.0, 2.0, 4.0, 5.0, 10.0]:
        ends += [ends[-1] + seconds * (batch + 1) / 20 for batch in range(20)]
    assert len(of_rounds(ends)) == ROUNDS
    assert of_rounds(ends) == pytest.approx([20.0, 10.0, 5.0, 4.0, 2.0])
    for batches in (1, 2, 4):
        assert of_rounds([2.0 * number for number in range(batches + 1)]) == [0.5] * batches
    assert spread(Rate(2, 1.0, 1234.56, 900.0, 1300.0, 0.0)) == "1,235 (900-1,300)"


# ---- what is measured


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def collate(samples):
    return torch.tensor(samples) * 2


def dropped(_):
    """Is there to be found again."""


GIVEN = {
    "batches": {"dataset": range(7), "batch_size": 3, "drop_last": True, "collate_fn": collate},
    "order": {"dataset": range(7), "batch_size": 3, "sampler": [6, 5, 4, 3]},
    "own batches": {"dataset": range(7), "batch_sampler": [[0], [3, 4]]},
    "samples": {"dataset": range(7), "batch_size": None, "sampler": [6, 5]},
    "stream": {"dataset": Stream(), "batch_size": 3, "drop_last": True},
    "workers": {
        **{"dataset": range(7), "num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "timeout": 5},
        **{"worker_init_fn": dropped, "multiprocessing_context": "fork"},
    },
}


@pytest.mark.parametrize("loader_class", [TorchDataLoader, DataLoader])
@pytest.mark.parametrize("name", GIVEN)
def test_a_loader_is_measured_as_it_is(loader_class, name):
    given = loader_class(**GIVEN[name])
    subject = Subject(given)
    of_workers = {"num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
    local = TorchDataLoader(**{key: value for key, value in GIVEN[name].items() if key not in of_workers})
    batches = [*map(str, local)]
    for kind, made in [("torch", TorchDataLoader), ("rayloader", DataLoader)]:
        loader = subject.loader(kind, 0)
        assert type(loader) is made
        assert [*map(str, loader)] == batches
        loader = subject.loader(kind, 2)
        assert loader.num_workers == 2
        for argument in ("prefetch_factor", "persistent_workers", "timeout", "worker_init_fn"):
            assert getattr(loader, argument) == getattr(loader_class(**{"num_workers": 1, **GIVEN[name]}), argument)


def test_a_loaders_own_arguments_and_rank_count_once_and_a_dataset_is_loaded_in_batches_of_32_samples():
    given = DataLoader(range(16), 2, num_replicas=2, rank=1, shuffle=False, seeding="batch", name="mine")
    forks = Subject(given).loader("rayloader", 1, "fork")
    assert (forks.workers, forks.seeding, forks.name) == ("fork", "batch", "mine")
    for kind in ("torch", "rayloader"):
        assert [batch.tolist() for batch in Subject(given).loader(kind, 0)] == [batch.tolist() for batch in given]
    assert [*map(len, Subject(range(64)).loader("torch", 0))] == [32, 32]
