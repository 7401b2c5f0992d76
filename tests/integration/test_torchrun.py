"""Two ranks of torchrun train as with torch's loader, also when they are started again, and leave no process."""

import contextlib
import os
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

HANG_LIMIT = 500  # seconds for a script; on expiry the test fails
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or ranks that are started again find addresses of the ones before
}
EXIT_LIMIT = 500  # seconds for Ray's processes to end after the last rank; on expiry the test fails

pytestmark = pytest.mark.full


@pytest.fixture
def mark():
    """In the environment of everything that a test starts, and of nothing else; nothing of it may be left."""
    value = f"of {uuid.uuid4()}"
    yield {"RAYLOADER_TEST": value}
    try:
        assert psutil.wait_procs(marked(value), EXIT_LIMIT)[1] == []
    finally:
        for process in marked(value):
            with contextlib.suppress(psutil.Error):
                process.kill()


def marked(value):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAYLOADER_TEST") == value:
                found.append(process)
    return found


def launch(mark, loader, folder, *options):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, *command, Path(__file__).parent / "script_torchrun.py", loader, folder],
        env={**inherited, **ENVIRONMENT, **mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(launcher, folder, name):
    """What both ranks have left, once torchrun has ended."""
    output, errors = launcher.communicate(timeout=HANG_LIMIT)
    assert (launcher.returncode, output) == (0, ""), errors
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


def check_trained_alike(found, expected):
    for rank in range(2):
        assert len(found[rank]["batches"]) == len(expected[rank]["batches"]) == 14
        assert all(map(torch.equal, found[rank]["batches"], expected[rank]["batches"]))
        assert all(map(torch.equal, found[rank]["parameters"], expected[0]["parameters"]))
    assert not torch.equal(found[0]["batches"][0], found[1]["batches"][0])


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """The results of the same training with torch's loader; it runs beside the first test."""
    folder = tmp_path_factory.mktemp("torchs")
    launcher = launch({}, "torch", folder)
    yield cache(lambda: results(launcher, folder, "torch-0"))
    launcher.communicate(timeout=HANG_LIMIT)


def test_two_ranks_train_as_with_torchs_loader(torchs, mark, tmp_path):
    found = results(launch(mark, "rayloader", tmp_path), tmp_path, "rayloader-0")
    check_trained_alike(found, torchs())


def test_ranks_that_torchrun_starts_again_train_as_with_torchs_loader(torchs, mark, tmp_path):
    """Rank 0 is killed in the midst of the first round."""
    found = results(launch(mark, "rayloader", tmp_path, "--max-restarts=1"), tmp_path, "rayloader-1")
    assert not (tmp_path / "rayloader-0-1.pt").exists()
    check_trained_alike(found, torchs())
