"""Where a system lacks what our workers need, torch's own are at work: states, and what is refused.

Their batches, and the warning, on each such system: see test_conformance.py in tests/conformance.
"""

import os

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import rayloader
from rayloader import DataLoader, StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:rayloader's own workers can't be had here:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

NUMBERS = torch.arange(20)


class Noisy(IterableDataset):
    """The order and the numbers come from the global generators."""

    def __iter__(self):
        return iter(torch.rand(4) + torch.randperm(4))


class Derived(TorchDataLoader):
    """A class that a patch reaches, but does not replace."""


KINDS = {
    "shuffle": {},
    "generator": {"generator": torch.Generator()},
    "iterable": {"dataset": Noisy(), "shuffle": False},
}


@pytest.fixture(autouse=True)
def lacks(monkeypatch):
    """In each test Python has no memory files, until this is undone."""
    monkeypatch.delattr(os, "memfd_create")
    return monkeypatch


def load(seed=1, **options):
    """A loader of a program with this seed."""
    torch.manual_seed(seed)
    options = {"dataset": NUMBERS, "shuffle": True, "num_workers": 2, "multiprocessing_context": "fork", **options}
    return DataLoader(batch_size=3, **options)


def batches(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_between_epochs_leads_on_in_this_program_or_another_one(kind):
    loader, other = load(1, **KINDS[kind]), load(2, **KINDS[kind])
    before, first = load(1, **KINDS[kind]).state_dict(), batches(loader)
    other.load_state_dict(before)
    assert batches(other) == first
    loader.load_state_dict(loader.state_dict())
    state = loader.state_dict()
    rest = [batches(loader) for _ in range(2)]
    other.load_state_dict(state)
    assert [batches(other) for _ in range(2)] == rest
    assert first != rest[0]


def test_a_state_of_persistent_workers_is_refused_where_they_cannot_be_saved_or_cannot_go_on(lacks):
    torchs = load(persistent_workers=True)
    batches(torchs)
    with pytest.raises(StateError, match="what persistent workers have built can't be saved with torch's own workers"):
        torchs.state_dict()
    lacks.undo()
    ours = load(persistent_workers=True, multiprocessing_context=None)
    batches(ours)
    state = ours.state_dict()
    lacks.delattr(os, "memfd_create")
    other = load(persistent_workers=True)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="what persistent workers have built can't be continued with torch's own"):
        iter(other)


def test_the_middle_of_an_epoch_can_be_saved_without_workers_only():
    loader = load(num_workers=1)
    earlier, iterator = iter(loader), iter(loader)
    next(iterator)
    assert len(list(earlier)) == len(loader)
    with pytest.raises(StateError, match="the middle of an epoch can't be saved with torch's own workers"):
        loader.state_dict()
    assert len(list(iterator)) == len(loader) - 1
    loader.state_dict()
    local, other = (load(seed, num_workers=0, multiprocessing_context=None) for seed in (1, 2))
    iterator = iter(local)
    next(iterator)
    other.load_state_dict(local.state_dict())
    assert batches(other) == batches(iterator)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": "ray"},
        {"workers": "fork"},
        {"ray_remote_args": {"num_cpus": 1}},
        {"seeding": "batch"},
        {"on_error": "skip"},
        {"device": "cpu"},
        {"skip_steps": [1]},
    ],
)
def test_what_asks_for_our_workers_is_refused_by_iter(options):
    loader = load(**options)
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* needs rayloader's own workers, which can't be"):
        iter(loader)


@pytest.mark.parametrize("call", [rayloader.init, lambda: rayloader.share(load(), name="x", consumers=1)])
def test_calls_that_start_our_workers_are_refused(call):
    with pytest.raises(ValueError, match="needs rayloader's own workers"):
        call()


def test_a_patch_warns_of_a_class_that_it_does_not_replace():
    with rayloader.patch():
        loader = Derived(NUMBERS, 10, num_workers=1, multiprocessing_context="fork")
        with pytest.warns(UserWarning, match="does not reach .*Derived: rayloader's own workers can't be had"):
            iterator = iter(loader)
        assert batches(iterator) == batches(TorchDataLoader(NUMBERS, 10))
