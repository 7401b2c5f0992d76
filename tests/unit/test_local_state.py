"""What a state without workers holds of a loader: put back only where it fits."""

import random
from types import SimpleNamespace

import pytest

from rayloader.errors import StateError
from rayloader.resume import local_state
from rayloader.resume.seal import Parts


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
    state = local_state.capture(loader_of(old), Parts())
    return old, {**state, "random": state["random"].own()}, new


def test_a_generator_that_is_made_later_is_missed_with_a_remedy():
    _, state, new = saved_and_new()
    with pytest.raises(StateError, match=r"with 1 .*, these have 0.* first use .* before load_state_dict\(\)"):
        local_state.restore(loader_of(new), state)


def test_the_remedy_helps():
    old, state, new = saved_and_new()
    new.draw(), new.draw()
    local_state.restore(loader_of(new), state)
    assert new.draw() == old.draw()
