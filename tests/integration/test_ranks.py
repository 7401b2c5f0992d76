"""Checkpoints of several ranks, resumed with another number of ranks."""

import pytest
import torch
from torch.utils.data import DistributedSampler

from rayloader import DataLoader, StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("ignore:This DataLoader will create")]
DATA = torch.arange(48)


def rank_of(num_replicas, rank, **options):
    sampler = DistributedSampler(DATA, num_replicas, rank)
    return DataLoader(DATA, 4, sampler=sampler, num_workers=2, **options)


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
