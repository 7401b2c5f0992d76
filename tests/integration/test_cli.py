"""The command line: what it prints, as text and as JSON, and how it ends."""

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

import rayloader
from documents import ROOT, commands_of
from rayloader.cli import application, doctor

HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises
README = commands_of((ROOT / "README.md").read_text())
FULL = functools.partial(pytest.param, marks=pytest.mark.full)
pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def run(monkeypatch):
    """Runs a command; loaders that it measures use the Ray of this session."""
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.chdir(Path(__file__).parent)

    def run(*arguments):
        result = CliRunner().invoke(application(), arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def test_doctor_finds_nothing_wrong_where_tests_run(run):
    assert run("--version").stdout == f"rayloader {rayloader.__version__}\n"
    result = run("doctor", "--json")
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert {"torch", "ray", "cores", "memory", "Ray", "lines and arenas", "Ray calls"} <= found.keys()
    for name in ("torch", "ray", "forks", "Ray", "lines and arenas", "Ray calls"):
        assert found[name]["ok"], found[name]
    assert "reached over a local socket" in found["lines and arenas"]["found"]
    assert result.exit_code == (0 if all(check["ok"] for check in found.values()) else 1)


def test_doctor_tries_actors_where_no_ray_runs():
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "rayloader", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT, check=False)
    found = {check["name"]: check for check in json.loads(done.stdout)}
    assert found["Ray"]["found"].startswith("started here"), found["Ray"]
    assert found["lines and arenas"]["ok"], found["lines and arenas"]


def test_doctor_says_what_to_do(run, monkeypatch):
    monkeypatch.setattr(doctor, "SHM_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "DESCRIPTORS", 1 << 40)
    monkeypatch.setenv("RAYLOADER_ARENAS", "0")
    result = run("doctor")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "failed /dev/shm" in text
    assert "docker run --shm-size" in text
    assert "ulimit -n" in text
    assert "failed lines and arenas: RAYLOADER_ARENAS=0 in the environment has switched them off" in text
    assert "ok Ray calls" in text


@pytest.mark.full
@pytest.mark.parametrize("name", ["cli_data:Squares", "cli_data.py:make_loader"])
def test_bench_measures_both_loaders_and_recommends(run, name, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (30.0, 0.0, 0.0))
    options = "--max-workers", "1", "--workers", "ray", "--step-ms", "100", "--seconds", "0.2"
    result = run("bench", name, *options, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    for kind in ("torch", "rayloader"):
        assert [rate["num_workers"] for rate in found[kind]] == [0, 1]
        assert all(rate["lowest"] <= rate["batches"] <= rate["highest"] for rate in found[kind])
        assert all(rate["batches"] > 0 and rate["first"] > 0 for rate in found[kind])
        assert all(0 < rate["wait_share"] <= 1 for rate in found[kind])
    assert found["num_workers"] in (0, 1)
    assert found["reason"].startswith(("with", "even with"))
    assert found["busy"] == f"this machine is busy (load 30 on {os.cpu_count()} cores)"
    result = run("bench", name, "--max-workers", "0", "--seconds", "0.2")
    assert "num_workers=0: " in result.stdout


@pytest.mark.full
def test_doctor_tries_a_loader_of_ones_own(run):
    result = run("doctor", "cli_data:make_loader", "--workers", "fork", "--num-workers", "1", "--json")
    found = {check["name"]: check for check in json.loads(result.stdout)}
    assert found["your loader without workers"]["ok"], found
    assert found["your loader with forks"]["ok"], found
    assert "Ray" not in found
    result = run("doctor", "cli_data.py:raises", "--workers", "fork", "--num-workers", "1")
    assert result.exit_code == 2
    assert "ValueError: no such file" in result.stderr
    result = run("doctor", "cli_data.py:make_broken", "--workers", "ray", "--num-workers", "1")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "failed your loader without workers: ValueError: broken sample sample 0, position 0 of 4" in text
    assert "failed your loader with Ray actors: ValueError: Caught ValueError in DataLoader worker process 0" in text
    assert "sample 0, position 0 of 4, batch 0, worker 0" in text
    assert "ok Ray: " in text


@pytest.mark.full
@pytest.mark.parametrize("line", [line for line in README if line.startswith("rayloader ")])
def test_the_readmes_commands_run_as_they_stand(run, line, tmp_path, monkeypatch):
    (tmp_path / "mymodule.py").write_text("dataset = list(range(64))")
    (tmp_path / "train.py").write_text(
        "from rayloader import DataLoader\n\ndef make_loader():\n    return DataLoader(range(64), batch_size=4)\n"
    )
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(line, comments=True)
    result = run(*arguments)
    assert result.exit_code in ((0, 1) if arguments == ["doctor"] else (0,)), result.stderr  # 1: it has advice


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cli_data", "an object must be named as module:name or file.py:name, got 'cli_data'"),
        FULL("cli_data:empty", "the dataset gives too few batches"),
        FULL("cli_data:raises", "ValueError: no such file"),
    ],
)
def test_what_cannot_be_measured_is_named(run, name, message):
    result = run("bench", name, "--step-ms", "1", "--seconds", "0.1", "--max-workers", "0")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
