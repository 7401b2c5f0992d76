"""Two ranks of torchrun train as with torch's loader, also when they are started again, and leave no process."""

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

HANG_LIMIT = 500  # seconds for the script; on expiry the test fails
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or ranks that are started again find addresses of the ones before
}
EXIT_LIMIT = 500  # seconds for processes to end after the last rank; on expiry the test fails


def marked(mark):
    """All processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAYLOADER_TEST") == mark:
                found.append(process)
    return found


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_train_as_with_torchs_loader(tmp_path):
    mark = f"of {uuid.uuid4()}"
    options = "--standalone", "--nproc-per-node=2", "--max-restarts=1"
    script = Path(__file__).with_name("script_torchrun.py")
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, script, tmp_path],
            env={**inherited, **ENVIRONMENT, "RAYLOADER_TEST": mark},
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT,
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert {path.name for path in tmp_path.iterdir()} == {"0-1", "1-1"}
        assert psutil.wait_procs(marked(mark), EXIT_LIMIT)[1] == []
    finally:
        for process in marked(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
