"""The benchmark of ways to the GPU, without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 300  # on expiry the test fails


@pytest.mark.full
def test_simulated_every_way_gives_every_figure(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--simulate", "--rounds", "1", "--workers", "2", "--limit", "200"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu-simulated.json").read_text())["rows"]
    assert {row["way"] for row in rows} >= {"torch, pin_memory", "rayloader, pin_memory", "rayloader, device"}
    assert all(row["GB/s"] > 0 for row in rows)
    assert "simulated, so the figures mean nothing" in done.stdout
