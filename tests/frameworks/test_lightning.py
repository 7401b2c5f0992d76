"""Lightning's loops: validation, and several loaders at once. Its package is there for `make test-full` alone."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rayloader
from framework_data import Augmented, Numbers

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what Lightning warns of is its own matter
]

HANG_LIMIT = 300  # seconds; on expiry subprocess.run kills the process and raises


@pytest.fixture(scope="module")
def cases():
    """The module, which imports Lightning."""
    return importlib.import_module("lightning_cases")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What Lightning makes of torch's loaders, in a process without Ray: their workers are forks."""
    out = tmp_path_factory.mktemp("lightning") / "cases.json"
    subprocess.run(
        [sys.executable, Path(__file__).with_name("lightning_cases.py"), out], check=True, timeout=HANG_LIMIT
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", ["validation, fresh workers", "validation, persistent workers"])
def test_validation_gives_torchs_losses(case, theirs, cases):
    losses, result = cases.run(rayloader.DataLoader, case)
    assert [losses, result] == theirs[case]
    kinds = [kind for kind, _ in losses]
    epoch = 2 * (["training"] * 10 + ["validation"] * 10)
    assert kinds == ["validation"] * 2 + 2 * epoch + ["validation"] * 10


@pytest.mark.parametrize(
    ("case", "batches"),
    [
        ("min_size", 6),
        ("max_size", 16),
        ("max_size_cycle", 16),
        ("max_size_cycle, persistent workers", 16),
        ("sequential", 22),
    ],
)
def test_combined_loaders_give_torchs_batches(case, batches, theirs, cases):
    found = cases.run(rayloader.DataLoader, case)
    assert found == theirs[case]
    assert len(found) == batches


@pytest.mark.parametrize("dataset_class", [Augmented, Numbers])
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_combined_loaders_go_on_in_mid_epoch(mode, dataset_class, tmp_path, cases):
    """With streams, whose length it does not know, Lightning is a batch ahead. At the last batch of an epoch in which
    not all loaders end, a checkpoint does not lead to the next: this is not tried here.
    """

    def fit(path=None):
        module = cases.Noting(tmp_path if path is None else None)
        loader = cases.two_loaders(rayloader.DataLoader, mode, cases.FRESH, dataset_class)
        cases.lightning.Trainer(max_epochs=2, **cases.QUIET).fit(module, loader, ckpt_path=path)
        return module.seen

    batches = fit()
    for step in (1, 2):
        assert fit(tmp_path / f"{step}") == batches[step:], step
