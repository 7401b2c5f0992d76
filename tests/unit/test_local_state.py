"""What a state without workers holds of a loader: put back only where it fits."""

import random
from types import SimpleNamespace

import pytest

from rayloader.errors import StateError
from rayloader.resume import checkpoint
from rayloader.resume.snapshot import own_state_of
from rayloader.resume.state import LocalState


class MadeWhenFirstUsed:
    rng = None

    def draw(self):
        self.rng = self.rng or random.Random(1)
        return self.rng.random()


def loader_of(dataset):
    return SimpleNamespace(dataset=dataset, collate_fn=None)


def state_of(dataset):
    return LocalState(checkpoint.capture_random(loader_of(dataset)), own_state_of(dataset))


def test_a_generator_that_is_made_later_is_missed_with_a_remedy_that_helps():
    old, new = MadeWhenFirstUsed(), MadeWhenFirstUsed()
    old.draw()
    state = state_of(old)
    with pytest.raises(StateError, match=r"dataset\.rng is missing here.* first use .* before load_state_dict\(\)"):
        checkpoint.restore(loader_of(new), state)
    new.draw(), new.draw()
    checkpoint.restore(loader_of(new), state)
    assert new.draw() == old.draw()


def use_global():
    return RNG.random()  # noqa: F821 # the test sets it


def test_one_that_code_names_and_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setitem(globals(), "RNG", random.Random(1))
    state = state_of(use_global)
    expected = use_global()
    checkpoint.restore(loader_of(use_global), state)
    assert use_global() == expected
    del globals()["RNG"]
    with pytest.raises(StateError, match="dataset:RNG is missing here"):
        checkpoint.restore(loader_of(use_global), state)
