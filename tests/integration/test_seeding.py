"""Random streams by batch instead of by worker, and batches dealt out to whoever is idle."""

import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from latches import Gate
from probes import Calls, Stream, as_is, load, oversubscribed
from rayloader import DataLoader

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]


def noisy(index):
    return index, random.random(), torch.rand(1).item(), np.random.rand()


def batches(num_workers, epochs=2, seed=7, **options):
    """Each epoch's batches, from this seed."""
    torch.manual_seed(seed)
    loader = load(noisy, 12, num_workers, seeding="batch", **options)
    return [list(loader) for _ in range(epochs)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
@pytest.mark.parametrize("prefetch_factor", [None, pytest.param(1, marks=pytest.mark.full), 4])
def test_batches_depend_on_the_seed_alone(scheduling, persistent, prefetch_factor):
    options = {"scheduling": scheduling, "persistent_workers": persistent, "prefetch_factor": prefetch_factor}
    expected = batches(1, persistent_workers=persistent)
    for num_workers in (1, 2, 3):
        assert batches(num_workers, **options) == expected


def test_every_batch_and_epoch_has_numbers_of_its_own():
    for persistent in (False, True):
        drawn = [
            number for epoch in batches(2, persistent_workers=persistent) for batch in epoch for number in batch[1:]
        ]
        assert len(set(drawn)) == len(drawn) == 2 * 12 * 3
    assert batches(2, seed=8) != batches(2, seed=7)


def seeds(index):
    return torch.initial_seed(), get_worker_info().seed if get_worker_info() else 0


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"workers": "fork"}, {"workers": "ray"}])
def test_samples_may_hold_the_seeds(options, seeding):
    torch.manual_seed(3)
    loader = DataLoader(Calls(seeds, 16), 1, seeding=seeding, **{"num_workers": 2, **options})
    for initial, of_worker in loader:
        assert 0 <= initial.item() < 2**63
        assert 0 <= of_worker.item() < 2**63


def test_persistent_workers_that_were_broken_off_go_on_in_step():
    def epochs(num_workers, taken):
        torch.manual_seed(1)
        loader = load(noisy, 12, num_workers, seeding="batch", persistent_workers=True)
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        return list(loader)

    assert epochs(1, 2) == epochs(2, 5) == epochs(3, 11)


def test_streams_may_be_seeded_by_batch():
    def numbers(_):
        while True:
            yield torch.rand(1).item()

    def first(worker_count):
        torch.manual_seed(4)
        iterator = iter(DataLoader(Stream(numbers), None, num_workers=worker_count, seeding="batch"))
        return [next(iterator) for _ in range(8)]

    assert first(1) == first(2)


def test_a_slow_sample_holds_up_what_its_worker_was_given_and_nothing_else(tmp_path):
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 0:
            gate.wait()
        return os.getpid()

    iterator = iter(load(get, 16, 2, scheduling="dynamic", seeding="batch", prefetch_factor=8, timeout=1.0))
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)  # meanwhile the other worker builds the rest of the window
    gate.open()
    pids = list(iterator)
    assert len(pids) == 16
    assert 0 < pids.count(pids[0]) < 8


def test_an_error_and_its_note_under_dynamic_scheduling():
    def get(index):
        if index == 5:
            raise KeyError("five")
        return index

    iterator = iter(load(get, 12, 2, scheduling="dynamic", seeding="batch"))
    assert [next(iterator) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError) as raised:
        next(iterator)
    assert "batch 5, worker" in raised.value.__notes__[0]
    assert list(iterator) == [6, 7, 8, 9, 10, 11]


def test_dynamic_without_order_gives_everything_once():
    found = list(load(lambda index: index, 50, 3, scheduling="dynamic", seeding="batch", in_order=False))
    assert sorted(found) == list(range(50))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (range(4), {"seeding": "sample"}, "seeding must be 'worker' or 'batch', got 'sample'"),
        (range(4), {"scheduling": None}, "scheduling must be 'static' or 'dynamic', got None"),
        (range(4), {"scheduling": "dynamic"}, "needs seeding=.* and a map-style dataset"),
        (Endless(), {"scheduling": "dynamic", "seeding": "batch"}, 'and a map-style dataset; or use "static"'),
    ],
)
def test_what_does_not_go_together_is_refused(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        DataLoader(dataset, num_workers=1, **options)
    loader = DataLoader(dataset, num_workers=1, collate_fn=as_is)
    for name, value in options.items():
        setattr(loader, name, value)
    with pytest.raises(ValueError, match=message):
        iter(loader)


def test_the_default_is_torchs():
    loader = DataLoader(Calls(noisy), num_workers=2)
    assert (loader.seeding, loader.scheduling) == ("worker", "static")
