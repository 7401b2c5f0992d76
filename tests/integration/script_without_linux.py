"""A program on a system that lacks what rayloader's workers need: torch's own are at work. Prints "the end".

python script_without_linux.py WAY
"""

import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from taken_away import WAYS, take_away

take_away(sys.argv[1])

import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader as TorchDataLoader  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402

import rayloader  # noqa: E402
from rayloader import DataLoader  # noqa: E402

NUMBERS = torch.arange(20)


class Derived(TorchDataLoader):
    """A class that a patch reaches, but does not replace."""


def batches(loader):
    return [batch.tolist() for batch in loader]


def shuffled(kind, **options):
    return kind(NUMBERS, 3, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


def check_epochs():
    for options in {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}:
        ours, theirs = shuffled(DataLoader, **options), shuffled(TorchDataLoader, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [batches(ours) for _ in range(2)] == [batches(theirs) for _ in range(2)]
        # Not Python's own, of torch's forks in a process with threads.
        yield from (str(one.message) for one in caught if one.category is UserWarning)
        ours.stats()


class Noisy(IterableDataset):
    """The order and the numbers come from the global generators."""

    def __iter__(self):
        return iter(torch.rand(4) + torch.randperm(4))


def global_loader(seed, **options):
    """One whose order, or samples, come from the global generators."""
    torch.manual_seed(seed)
    options = {"dataset": NUMBERS, "shuffle": True, **options}
    return DataLoader(batch_size=3, num_workers=2, **options)


KINDS = {
    "shuffle": {},
    "generator": {"generator": torch.Generator()},
    "iterable": {"dataset": Noisy(), "shuffle": False},
}


def check_states_between_epochs(persistent):
    """Right where the next epoch has new workers, and refused where these go on."""
    for kind, options in KINDS.items():
        loader = global_loader(1, persistent_workers=persistent, **options)
        before, first = loader.state_dict(), batches(loader)
        other = global_loader(2, persistent_workers=persistent, **options)
        other.load_state_dict(before)
        assert batches(other) == first, kind
        if persistent:
            for one in loader, other:
                with pytest.raises(rayloader.StateError, match="what persistent workers have built can't be saved"):
                    one.state_dict()
            continue
        loader.load_state_dict(loader.state_dict())  # in this program, or another one
        state = loader.state_dict()
        rest = [batches(loader) for _ in range(2)]
        other.load_state_dict(state)
        assert [batches(other) for _ in range(2)] == rest, kind
        assert first != rest[0], kind


def check_states():
    if WAYS[sys.argv[1]][2] == "fork":  # dozens of workers, each of which would import torch
        check_states_between_epochs(persistent=False)
        check_states_between_epochs(persistent=True)
    for num_workers in 0, 1:
        loader, other = (shuffled(DataLoader, num_workers=num_workers) for _ in range(2))
        batches(loader)
        other.load_state_dict(loader.state_dict())
        assert batches(other) == batches(loader)
    earlier, iterator = iter(loader), iter(loader)
    next(iterator)
    assert len(list(earlier)) == len(loader)
    with pytest.raises(rayloader.StateError, match="the middle of an epoch can't be saved with torch's own workers"):
        loader.state_dict()
    assert len(list(iterator)) == len(loader) - 1
    loader.state_dict()
    local, other = shuffled(DataLoader), shuffled(DataLoader)
    iterator = iter(local)
    begun = [next(iterator).tolist()]
    other.load_state_dict(local.state_dict())
    assert begun + batches(other) == begun + batches(iterator)


def check_refusals():
    for options in (
        {"workers": "ray"},
        {"workers": "fork"},
        {"ray_remote_args": {"num_cpus": 1}},
        {"seeding": "batch"},
        {"on_error": "skip"},
        {"device": "cpu"},
        {"skip_steps": [1]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* needs rayloader's own workers, which can't be"):
            iter(DataLoader(NUMBERS, num_workers=1, **options))
        DataLoader(NUMBERS, num_workers=1, **options)
    for call in rayloader.init, lambda: rayloader.share(DataLoader(NUMBERS), name="x", consumers=1):
        with pytest.raises(ValueError, match="needs rayloader's own workers"):
            call()


def check_patch():
    rayloader.patch()
    with pytest.warns(UserWarning, match="rayloader.patch.. does not reach .*: rayloader's own workers can't be had"):
        assert batches(Derived(NUMBERS, 10, num_workers=1)) == batches(TorchDataLoader(NUMBERS, 10))


if __name__ == "__main__":
    (warning,) = check_epochs()
    assert "Batches come from torch's own workers" in warning, warning
    check_states()
    check_refusals()
    check_patch()
    assert "ray" not in sys.modules
    print("the end")
