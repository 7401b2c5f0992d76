"""The samplers of a loader: which generators are theirs, and how far what they hold is followed."""

import random
from unittest.mock import Mock

import pytest
from torch.utils.data import DataLoader, Sampler

import rayloader
from rayloader.resume.samplers import named_generators

LENGTH = 24


class Constant(Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH))


NAMED, OTHER = random.Random(1), random.Random(2)


def test_generators_of_its_module_are_a_samplers_if_its_code_names_them():
    class Names(Constant):
        held = random.Random(3)

        def __iter__(self):
            return iter([NAMED.randrange(LENGTH)])

    assert named_generators(Names()) == [Names.held, NAMED]


class Endless:
    """A sampler that wraps what it holds anew at each access."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)

    @property
    def sampler(self):
        return Endless(self.inner)


class Raising(Endless):
    @property
    def sampler(self):
        raise RuntimeError("not yet")


def mocked(inner):
    return Mock(__iter__=lambda _: iter(inner), __len__=lambda _: len(inner))


@pytest.mark.parametrize("sampler", [Endless, Raising, mocked])
@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_what_a_sampler_makes_without_end_is_not_followed_without_end(sampler, name):
    order = [3, 1, 2] if name == "sampler" else [[3, 1], [2]]
    torchs = DataLoader(range(5), **{name: sampler(order)})
    ours = rayloader.DataLoader(range(5), **{name: sampler(order)})
    ours.set_epoch(1)
    for _ in range(2):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in torchs]
    if sampler is not mocked:  # whose state is a Mock
        next(iter(ours))
        anew = rayloader.DataLoader(range(5), **{name: sampler(order)})
        anew.load_state_dict(ours.state_dict())
        assert [batch.tolist() for batch in anew] == [batch.tolist() for batch in torchs][1:]
