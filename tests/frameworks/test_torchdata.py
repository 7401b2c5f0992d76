"""torchdata's StatefulDataLoader: where its import is changed to rayloader's DataLoader, the program stays as it is."""

import pytest

import rayloader
from torchdata_cases import NAMES, run

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which its constructor calls
]

# Where torchdata's loader loses its place: the epoch after one that has ended is empty there.
LOST = {"its own sampler, 0": {"after 11"}}
CHIEF = "stream whose iterator has a state, 2"  # what `make test` runs with workers


def is_full(name):
    return name.endswith(", 2") and name != CHIEF


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * is_full(name)) for name in NAMES])
def test_states_lead_to_the_same_batches(name, theirs):
    """And to those that followed in our own loader, also where torchdata's loses its place."""
    found, expected = run(name, rayloader.DataLoader), theirs[name]
    first, second = found["first"], found["second"]
    for taken in (0, 1, len(first) - 1, len(first)):
        assert found[f"after {taken}"] == [first[taken:], second], taken
    assert found[f"after {len(first) + 1}"][0] == second
    differs = {what for what in expected if found[what] != expected[what]}
    assert differs <= LOST.get(name, set()), (found, expected)
    assert run(name, rayloader.DataLoader, steps=4) == found
