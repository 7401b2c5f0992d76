"""The same small training by each framework gets the same batches and losses of our loader as of torch's."""

import pytest

import rayloader
from framework_data import Quiet, Sums
from rayloader.frameworks import readers
from trainings_cases import SETTINGS, trained

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what the frameworks warn of is their own matter
]
PLANS = ("budget", "packing", "mixture")

# What `make test` runs, and what only `make test-full` does: Lightning and Transformers are installed for it alone.
SAMPLE = [
    "Accelerate, noise, 2",
    "Accelerate with torch's sampler, noise, 0",
    "Accelerate that dispatches, noise, 2",
    "Accelerate, Parquet, 0",
    *(f"Accelerate, {plan}, 0" for plan in PLANS),
    "Ray Train, noise, 2",
    "torch, rows, 2p",
    "torch, rows as a stream, 0",
]
FULL = [
    *(f"{name}, noise, {one}" for name in ("Accelerate", "Lightning", "Transformers") for one in SETTINGS),
    *(f"Accelerate {how}, noise, 2" for how in ("with torch's sampler", "that splits")),
    *(f"{name}, {data}, 1" for name in ("Lightning", "Transformers") for data in (*PLANS, "Parquet")),
    *(f"torch, {data}, {one}" for data in ("rows", "rows as a stream") for one in SETTINGS),
]
NAMES = [*SAMPLE, *(pytest.param(name, marks=pytest.mark.full) for name in FULL if name not in SAMPLE)]


@pytest.fixture
def made(monkeypatch):
    """`on_error` of each loader of ours whose iterators are made, which tells whether it kept its arguments."""
    found = []
    get_iterator = rayloader.DataLoader._get_iterator
    monkeypatch.setattr(
        rayloader.DataLoader, "_get_iterator", lambda loader: found.append(loader.on_error) or get_iterator(loader)
    )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_losses_are_torchs_and_the_loaders_own_arguments_stay(name, theirs, made):
    expected = theirs[name]
    assert len(expected) > 4
    with rayloader.patch(on_error="skip"):
        assert trained(name) == expected
    if "Transformers" not in name or "noise" not in name:  # whose loader the trainer makes itself, by torch's name
        with rayloader.patch():
            assert trained(name, rayloader.DataLoader, on_error="skip") == expected
    assert set(made) == {"skip"}


@pytest.mark.parametrize("framework", ["torch", "Accelerate", pytest.param("Lightning", marks=pytest.mark.full)])
def test_training_over_a_cache_is_training_without(framework):
    kept = rayloader.cached(Quiet())
    name = f"{framework}, noise, 2"
    with rayloader.patch():
        assert trained(name, dataset=Sums(kept)) == trained(name)
    assert (kept.stats().present, kept.stats().built) == (80, 80)
    assert kept.stats().hits > 0


@pytest.mark.parametrize("framework", ["Accelerate", "Ray Train"])
def test_without_a_patch_a_warning_names_the_remedy(framework):
    readers._warn_of_rebuilt.cache_clear()
    with pytest.warns(UserWarning, match=r"rebuilt as torch.*; call rayloader.patch\(\)"):
        trained(f"{framework}, rows, 0", rayloader.DataLoader)


def test_plans_and_streams_have_other_batches_in_each_epoch():
    """So what is compared above shows that the frameworks tell them their epoch."""
    for data in (*PLANS, "Parquet"):
        batches = [inputs for training, inputs, _ in trained(f"torch, {data}, 0") if training]
        half = len(batches) // 2
        assert sorted(map(str, batches[:half])) != sorted(map(str, batches[half:]))
