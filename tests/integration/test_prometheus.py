"""The metrics of loaders reach Prometheus where Ray exports metrics: with the packages of `ray[default]`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("script_metrics.py")
ROOT = Path(__file__).parents[2]
HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises


@pytest.mark.full
@pytest.mark.parametrize("way", ["started", "joined"])
def test_prometheus_finds_what_the_loaders_measured(default_packages, way):
    """In a Ray that rayloader starts, and in one that it joins."""
    done = subprocess.run(
        [sys.executable, SCRIPT, way],
        env={
            **{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(default_packages)]),
        },
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, f"scraped {way}\n"), done.stdout + done.stderr
