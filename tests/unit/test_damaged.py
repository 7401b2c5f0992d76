"""Damaged states: an error of rayloader's or a right result, never a crash, a hang or another."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler

import programs
from rayloader import DataLoader, StateError
from rayloader.random.generator_kinds import set_state, state_of
from rayloader.random.packed import pack
from rayloader.random.random_state import RandomState
from rayloader.resume.state import State
from states import saved

HANG_LIMIT = 600.0  # seconds that the cases of one test may take: a damaged length must not lead to an endless loop

CASES = {"state": 200, "worker": 200}
FULL = {"state": 10_000, "worker": 5_000}
ALL = [(kind, 0, count) for kind, count in CASES.items()]
# States whose other generators were one number, and whose generator of torch had too few bytes.
ALL += [("state", number, 1) for number in (7130, 10781, 14245)]
ALL += [pytest.param(kind, CASES[kind], count, marks=pytest.mark.full) for kind, count in FULL.items()]


@pytest.mark.parametrize(("kind", "first", "count"), ALL)
def test_what_is_damaged_is_an_error_of_ours_or_is_read(kind, first, count):
    """In a process of its own, with little memory: the interpreter itself may crash."""
    ran = programs.run(Path(__file__).with_name("damaging.py"), kind, str(first), str(count), timeout=HANG_LIMIT)
    assert ran.returncode == 0, ran.stderr[-2000:]  # of a crash the last number is the case
    assert json.loads(ran.stdout) == {}


# ---- generators


def generator_states():
    """States of generators that NumPy and torch would take, and then read or write outside of their memory."""
    mersenne, philox = state_of(np.random.MT19937(1)), state_of(np.random.Philox(1))
    legacy = state_of(np.random.RandomState(1))
    torchs = torch.Generator().get_state().numpy()
    for place in (-1, 625, 10**9, 1.0, True):
        yield np.random.MT19937(), {**mersenne, "state": {**mersenne["state"], "pos": place}}
        yield np.random.RandomState(), {**legacy, "state": {**legacy["state"], "pos": place}}
    for place in (-(10**9), 5):
        yield np.random.Generator(np.random.Philox()), {**philox, "buffer_pos": place}
    for left, place in ((624, 624), (1, 10**6), (-5, 3)):
        damaged = torchs.copy()
        damaged[8:12].view(np.int32)[0], damaged[16:24].view(np.uint64)[0] = left, place
        yield torch.Generator(), damaged.tobytes()
    for words in (3, 10**9):
        yield (
            np.random.PCG64(),
            {**state_of(np.random.PCG64(1)), "seed_seq": {**mersenne["seed_seq"], "pool_size": words}},
        )


@pytest.mark.parametrize(
    ("generator", "state"), [pytest.param(*pair, id=type(pair[0]).__name__) for pair in generator_states()]
)
def test_a_place_in_a_generator_is_in_its_range(generator, state):
    before = state_of(generator)
    with pytest.raises(ValueError, match=r"^a state's .* must be a whole number from [014] to \d+, got"):
        set_state(generator, state)
    assert repr(state_of(generator)) == repr(before)
    packed = saved(num_workers=0).pack()
    for random_state in (
        RandomState(others=(state,)),
        RandomState(held={"dataset.rng": state}),
    ):
        with pytest.raises(StateError, match="must be a whole number from"):
            State.load({**packed, "now": pack(random_state)})


def test_every_state_of_torch_and_numpy_has_its_places_in_their_ranges():
    generators = [torch.Generator(), *[kind(1) for kind in (np.random.MT19937, np.random.Philox)]]
    for _ in range(1300):
        for generator in generators:
            set_state(generator, state_of(generator))
            generator.random_raw() if hasattr(generator, "random_raw") else torch.rand(1, generator=generator)


@pytest.mark.parametrize("name", ["seed", "Generator", "os", "RandomState"])
def test_a_bit_generator_is_one_of_numpys(name, monkeypatch):
    monkeypatch.setattr(np.random, "seed", lambda: pytest.fail("a state has called it"))
    damaged = RandomState(held={"dataset.rng": {**state_of(np.random.PCG64()), "bit_generator": name}})
    state = State.load({**saved(num_workers=0).pack(), "now": pack(damaged)})
    assert state.now.unlike({"dataset.rng": np.random.PCG64()}) == ["dataset.rng"]


# ---- other fields


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index


def load(change, make=lambda: DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, 0))):
    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = copy.deepcopy(loader.state_dict())
    change(state)
    make().load_state_dict(state)


NUMBERS = ["next_task", "next_worker", "delivered", "skipped", "draws", "drawn", "checksum", "drawn_checksum"]


@pytest.mark.parametrize("value", [-1, 2**63, 10**40, "1", 1.0, None, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_one_that_a_loader_can_count_to(name, value):
    with pytest.raises(StateError, match=rf"a state's {name} must be"):
        load(lambda state: state["position"].update({name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampler", 1),
        ("epoch", "x"),
        ("num_samples", 1.5),
        ("dataset", None),
        ("__iter__", []),
        ("set_epoch", {}),
    ],
)
def test_a_state_sets_no_attribute_of_a_sampler_to_what_it_cannot_be(name, value):
    """The outermost sampler here is torch's BatchSampler, and within it is a DistributedSampler."""

    def change(state):
        samplers = state["sampler"]
        samplers["attributes"][0 if name == "sampler" else 1][name] = value
        samplers["progress"] = tuple((*those, name) for those in samplers["progress"])

    with pytest.raises(StateError, match=r"the state has \w+=|attributes of samplers must be"):
        load(change)
