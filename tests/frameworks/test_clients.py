"""Other libraries' datasets give torch's batches, in epochs of fresh and of persistent workers."""

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
    if isinstance(epochs, Missing) and epochs.reason.endswith("not installed"):
        pytest.skip(epochs.reason)
    sums = {key: [checksum for _, checksum in found] for key, found in epochs.items()}
    for kind in clients.KINDS:
        assert len(sums["rayloader", kind, "quiet"]) == 2
        assert sums["rayloader", kind, "quiet"] == sums["torch", kind, "quiet"], kind
