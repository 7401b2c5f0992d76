"""The states of random generators: captured, put back and compared, and what the seeds of batches are."""

import io
import random

import numpy as np
import pytest
import torch

from rayloader.random.generators import RandomState, same_state, seed_all, seed_torch, state_of

DRAWS = {
    "python": random.random,
    "python, the second in store": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, the second in store": np.random.randn,
    "torch": lambda: torch.rand(1).item(),
    "torch, the second in store": lambda: torch.randn(1).item(),
}


@pytest.fixture(autouse=True)
def same_after():
    before = RandomState.capture([])
    yield
    before.restore([])


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_was_captured_comes_again_and_a_draw_makes_another_state(draw):
    for _ in range(2):
        state = RandomState.capture([])
        assert state.equals(RandomState.capture([], state))
        first = draw()
        later = RandomState.capture([], state)
        assert not state.equals(later)
        assert sum(part is not None for part in later.since(state)) == 1
        later.since(state).over(state).restore([])
        assert RandomState.capture([]).equals(later)
        state.restore([])
        assert draw() == first


@pytest.mark.parametrize("kind", [np.random.RandomState, np.random.default_rng, np.random.MT19937, random.Random])
def test_states_are_the_same_if_their_values_are(kind):
    state, same, other = (state_of(kind(seed)) for seed in (3, 3, 4))
    assert RandomState(others=(state,)).equals(RandomState(others=(same,)))
    assert RandomState(numpy=(b"", state)).equals(RandomState(numpy=(b"x", same)))
    assert not RandomState(others=(state,)).equals(RandomState(others=(other,)))
    assert not RandomState(numpy=(b"x", state)).equals(RandomState(numpy=(b"x", other)))


READ_ONLY = np.arange(2)
READ_ONLY.flags.writeable = False  # which pickles tell by protocol 5, the default from Python 3.14 on


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"a": [1, 2], "b": "x"}, {"b": "x", "a": [1, 2]}, True),
        ((1, (2, 3)), (1, (2, 3)), True),
        ((1, 2), [1, 2], False),
        ((1, 2), (1, np.arange(2)), False),
        ((1, 2), (1,), False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (np.arange(2), READ_ONLY, True),
        *((np.arange(4), other, False) for other in (np.arange(4) + 1, np.arange(4.0), np.arange(4).reshape(2, 2))),
        (np.array([None, "a"]), np.array([None, "a"]), True),
        (np.array([None, "a"]), np.array([None, "b"]), False),
        (None, b"", False),
        (io.BytesIO(b"a"), io.BytesIO(b"a"), True),
        (io.BytesIO(b"a"), io.BytesIO(b"b"), False),
    ],
)
def test_states_of_any_type_are_compared_by_their_values(a, b, same):
    assert same_state(a, b) == same_state(b, a) == same


def test_seeds_of_batches_are_in_the_range_of_torchs(monkeypatch):
    pythons, numpys = [], []
    monkeypatch.setattr(random, "seed", pythons.append)
    monkeypatch.setattr(np.random, "seed", numpys.append)
    torchs = [seed_all(2**63 - 1, 0, task) or torch.initial_seed() for task in range(64)]
    assert len({tuple(words) for words in numpys}) == 64
    for seeds in torchs, pythons:
        assert len(set(seeds)) == 64
        assert all(0 <= seed < 2**63 for seed in seeds)
        torch.tensor(seeds)
    assert all(0 <= word < 2**32 for words in numpys for word in words)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_accelerator_is_seeded_too(kind, monkeypatch):
    """Of mps there is one device, and no function for all of them."""
    told = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    name = {"cuda": "manual_seed_all", "mps": "manual_seed"}[kind]
    monkeypatch.setattr(torch.get_device_module(kind), name, told.append)
    seed_torch(3)
    assert told == [3]
