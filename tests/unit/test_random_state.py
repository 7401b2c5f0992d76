"""The global random generators, captured, put back, and rewound over tasks."""

from __future__ import annotations

import io
import pickle
import random

import numpy as np
import pytest
import torch

from rayloader.random.generators import RandomState, same_state, seed_all, seed_torch, set_state, state_of
from rayloader.random.search import search
from rayloader.resume.state import pack_random as pack
from rayloader.resume.state import unpack_random as unpack


def found_in(obj):
    return [*search({"object": obj}).values()]


DRAWS = {"python": random.random, "torch": lambda: torch.rand(1).item(), "numpy": np.random.rand}


@pytest.fixture(autouse=True)
def same_after():
    before = RandomState.capture([])
    yield
    before.restore([])


def picture():
    """The states of all three, to be compared."""
    state = RandomState.capture([])
    raw, numpy = state.numpy
    return state.python, state.torch, raw, numpy["has_gauss"], numpy["gauss"]


def draw_all():
    return [draw() for draw in DRAWS.values()] + [random.gauss(0, 1), np.random.randn()]


def test_what_was_captured_comes_again():
    draw_all()
    state = RandomState.capture([])
    first = draw_all()
    state.restore([])
    assert draw_all() == first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_makes_another_state(draw):
    before = picture()
    assert before == picture()
    draw()
    assert before != picture()


def with_arrays(state, change):
    """A state whose arrays are changed."""
    if isinstance(state, np.ndarray):
        return change(state)
    if isinstance(state, dict):
        return {key: with_arrays(value, change) for key, value in state.items()}
    return tuple(with_arrays(part, change) for part in state) if isinstance(state, tuple) else state


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def one_more(array):
    return array + 1


@pytest.mark.parametrize("kind", [np.random.RandomState, np.random.default_rng, np.random.MT19937, random.Random])
def test_states_are_the_same_if_their_values_are(kind):
    generator = kind(3)
    state = state_of(generator)
    for same in state_of(generator), with_arrays(state, read_only), pickle.loads(pickle.dumps(state)):
        assert same_state(state, same)
        assert RandomState(others=(state,)).since(RandomState(others=(same,))) == RandomState()
        assert RandomState(others=(state,)).equals(RandomState(others=(same,)))
    set_state(generator, state_of(kind(4)))
    assert not same_state(state, state_of(generator))
    if kind in (np.random.RandomState, np.random.MT19937):
        assert not same_state(state, with_arrays(state, one_more))


def test_the_global_generators_state_is_the_same_with_arrays_that_are_read_only():
    state = RandomState.capture([])
    raw, numpy = state.numpy
    for protocol in 4, 5:  # that of pickles is 5 by default from Python 3.14 on, and tells what is writable
        same = state._replace(numpy=(b"", pickle.loads(pickle.dumps(with_arrays(numpy, read_only), protocol))))
        assert state.equals(same)
        assert same.since(state) == RandomState()
    assert not state.equals(state._replace(numpy=(raw, with_arrays(numpy, one_more))))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"a": [1, 2], "b": "x"}, {"b": "x", "a": [1, 2]}, True),
        ((1, (2, 3)), (1, (2, 3)), True),
        ((1, 2), [1, 2], False),
        ((1, 2), (1, np.arange(2)), False),
        ((1, 2), (1,), False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (np.arange(2), np.arange(2, dtype=np.int32), False),
        (np.arange(4), np.arange(4).reshape(2, 2), False),
        (np.array([None, "a"]), np.array([None, "a"]), True),
        (np.array([None, "a"]), np.array([None, "b"]), False),
        (None, b"", False),
        (io.BytesIO(b"a"), io.BytesIO(b"a"), True),
        (io.BytesIO(b"a"), io.BytesIO(b"b"), False),
    ],
)
def test_states_of_any_type_are_compared_by_their_values(a, b, same):
    assert same_state(a, b) == same_state(b, a) == same


class Holder:
    """Generators in attributes and containers, one of them twice, and in a circle."""

    def __init__(self):
        self.a = random.Random(1)
        self.b = [{"x": np.random.default_rng(2)}, self.a]
        self.c = (np.random.RandomState(3), torch.Generator().manual_seed(4))
        self.me = self


def numbers_of(holder):
    return [
        holder.a.random(),
        holder.b[0]["x"].random(),
        holder.c[0].rand(),
        torch.rand(1, generator=holder.c[1]).item(),
    ]


def test_generators_of_a_dataset_are_found_and_restored():
    holder = Holder()
    found = found_in(holder)
    assert len(found) == 4
    state, drawn = RandomState.capture(found), numbers_of(holder)
    state.restore(found)
    assert numbers_of(holder) == drawn


def test_looking_for_generators_ends():
    assert found_in([list(range(10)) for _ in range(10_000)]) == []
    assert found_in(np.zeros(3)) == found_in(None) == found_in(torch) == []


@pytest.mark.parametrize("count", [1, 8, 9, 16])
def test_a_packed_state_goes_through_a_file_whatever_its_size(count):
    state = RandomState(torch=bytes(range(count)), others=(np.arange(count, dtype=np.uint32), b"\xff" * count))
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    unpacked = unpack(torch.load(file, weights_only=True))
    assert unpacked.torch == state.torch
    assert unpacked.others[0].tolist() == list(range(count))
    assert unpacked.others[1] == b"\xff" * count


def test_seeds_of_batches_are_in_the_range_of_torchs(monkeypatch):
    pythons, numpys = [], []
    monkeypatch.setattr(random, "seed", pythons.append)
    monkeypatch.setattr(np.random, "seed", numpys.append)
    torchs = [seed_all(2**63 - 1, 0, task) or torch.initial_seed() for task in range(64)]
    for seeds in torchs, pythons:
        assert len(set(seeds)) == 64
        assert all(0 <= seed < 2**63 for seed in seeds)
        torch.tensor(seeds)
    assert all(0 <= word < 2**32 for words in numpys for word in words)


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_torch_is_seeded_as_by_its_own_function(seed):
    torch.manual_seed(seed)
    expected = torch.get_rng_state()
    torch.rand(1)
    seed_torch(seed)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_the_accelerator_is_seeded_too(kind, monkeypatch):
    """Of mps there is one device, and no function for all of them."""
    told = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    name = {"cuda": "manual_seed_all", "mps": "manual_seed"}[kind]
    monkeypatch.setattr(torch.get_device_module(kind), name, told.append)
    seed_torch(3)
    assert told == [3]
