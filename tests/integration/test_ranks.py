"""Loaders of several ranks, with workers: their checkpoints, resumed with another number of ranks, and their parts.

tests/unit has more of both, without workers.
"""

import itertools
from collections import Counter

import torch
from torch.utils.data import DistributedSampler

from inside import kill_worker
from latches import Gate
from probes import Calls, oversubscribed
from rayloader import DataLoader
from wrapped_data import Told, places

pytestmark = oversubscribed
LENGTH = 48


def distributed(num_replicas, rank, function=torch.tensor, **options):
    sampler = DistributedSampler(range(LENGTH), num_replicas, rank)
    return DataLoader(Calls(function, LENGTH), 4, sampler=sampler, num_workers=2, **options)


def test_no_sample_of_the_epoch_is_lost_or_repeated_with_other_ranks(ray_session):
    seen, states = Counter(), None
    for num_replicas, taken in ((4, 1), (2, 1), (2, 1), (3, 99)):  # the same number goes on in the midst of its parts
        loaders, counts = [distributed(num_replicas, rank) for rank in range(num_replicas)], set()
        for loader in loaders:
            loader.set_epoch(2)
            if states is not None:
                loader.load_state_dict(states[::-1])
            found = [batch.tolist() for batch in itertools.islice(loader, taken)]
            seen.update(itertools.chain(*found))
            counts.add(len(found))
        assert len(counts) == 1
        states = [loader.state_dict() for loader in loaders]
    assert sorted(seen) == [*range(LENGTH)]
    assert seen.total() <= LENGTH + 2  # to give each rank as many


def test_without_order_what_was_taken_ahead_is_neither_lost_nor_repeated(tmp_path, ray_session):
    """Rank 0 waits for its first batch, and has taken two that come after it."""
    gate = Gate(tmp_path / "gate")
    first = next(iter(DistributedSampler(range(LENGTH), 2, 0)))

    def held(index):
        if index == first:
            gate.wait()
        return index

    seen, states, iterators = [], [], []
    for rank in range(2):
        loader = distributed(2, rank, held, in_order=False, prefetch_factor=4)
        iterators.append(iter(loader))
        for _ in range(2):
            seen += next(iterators[-1]).tolist()
        states.append(loader.state_dict())
    assert first not in seen
    gate.open()
    for rank in range(3):
        loader = distributed(3, rank, in_order=False)
        loader.load_state_dict(states)
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(set(seen)) == [*range(LENGTH)]
    assert len(seen) - LENGTH < 3  # as DistributedSampler repeats, to give each rank as many


def test_each_worker_of_each_rank_has_a_part_of_its_own_in_whatever_process_it_is(ray_session):
    found = []
    for rank in range(2):
        loader = DataLoader(Told(), None, num_workers=2, num_replicas=2, rank=rank)
        part = list(loader)
        next(iter(loader))
        resumed = DataLoader(Told(), None, num_workers=1, num_replicas=2, rank=rank)
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == part[1:], "the parts are those of the two workers that began"
        found += [number for number, _ in part]
    assert sorted(found) == [*places()]


def test_workers_learn_the_epoch_that_the_dataset_is_told_and_keep_it_after_a_kill():
    loader, alone = (DataLoader(Told(), None, num_workers=count, workers="fork") for count in (2, 0))
    for epoch in (4, 5):
        loader.set_epoch(epoch)
        alone.set_epoch(epoch)
        iterator = iter(loader)
        found = [next(iterator)]
        kill_worker(iterator)
        assert sorted([*found, *iterator]) == sorted(alone)
