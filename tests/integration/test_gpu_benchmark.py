"""The benchmark of ways to the GPU, without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 500  # on expiry the test fails
LOADERS = {"torch, pin_memory", "torch, prefetcher by hand", "rayloader, pin_memory", "rayloader, device"}


@pytest.mark.full
def test_simulated_every_way_gives_every_figure(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    def foreign(way):
        """The columns that only rayloader has."""
        return set() if "rayloader" in way else gpu.LOCK_COLUMNS.keys()

    command = [sys.executable, "benchmarks/gpu.py", "--simulate", "--workers", "2"]
    done = subprocess.run(
        [*command, "--cases", "MLP", "medium", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "simulated, so the figures mean nothing" in done.stdout
    results = json.loads((tmp_path / "gpu-simulated.json").read_text())
    assert {row["way"] for row in results["steps"]} == LOADERS
    assert {row["way"] for row in results["rates"]} == LOADERS
    for row in results["steps"]:
        assert row.keys() >= {"case", "way", *gpu.STEP_COLUMNS} - foreign(row["way"])
        assert row["steady step, ms"] > 0
    for row in results["rates"]:
        assert row.keys() >= {"case", "way", *gpu.RATE_COLUMNS} - foreign(row["way"])
        assert row["GB/s"] > 0
    table = gpu.table(results)
    assert all(table.count(f"| {way} |") == 2 for way in LOADERS)


def test_what_the_times_of_steps_come_to(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    spans = [900.0, 100.0, 100.0, 100.0, *[20.0] * 6, 50.0, *[20.0] * 88, 31.0, *[10.0] * 99, 21.0]
    waits = [500.0, 9.0, 9.0, 9.0, *[1.0] * 195, 99.0]
    assert gpu.of_steps(spans, waits, 8.0) == {
        "steps 5 to 100, ms": pytest.approx((94 * 20 + 50 + 31) / 96),
        "steady step, ms": 10.0,
        "steady to resident": 1.25,
        "slow steps": 3,
        "next(), median, ms": 1.0,
        "first batch of all, s": 0.5,
    }
