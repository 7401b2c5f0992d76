"""States of all ranks, resumed with another number of ranks, without workers; tests/integration has some with."""

from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from rayloader import DataLoader, StateError

DATA = torch.arange(48)


class Buckets(Sampler):
    """Batches of 1 to 6 samples."""

    def __iter__(self):
        order = torch.randperm(48).tolist()
        while order:
            size = 1 + len(order) % 6
            yield order[:size]
            del order[:size]

    def __len__(self):
        left, count = 48, 0
        while left > 0:
            left, count = left - 1 - left % 6, count + 1
        return count


def held(seed=3):
    return torch.Generator().manual_seed(seed)


# What a loader is given beside the ranks, anew for each.
KINDS = {
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "no shuffle": lambda: {"batch_size": 4},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "with replacement": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 48, 48)},
    "generator": lambda: {"batch_size": 4, "sampler": RandomSampler(DATA, generator=held())},
    "replacement and generator": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(DATA, replacement=True, generator=held()),
    },
    "batch sampler": lambda: {"batch_sampler": Buckets()},
    "torch's batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA, generator=held()), 4, False)},
}


def rank_of(kind, num_replicas, rank, **options):
    torch.manual_seed(rank)
    return DataLoader(DATA, **KINDS[kind](), num_replicas=num_replicas, rank=rank, seed=1, **options)


def samples(batch):
    return batch.reshape(-1).tolist()


def whole(kind, epochs):
    """What all get together in the last of so many epochs."""
    loader = rank_of(kind, 1, 0)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        found = [sample for batch in loader for sample in samples(batch)]
    return found


def begun(kind, num_replicas, epochs, batches):
    """Of each rank what it took of the last epoch, and its state."""
    taken = []
    for rank in range(num_replicas):
        loader = rank_of(kind, num_replicas, rank)
        for epoch in range(epochs - 1):
            loader.set_epoch(epoch)
            list(loader)
        loader.set_epoch(epochs - 1)
        iterator = iter(loader)
        taken.append(([sample for _ in range(batches) for sample in samples(next(iterator))], loader.state_dict()))
    return taken


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_replicas", "batches"),
    [(2, 2), (3, 0), *(pytest.param(*full, marks=pytest.mark.full) for full in [(1, 2), (2, 0), (3, 2), (1, 0)])],
)
def test_nothing_of_the_epoch_is_lost_or_repeated_with_other_ranks(kind, num_replicas, batches):
    expected = Counter(whole(kind, 3))
    before = begun(kind, 4, epochs=3, batches=batches)
    found = Counter(sample for taken, _ in before for sample in taken)
    states = [state for _, state in before]
    loaders = [rank_of(kind, num_replicas, rank) for rank in range(num_replicas)]
    parts = []
    for loader in loaders:
        loader.load_state_dict(states[::-1])
        parts.append([samples(batch) for batch in loader])
    found += Counter(sample for part in parts for batch in part for sample in batch)
    assert not expected - found
    assert len({len(part) for part in parts}) == 1
    most = 6 if "batch sampler" in kind else 1  # samples in what is dealt
    assert (found - expected).total() <= (num_replicas - 1) * most
    # The epoch after it, by the samplers' generators, is the one that would have followed.
    following = [sample for loader in loaders for batch in after(loader, 3) for sample in samples(batch)]
    assert not Counter(whole(kind, 4)) - Counter(following)


def after(loader, epoch):
    loader.set_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_ranks_may_change_again_in_the_same_epoch(kind):
    found = Counter()
    states = None
    for num_replicas, batches in ((4, 1), (3, 1), (2, 1), (3, 99)):
        new = []
        for rank in range(num_replicas):
            loader = rank_of(kind, num_replicas, rank)
            loader.set_epoch(2)
            if states is not None:
                loader.load_state_dict(states)
            for step, batch in enumerate(loader):
                found.update(samples(batch))
                if step + 1 == batches:
                    break
            new.append(loader.state_dict())
        states = new
    assert not Counter(whole(kind, 3 if "generator" not in kind else 1)) - found


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_goes_on_by_its_own_state(kind):
    for rank in range(2):
        loader, again = rank_of(kind, 2, rank), rank_of(kind, 2, rank)
        iterator = iter(loader)
        next(iterator)
        again.load_state_dict(loader.state_dict())
        assert [samples(batch) for batch in again] == [samples(batch) for batch in iterator]


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_middle_of_what_was_dealt_anew_each_rank_goes_on(kind):
    states = [state for _, state in begun(kind, 4, epochs=2, batches=1)]
    for rank in range(2):
        loader, again = rank_of(kind, 2, rank), rank_of(kind, 2, rank)
        loader.load_state_dict(states)
        iterator = iter(loader)
        next(iterator)
        again.load_state_dict(loader.state_dict())
        rest = [samples(batch) for batch in iterator]
        assert [samples(batch) for batch in again] == rest
        assert rest


def test_a_list_of_as_many_ranks_is_each_ranks_own_state():
    states = [state for _, state in begun("shuffle", 2, epochs=2, batches=2)]
    for rank in range(2):
        loader, alone = rank_of("shuffle", 2, rank), rank_of("shuffle", 2, rank)
        loader.load_state_dict(states)
        alone.load_state_dict(states[rank])
        assert torch.equal(torch.cat(list(loader)), torch.cat(list(alone)))


def test_between_two_epochs_the_next_one_is_whole():
    states = []
    for rank in range(4):
        loader = rank_of("generator", 4, rank)
        list(loader)
        states.append(loader.state_dict())
    found = []
    for rank in range(3):
        loader = rank_of("generator", 3, rank)
        loader.load_state_dict(states)
        found.append([sample for batch in loader for sample in samples(batch)])
    assert [sample for three in zip(*found, strict=True) for sample in three] == whole("generator", 2)


def test_the_ranks_own_generators_stay_their_own():
    """That of the loader is of base seeds; the global one is the program's."""
    states = [state for _, state in begun("shuffle", 4, epochs=1, batches=1)]
    generator = held(9)
    loader = rank_of("shuffle", 2, 0, generator=generator)
    with_own = []
    for rank in range(4):
        saved = rank_of("shuffle", 4, rank, generator=held(rank))
        next(iter(saved))
        with_own.append(saved.state_dict())
    before = generator.get_state(), torch.get_rng_state()
    loader.load_state_dict(with_own)
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert states


def test_ranks_whose_generators_differed_are_found_out():
    states = []
    for rank in range(4):
        sampler = RandomSampler(DATA, generator=held(rank))
        loader = DataLoader(DATA, 4, sampler=sampler, num_replicas=4, rank=rank)
        next(iter(loader))
        states.append(loader.state_dict())
    loader = DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=held(0)), num_replicas=2, rank=0)
    with pytest.raises(StateError, match=r"that rank 1 got before .* had drawn different orders"):
        loader.load_state_dict(states)


def test_what_does_not_belong_together_is_refused():
    states = [state for _, state in begun("shuffle", 2, epochs=1, batches=1)]
    with pytest.raises(StateError, match=r"num_replicas=2, this one has 3.*list of all ranks"):
        rank_of("shuffle", 3, 0).load_state_dict(states[0])
    with pytest.raises(StateError, match="rank=0, this one has 1"):
        rank_of("shuffle", 2, 1).load_state_dict(states[0])
    with pytest.raises(StateError, match="one state of each rank"):
        rank_of("shuffle", 3, 0).load_state_dict(states[:1])
    with pytest.raises(StateError, match="different epochs"):
        rank_of("shuffle", 3, 0).load_state_dict([states[0], begun("shuffle", 2, epochs=2, batches=1)[1][1]])
    with pytest.raises(StateError, match="load the one state of this loader"):
        DataLoader(DATA, 4).load_state_dict(states)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_states_of_another_shuffle_show_in_the_indices(num_replicas):
    states = [state for _, state in begun("shuffle", 2, epochs=1, batches=1)]
    loader = DataLoader(DATA, 4, shuffle=True, num_replicas=num_replicas, rank=0)
    with pytest.raises(StateError, match="the sampler did not reproduce its indices"):  # noqa: PT012
        loader.load_state_dict(states)  # which already reads the order if the number of ranks is another one
        iter(loader)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class Tells(Sampler):
    """Tells its state."""

    def __iter__(self):
        return iter(range(48))

    def __len__(self):
        return 48

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("given", [{"dataset": Stream()}, {"dataset": DATA, "sampler": Tells()}])
def test_what_cannot_be_dealt_anew_goes_on_with_as_many_ranks(given):
    states = []
    for rank in range(2):
        loader = DataLoader(**given, num_replicas=2, rank=rank)
        iterator = iter(loader)
        next(iterator)
        states.append(loader.state_dict())
    again = DataLoader(**given, num_replicas=2, rank=1)
    again.load_state_dict(states)
    assert list(again) == list(iterator)
    with pytest.raises(StateError, match="of 2 ranks, and this loader is one of 3: the number can change where"):
        DataLoader(**given, num_replicas=3, rank=1).load_state_dict(states)
    with pytest.raises(StateError, match="rank=0, this one has 1"):
        again.load_state_dict(states[0])


def test_ranks_that_skip_other_steps_are_refused():
    """In the rest of an epoch that is dealt anew the steps have other numbers, so none of it is skipped."""

    def states(*skipped):
        found = []
        for rank, steps in enumerate(skipped):
            loader = rank_of("shuffle", 2, rank, skip_steps=steps)
            iterator = iter(loader)
            [next(iterator) for _ in range(2)]
            found.append(loader.state_dict())
        return found

    with pytest.raises(StateError, match="the ranks' states differ in their skip_steps"):
        rank_of("shuffle", 3, 0).load_state_dict(states([5], []))
    rests = []
    for rank in range(3):
        loader = rank_of("shuffle", 3, rank)
        loader.load_state_dict(states([1, 5], [1, 5]))
        with pytest.warns(UserWarning, match="the rest of epoch 0 is dealt out to another number of ranks"):
            rests += [index for batch in loader for index in samples(batch)]
        assert loader.state_dict()["epoch"] == 1
    assert len(set(rests)) == 48 - 2 * 3 * 4  # steps 0, 1 and 2, of which nobody gets 1
