"""Random streams by batch instead of by worker, and batches dealt out to whoever is idle."""

import itertools
import os
import random

import numpy as np
import pytest
import torch

from latches import Gate
from probes import Stream, load, oversubscribed
from rayloader import DataLoader

pytestmark = oversubscribed


def noisy(index):
    return index, random.random(), torch.rand(1).item(), np.random.rand()


def batches(num_workers, epochs=2, seed=7, taken=0, **options):
    """Each epoch's batches, from this seed; the first one may be broken off before."""
    torch.manual_seed(seed)
    loader = load(noisy, 12, num_workers, seeding="batch", **options)
    if taken:
        list(itertools.islice(loader, taken))
    return [list(loader) for _ in range(epochs)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("scheduling", "prefetch_factor"), [("static", None), ("dynamic", 4)])
def test_batches_depend_on_the_seed_alone(scheduling, persistent, prefetch_factor, ray_session):
    options = {"scheduling": scheduling, "persistent_workers": persistent, "prefetch_factor": prefetch_factor}
    expected = batches(1, persistent_workers=persistent)
    drawn = [number for epoch in expected for batch in epoch for number in batch[1:]]
    assert len(set(drawn)) == len(drawn) == 2 * 12 * 3  # numbers of its own for every batch and epoch
    for num_workers in (2, 3):
        assert batches(num_workers, **options) == expected
    assert batches(2, epochs=1, seed=8, **options)[0] not in expected


def test_persistent_workers_that_were_broken_off_go_on_in_step(ray_session):
    first, second = (batches(count, 1, taken=taken, persistent_workers=True) for count, taken in ((1, 2), (3, 11)))
    assert first == second


def test_streams_may_be_seeded_by_batch(ray_session):
    def numbers(_):
        while True:
            yield torch.rand(1).item()

    def first(worker_count):
        torch.manual_seed(4)
        iterator = iter(DataLoader(Stream(numbers), None, num_workers=worker_count, seeding="batch"))
        return [next(iterator) for _ in range(8)]

    assert first(1) == first(2)


def test_a_slow_sample_holds_up_what_its_worker_was_given_and_nothing_else(tmp_path, ray_session):
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


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (range(4), {"seeding": "sample"}, "seeding must be 'worker' or 'batch', got 'sample'"),
        (range(4), {"scheduling": None}, "scheduling must be 'static' or 'dynamic', got None"),
        (range(4), {"scheduling": "dynamic"}, "needs seeding=.* and a map-style dataset"),
        (Stream(None), {"scheduling": "dynamic", "seeding": "batch"}, 'and a map-style dataset; or use "static"'),
    ],
)
def test_what_does_not_go_together_is_refused(dataset, options, message):
    with pytest.raises(ValueError, match=message):
        DataLoader(dataset, num_workers=1, **options)
    loader = DataLoader(dataset, num_workers=1)
    for name, value in options.items():
        setattr(loader, name, value)
    with pytest.raises(ValueError, match=message):
        iter(loader)
