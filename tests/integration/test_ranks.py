"""Loaders of several ranks, with workers: their checkpoints, resumed with another number of ranks, and their parts.

tests/unit has more of both, without workers.
"""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler

import programs
from inside import kill_worker
from latches import Gate
from rayloader import DataLoader, StateError, get_shard_info

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("ignore:This DataLoader will create")]
DATA = torch.arange(48)
FULL = pytest.mark.full


def rank_of(num_replicas, rank, seed=0, dataset=DATA, **options):
    sampler = DistributedSampler(DATA, num_replicas, rank, seed=seed)
    return DataLoader(dataset, 4, sampler=sampler, num_workers=2, **options)


def take(loader, batches, epoch):
    """The samples of the first batches, and the state after them."""
    loader.sampler.set_epoch(epoch)
    samples, iterator = [], iter(loader)
    for _ in range(batches):
        samples += next(iterator).tolist()
    return samples, loader.state_dict()


def test_no_sample_of_the_epoch_is_lost_or_repeated_with_other_ranks():
    first = [take(rank_of(4, rank), 1, epoch=2) for rank in range(4)]
    states = [state for _, state in first]
    seen = [sample for samples, _ in first for sample in samples]
    second = []
    for rank in range(2):
        loader = rank_of(2, rank)
        loader.load_state_dict(states)
        samples, state = take(loader, 2, epoch=0)  # the state's epoch counts
        seen += samples
        second.append(state)
    for rank in range(4):
        loader = rank_of(4, rank)
        loader.load_state_dict(second[::-1])
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(seen) == DATA.tolist()


def weighted(num_replicas, rank):
    torch.manual_seed(rank)
    return DataLoader(
        DATA, 4, sampler=WeightedRandomSampler(range(1, 49), 48), num_workers=2, num_replicas=num_replicas, rank=rank
    )


def by_batches(num_replicas, rank):
    torch.manual_seed(rank)
    sampler = BatchSampler(WeightedRandomSampler(range(1, 49), 48), 4, drop_last=False)
    return DataLoader(DATA, batch_sampler=sampler, num_workers=2, num_replicas=num_replicas, rank=rank)


@pytest.mark.parametrize(
    ("make", "num_replicas"),
    [(weighted, 2), (by_batches, 3), pytest.param(weighted, 3, marks=FULL), pytest.param(by_batches, 2, marks=FULL)],
)
def test_with_any_sampler_what_four_ranks_have_not_taken_goes_to_others(make, num_replicas):
    whole = order_in_epoch(2)
    seen = []
    states = []
    for rank in range(4):
        loader = make(4, rank)
        loader.set_epoch(2)
        iterator = iter(loader)
        seen += next(iterator).tolist()
        states.append(loader.state_dict())
    steps = []
    for rank in range(num_replicas):
        loader = make(num_replicas, rank)
        loader.load_state_dict(states)
        rest = [batch.tolist() for batch in loader]
        steps.append(len(rest))
        seen += itertools.chain.from_iterable(rest)
    assert not Counter(whole) - Counter(seen)
    assert len(set(steps)) == 1
    assert len(seen) - 48 <= (num_replicas - 1) * (4 if make is by_batches else 1)


def order_in_epoch(epoch):
    """What all ranks get together."""
    loader = DataLoader(DATA, 1, sampler=WeightedRandomSampler(range(1, 49), 48), num_replicas=1, rank=0)
    loader.set_epoch(epoch)
    return [int(batch) for batch in loader]


def test_in_the_middle_of_what_was_dealt_anew_each_rank_goes_on():
    states = [take(rank_of(4, rank), 1, epoch=2)[1] for rank in range(4)]
    loader = rank_of(2, 1)
    loader.load_state_dict(states)
    samples, state = take(loader, 1, epoch=0)
    rest = [sample for batch in loader_at(state) for sample in batch.tolist()]
    again = rank_of(2, 1)
    again.load_state_dict(states)
    assert samples + rest == [sample for batch in again for sample in batch.tolist()]


def loader_at(state):
    loader = rank_of(2, 1)
    loader.load_state_dict(state)
    return loader


class Held(torch.utils.data.Dataset):
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
        loader = rank_of(2, rank, dataset=Held(first, gate), in_order=False, prefetch_factor=4)
        iterators.append(iter(loader))
        for _ in range(2):
            seen += next(iterators[-1]).tolist()
        states.append(loader.state_dict())
    assert first not in seen
    gate.open()
    for rank in range(3):
        loader = rank_of(3, rank, in_order=False)
        loader.load_state_dict(states)
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert sorted(set(seen)) == DATA.tolist()
    assert len(seen) - len(set(seen)) < 3  # as DistributedSampler repeats, to give each rank as many


def test_states_of_an_order_that_is_not_drawn_again_are_refused():
    """The sampler's own dataset has another length, of which its attributes say nothing in one of three ranks."""
    states = [take(rank_of(2, rank), 1, epoch=0)[1] for rank in range(2)]
    loader = rank_of(3, 0)
    loader.sampler.dataset = DATA[:-1]
    with pytest.raises(StateError, match="rank 0 got before"):
        loader.load_state_dict(states)


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


def test_that_all_ranks_read_the_same_is_told_in_the_log(tmp_path):
    """Where a worker logs: that of a fork is the program's standard error."""
    program = tmp_path / "program.py"
    program.write_text(
        "from torch.utils.data import IterableDataset\n"
        "from rayloader import DataLoader\n"
        "class Unaware(IterableDataset):\n"
        "    def __iter__(self):\n"
        "        return iter(range(3))\n"
        "list(DataLoader(Unaware(), None, num_workers=2, num_replicas=2, rank=0))\n"
    )
    done = programs.run(program)
    assert done.stderr.count("Unaware did not ask for its part") == 1


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
    loader = DataLoader(OfEpoch(), 2, num_workers=2, persistent_workers=persistent)
    for epoch in (4, 5, 6):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        found = [next(iterator)]
        if epoch > 4:
            kill_worker(iterator)
        found += iterator
        assert [(e.tolist(), i.tolist()) for e, i in found] == [([epoch] * 2, [i, i + 1]) for i in range(0, 16, 2)]


def test_a_state_of_persistent_workers_says_the_epoch_of_their_dataset():
    loader = DataLoader(OfEpoch(), 2, num_workers=2, persistent_workers=True)
    list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    again = DataLoader(OfEpoch(), 2, num_workers=2, persistent_workers=True)
    again.load_state_dict(loader.state_dict())
    assert [epoch.tolist() for epoch, _ in again] == [[7, 7]] * 7
