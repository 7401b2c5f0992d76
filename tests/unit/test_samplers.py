"""The samplers of a loader: which generators are theirs, and how far what they hold is followed."""

import random

import pytest
from torch.utils.data import DataLoader, Sampler

import rayloader
from rayloader.resume.samplers import named_generators

NAMED, OTHER = random.Random(1), random.Random(2)


class Names(Sampler):
    held = random.Random(3)

    def __iter__(self):
        return iter([NAMED.randrange(24)])


def test_generators_of_its_module_are_a_samplers_if_its_code_names_them():
    assert named_generators(Names()) == [Names.held, NAMED]


class Endless(Names):
    """Wraps what it holds anew at each access to its sampler."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)

    @property
    def sampler(self):
        return type(self)(self.inner)


@pytest.mark.parametrize("given", [{"sampler": [3, 1, 2]}, {"batch_sampler": [[3, 1], [2]]}])
def test_what_a_sampler_makes_without_end_is_not_followed_without_end(given):
    ((name, order),) = given.items()
    expected = [batch.tolist() for batch in DataLoader(range(5), **given)]
    ours, anew = (rayloader.DataLoader(range(5), **{name: Endless(order)}) for _ in range(2))
    ours.set_epoch(1)
    assert [batch.tolist() for batch in ours] == expected
    next(iter(ours))
    anew.load_state_dict(ours.state_dict())
    assert [batch.tolist() for batch in anew] == expected[1:]
