"""What a state without workers holds of a loader: put back only where it fits."""

import random
import sys
import types
from types import SimpleNamespace

import pytest

from rayloader.errors import StateError
from rayloader.resume import checkpoint


class MadeWhenFirstUsed:
    rng = None

    def draw(self):
        self.rng = self.rng or random.Random(1)
        return self.rng.random()


def loader_of(dataset):
    return SimpleNamespace(dataset=dataset, collate_fn=None)


def saved_and_new():
    old, new = MadeWhenFirstUsed(), MadeWhenFirstUsed()
    old.draw()
    return old, checkpoint.capture(loader_of(old), None), new


def test_a_generator_that_is_made_later_is_missed_with_a_remedy():
    _, state, new = saved_and_new()
    with pytest.raises(StateError, match=r"dataset\.rng is missing here.* first use .* before load_state_dict\(\)"):
        checkpoint.restore(loader_of(new), state)


def test_one_of_a_module_that_is_missing_is_warned_of(monkeypatch):
    """It may have nothing to do with the dataset."""
    module = types.ModuleType("of_the_program")
    module.RNG, module.OTHER = random.Random(1), random.Random(2)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(checkpoint, "own_modules", lambda: [(module.__name__, vars(module))])
    state = checkpoint.capture(loader_of(None), None)
    before = module.OTHER.random()
    del module.RNG
    with pytest.warns(UserWarning, match=r"the random generator of_the_program\.RNG, which is missing here"):
        checkpoint.restore(loader_of(None), state)
    assert module.OTHER.random() == before


def test_the_remedy_helps():
    old, state, new = saved_and_new()
    new.draw(), new.draw()
    checkpoint.restore(loader_of(new), state)
    assert new.draw() == old.draw()
