"""Checkpoints of several ranks, resumed with another number of ranks."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from latches import Gate
from rayloader import DataLoader, StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("ignore:This DataLoader will create")]
DATA = torch.arange(48)


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


def test_a_list_of_as_many_ranks_is_each_ranks_own_state():
    states = [take(rank_of(2, rank), 2, epoch=1)[1] for rank in range(2)]
    for rank in range(2):
        loader, alone = rank_of(2, rank), rank_of(2, rank)
        loader.load_state_dict(states)
        alone.load_state_dict(states[rank])
        assert torch.equal(torch.cat(list(loader)), torch.cat(list(alone)))


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


@pytest.mark.parametrize("batches", [0, 1])
def test_states_of_another_shuffle_are_refused(batches):
    states = [take(rank_of(2, rank, seed=1), batches, epoch=0)[1] for rank in range(2)]
    for num_replicas in (2, 3):
        with pytest.raises(StateError, match=r"seed=1 .* is 0 here"):
            rank_of(num_replicas, 0).load_state_dict(states)


def test_states_of_an_order_that_is_not_drawn_again_are_refused():
    """The sampler's own dataset has another length, of which its attributes say nothing in one of three ranks."""
    states = [take(rank_of(2, rank), 1, epoch=0)[1] for rank in range(2)]
    loader = rank_of(3, 0)
    loader.sampler.dataset = DATA[:-1]
    with pytest.raises(StateError, match="rank 0 got before"):
        loader.load_state_dict(states)


def test_what_does_not_belong_together_is_refused():
    states = [take(rank_of(2, rank), 1, epoch=1)[1] for rank in range(2)]
    with pytest.raises(StateError, match=r"num_replicas=2, this one has 3.*list of all ranks"):
        rank_of(3, 0).load_state_dict(states[0])
    with pytest.raises(StateError, match="rank=0, this one has 1"):
        rank_of(2, 1).load_state_dict(states[0])
    with pytest.raises(StateError, match="one state of each rank"):
        rank_of(3, 0).load_state_dict(states[:1])
    with pytest.raises(StateError, match="different epochs"):
        rank_of(3, 0).load_state_dict([states[0], take(rank_of(2, 1), 1, epoch=2)[1]])
    with pytest.raises(StateError, match="DistributedSampler"):
        DataLoader(DATA, 4, num_workers=1).load_state_dict(states)
