"""Other libraries' datasets give torch's batches by forks and by actors, with fresh and with persistent workers."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import clients  # noqa: E402
from client_cases import CASES  # noqa: E402
from harness import Options  # noqa: E402
from processes import Missing  # noqa: E402


@pytest.mark.parametrize("case", CASES)
def test_batches_are_torchs_in_all_epochs(case):
    """Each loader in a process of its own, as the benchmark has them."""
    epochs = clients.taken(case, 8, Options(rounds=2, quick=True, workers=2), ("quiet",))
    if isinstance(epochs, Missing):
        assert epochs.reason.endswith("not installed")
        pytest.skip(epochs.reason)
    sums = {key: [checksum for _, checksum in found] for key, found in epochs.items()}
    for (name, kind, where), found in sums.items():
        assert len(found) == 2
        assert found == sums["torch", kind, where], (name, kind)
    ours = {"rayloader-fork", "rayloader"} if CASES[case].forks else {"rayloader"}
    assert {name for name, *_ in sums} == {"torch", *ours}
