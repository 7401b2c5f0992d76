"""Samplers of the user's that have no `state_dict`, in a state saved between two epochs.

In the middle of an epoch its indices are drawn again and compared; here nothing is.
"""

import random

import pytest
import torch
from torch.utils.data import Dataset, Sampler

from probes import oversubscribed
from rayloader import DataLoader, StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

LENGTH = 24
GLOBAL = random.Random(0)


class Data(Dataset):
    def __init__(self):
        self.draw = random.Random(0)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index


class Sized(Sampler):
    __slots__ = ()

    def __len__(self):
        return LENGTH


class OfTheClass(Sized):
    generator = random.Random(0)

    def __init__(self, data):
        """Keeps nothing."""

    def __iter__(self):
        for _ in range(LENGTH):
            yield self.generator.randrange(LENGTH)


class OfTheModule(OfTheClass):
    generator = property(lambda self: GLOBAL)


class OfItsData(Sized):
    def __init__(self, data):
        self.data_source = data

    def __iter__(self):
        return iter([self.data_source.draw.randrange(LENGTH) for _ in range(LENGTH)])


def in_a_closure(data):
    generator = torch.Generator().manual_seed(0)

    class InAClosure:
        def __len__(self):
            return LENGTH

        def __iter__(self):
            return iter(torch.randperm(LENGTH, generator=generator).tolist())

    return InAClosure()


def in_a_default(data):
    own = random.Random(0)

    class InADefault(Sized):
        def __iter__(self, generator=own):
            return iter(generator.sample(range(LENGTH), LENGTH))

    return InADefault()


RESTORED = [OfTheClass, OfTheModule]
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def loader_of(kind, num_workers):
    random.seed(1)
    data = Data()
    return DataLoader(data, batch_size=4, sampler=kind(data), num_workers=num_workers)


def read(loader):
    return torch.cat(list(loader)).tolist()


@WORKERS
@pytest.mark.parametrize("kind", RESTORED)
def test_the_next_epochs_have_the_orders_that_they_would_have_had(kind, num_workers):
    loader = loader_of(kind, num_workers)
    first = read(loader)
    state = loader.state_dict()
    rest = read(loader), read(loader)
    assert first != rest[0]
    again = loader_of(kind, num_workers)
    again.load_state_dict(state)
    assert (read(again), read(again)) == rest


@pytest.mark.parametrize("kind", [OfItsData, in_a_closure, in_a_default])
def test_in_the_middle_of_an_epoch_what_cannot_be_restored_is_an_error(kind):
    loader = loader_of(kind, 0)
    read(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again = loader_of(kind, 0)
    again.load_state_dict(state)
    with pytest.raises(StateError, match="the sampler did not reproduce its indices"):
        iter(again)


@pytest.mark.parametrize("kind", RESTORED)
def test_in_the_middle_of_an_epoch_too(kind):
    loader = loader_of(kind, 0)
    read(loader)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = read(iterator), read(loader)
    again = loader_of(kind, 0)
    again.load_state_dict(state)
    assert (read(again), read(again)) == rest


def test_a_generator_that_takes_the_place_of_another_is_seen():
    """Between two states of one epoch."""

    class Sampler(OfTheClass):
        generator = random.Random(0)

    loader = loader_of(Sampler, 0)
    iterator = iter(loader)
    next(iterator)
    loader.state_dict()
    Sampler.generator = random.Random(5)
    assert len(list(iterator)) == 5
    state = loader.state_dict()
    rest = read(loader)
    loader.load_state_dict(state)
    list(loader)
    loader.load_state_dict(state)
    assert read(loader) == rest
