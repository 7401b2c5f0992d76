"""A short run of `tests/chaos/chaos.py`, in a process and a cluster of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multinode

PROGRAM = Path(__file__).parents[1] / "chaos" / "chaos.py"
HANG_LIMIT = 500.0  # seconds; on expiry subprocess.run kills the program and raises


@pytest.mark.full
def test_killed_workers_and_nodes_change_nothing():
    command = [sys.executable, PROGRAM, "--seed=1", "--epochs=1", "--kills=4", "--nodes=1"]
    environment = {**os.environ, "RAY_health_check_period_ms": "500"}  # a node is known to be gone after five of these
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[-3:] == ["0", "0", "0"]  # batches lost, repeated, different
