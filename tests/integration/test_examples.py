"""The examples run as users run them: each in a process of its own."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES_PER_EPOCH = 57  # of resume.py
HANG_LIMIT = 300  # seconds; on expiry subprocess.run kills the example and raises


def run_example(name: str, *options: str, joined: bool = False) -> subprocess.CompletedProcess[str]:
    """Run an example with this interpreter, outside any cluster that the tests have running, or `joined` to it."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    if joined:
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )


def test_quickstart(ray_session: object) -> None:
    result = run_example("quickstart.py", joined=True)

    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"[\d,]+ bytes in \d+ files; most frequent:( [a-z]){8}\n", result.stdout)


def test_digits_gives_the_batches_of_torch(ray_session: object) -> None:
    result = run_example("digits.py", "--epochs", "2", "--target", "0.5", joined=True)

    assert result.returncode == 0, result.stderr
    assert re.search(r"^test accuracy \d", result.stdout, re.MULTILINE)
    last_line = result.stdout.splitlines()[-1]
    assert last_line == "All 90 training batches are bit for bit those of torch's own DataLoader."


@pytest.mark.full
def test_digits_notices_other_batches() -> None:
    result = run_example("digits.py", "--epochs", "1", "--target", "0", "--reference-seed", "1")

    assert result.returncode == 1, result.stderr
    assert "Batches differ: batch 0 of 45 is not the one that torch's DataLoader gave." in result.stderr
    assert "bit for bit" not in result.stdout


@pytest.mark.full
def test_text_stream_learns() -> None:
    result = run_example("text_stream.py", "--steps", "30", "--target", "1")

    assert result.returncode == 0, result.stderr
    assert "step   30/30" in result.stdout
    assert "A sample:\n\ndef " in result.stdout
    last_line = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"loss \d\.\d\d bits per character, unigram entropy \d\.\d\d", last_line)


@pytest.fixture(scope="module")
def whole_log(ray_session: object, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The log of two epochs of resume.py that nobody killed, in this process."""
    folder = tmp_path_factory.mktemp("whole")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as resume.py does: the losses depend on it
    try:
        runpy.run_path(str(EXAMPLES / "resume.py"))["Training"](folder, 2, 0).run(2, 20, None)
    finally:
        torch.set_num_threads(num_threads)
    log = (folder / "batches.log").read_text().splitlines()
    assert len({line.split()[1] for line in log}) == len(log) == 2 * BATCHES_PER_EPOCH
    return log


@pytest.mark.parametrize(
    ("joined", "kill_at", "every", "workers"),
    [
        pytest.param(True, 75, 20, "1", id="in-the-second-epoch"),
        pytest.param(False, 75, 20, "3", id="each-with-a-ray-of-its-own", marks=pytest.mark.full),
        pytest.param(True, 39, 20, "1", id="in-the-first-epoch", marks=pytest.mark.full),
        pytest.param(True, 7, 8, "2", id="before-any-checkpoint", marks=pytest.mark.full),
        pytest.param(True, 59, 57, "1", id="at-the-last-batch", marks=pytest.mark.full),
    ],
)
def test_resume_goes_on_after_sigkill(
    tmp_path: Path, whole_log: list[str], joined: bool, kill_at: int, every: int, workers: str
) -> None:
    """The first half up to its checkpoint and the second half are the whole."""
    options = str(tmp_path), "--epochs", "2", "--every", str(every)
    first = run_example("resume.py", *options, "--kill-at", str(kill_at), joined=joined)
    assert first.returncode == -signal.SIGKILL, first.stderr
    first_log = (tmp_path / "batches.log").read_text().splitlines()
    assert first_log == whole_log[:kill_at]

    second = run_example("resume.py", *options, "--workers", workers, joined=joined)
    assert second.returncode == 0, second.stderr
    checkpoint = kill_at // every * every
    assert second.stdout.startswith(f"continuing after batch {checkpoint}, ")
    log = (tmp_path / "batches.log").read_text().splitlines()
    assert log == first_log[:checkpoint] + log[checkpoint:] == whole_log
