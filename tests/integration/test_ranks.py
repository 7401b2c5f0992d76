"""Loaders of several ranks, with workers: their checkpoints, resumed with another number of ranks, and their parts.

tests/unit has more of both, without workers.
"""

from collections import Counter

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

from inside import kill_worker
from latches import Gate
from rayloader import DataLoader, get_shard_info

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("ignore:This DataLoader will create")]
DATA = torch.arange(48)


def distributed(num_replicas, rank, dataset=DATA, **options):
    return DataLoader(dataset, 4, sampler=DistributedSampler(DATA, num_replicas, rank), num_workers=2, **options)


def weighted(num_replicas, rank):
    torch.manual_seed(rank)
    sampler = WeightedRandomSampler(range(1, 49), 48)
    return DataLoader(DATA, 4, sampler=sampler, num_workers=2, num_replicas=num_replicas, rank=rank)


@pytest.mark.parametrize("make", [distributed, weighted])
def test_no_sample_of_the_epoch_is_lost_or_repeated_with_other_ranks(make):
    whole = make(1, 0)
    whole.set_epoch(2)
    expected = Counter(torch.cat(list(whole)).tolist())
    seen, states = Counter(), None
    for num_replicas, taken in ((4, 1), (2, 1), (2, 1), (3, 99)):  # the same number goes on in the midst of its parts
        loaders, counts = [make(num_replicas, rank) for rank in range(num_replicas)], []
        for loader in loaders:
            loader.set_epoch(2)
            if states is not None:
                loader.load_state_dict(states[::-1])
            counts.append(0)
            for batch in loader:
                seen.update(batch.tolist())
                counts[-1] += 1
                if counts[-1] == taken:
                    break
        assert len({*counts}) == 1
        states = [loader.state_dict() for loader in loaders]
    assert not expected - seen
    assert (seen - expected).total() <= 2  # to give each rank as many


class Held(Dataset):
    """The same numbers; one of them is held back until the gate is open."""

    def __init__(self, held, gate):
        self.held, self.gate = held, gate

    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        if index == self.held:
            self.gate.wait()
        return DATA[index]


def test_without_order_what_was_taken_ahead_is_neither_lost_nor_repeated(tmp_path):
    """Rank 0 waits for its first batch, and has taken two that come after it."""
    gate = Gate(tmp_path / "gate")
    first = next(iter(DistributedSampler(DATA, 2, 0)))
    seen, states, iterators = [], [], []
    for rank in range(2):
        loader = distributed(2, rank, Held(first, gate), in_order=False, prefetch_factor=4)
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
    assert sorted(set(seen)) == DATA.tolist()
    assert len(seen) - len(set(seen)) < 3  # as DistributedSampler repeats, to give each rank as many


# ---- parts of iterable datasets, and the epoch


class Records(IterableDataset):
    """Its part, with what it was told."""

    def __iter__(self):
        shard = get_shard_info()
        yield from ((n, shard.rank, shard.worker_id) for n in range(shard.index, 20, shard.count))


def test_each_worker_of_each_rank_has_a_part_of_its_own_in_whatever_process_it_is():
    found = []
    for rank in range(2):
        loader = DataLoader(Records(), None, num_workers=2, num_replicas=2, rank=rank)
        part = list(loader)
        next(iter(loader))
        resumed = DataLoader(Records(), None, num_workers=1, num_replicas=2, rank=rank)
        resumed.load_state_dict(loader.state_dict())
        assert list(resumed) == part[1:], "the parts are those of the two workers that began"
        found += map(tuple, part)
    assert sorted(found) == [(n, n % 4 // 2, n % 2) for n in range(20)]


class OfEpoch(Dataset):
    """Samples say the epoch."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.epoch, index


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_learn_the_epoch_that_the_dataset_is_told_and_keep_it_after_a_kill(persistent):
    """So does a state of persistent workers."""

    def make():
        return DataLoader(OfEpoch(), 2, num_workers=2, persistent_workers=persistent)

    loader, expected = make(), [[i, i + 1] for i in range(0, 16, 2)]
    for epoch in (4, 5, 6):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        found = [next(iterator)]
        if epoch > 4:
            kill_worker(iterator)
        state = loader.state_dict()
        found += iterator
        assert [(e.tolist(), i.tolist()) for e, i in found] == [([epoch] * 2, indices) for indices in expected]
    if persistent:
        again = make()
        again.load_state_dict(state)
        assert [(e.tolist(), i.tolist()) for e, i in again] == [([6, 6], indices) for indices in expected[1:]]
