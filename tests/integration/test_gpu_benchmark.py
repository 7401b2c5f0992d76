"""The benchmark of ways to the GPU, without one."""

import json
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).parents[2]
WAYS = {"torch, pin_memory", "torch, prefetcher by hand", "rayloader, pin_memory", "rayloader, device"}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    return gpu


@pytest.mark.full
def test_simulated_every_way_gives_every_figure(tmp_path, gpu):
    arguments = ["--simulate", "--workers", "2", "--cases", "MLP", "medium", "--out", str(tmp_path)]
    done = programs.run(Path(gpu.__file__), *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "simulated, so the figures mean nothing" in done.stdout
    results = json.loads((tmp_path / "gpu-simulated.json").read_text())
    for part, columns, figure in [("steps", gpu.STEP_COLUMNS, "steady step, ms"), ("rates", gpu.RATE_COLUMNS, "GB/s")]:
        assert {row["way"] for row in results[part]} == WAYS
        for row in results[part]:
            foreign = set() if "rayloader" in row["way"] else gpu.LOCK_COLUMNS.keys()  # which only rayloader has
            assert row.keys() >= {"case", "way", *columns} - foreign
            assert row[figure] > 0
    assert all(gpu.table(results).count(f"| {way} |") == 2 for way in WAYS)


def test_what_the_times_of_steps_come_to(gpu):
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
