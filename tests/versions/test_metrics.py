"""The metrics of loaders reach Prometheus where Ray exports metrics: with the packages of `ray[default]`.

They are installed beside the environment of the tests, because with them each start of Ray takes longer. pip must be
able to fetch them.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]
HANG_LIMIT = 600  # seconds; on expiry subprocess.run kills the program and raises


def run(*command: object, **environment: str) -> str:
    """What a program prints, without a way to another Ray."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has those packages, and those of the tests."""
    folder = tmp_path_factory.mktemp("metrics")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "-c", constraints, f"ray[default]=={ray.__version__}")
    return python


@pytest.mark.full
@pytest.mark.parametrize("way", ["started", "joined"])
def test_prometheus_finds_what_the_loaders_measured(python: Path, way: str) -> None:
    output = run(python, Path(__file__).with_name("metrics.py"), way, PYTHONPATH=str(ROOT))
    assert f"scraped {way}" in output
