"""The examples, each run whole: in this process, with the warm actors of the session, or in one of its own.

A process of its own, with actors of its own, costs more than what most examples do in it: only `make test-full` starts
one for each example.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES_PER_EPOCH = 57  # of resume.py
HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the example and raises


def run_example(name: str, *options: str, joined: bool = False) -> subprocess.CompletedProcess[str]:
    """Run an example with this interpreter, outside any cluster that the tests have running, or `joined` to it."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    if joined:
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *options], env=environment, capture_output=True, text=True, timeout=HANG_LIMIT
    )


@pytest.fixture(params=["here", pytest.param("in a process of its own", marks=pytest.mark.full)])
def output_of(
    request: pytest.FixtureRequest,
    ray_session: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., str]]:
    """Runs an example to its end, in both ways; gives what it prints."""

    def run_there(name: str, *options: str) -> str:
        result = run_example(name, *options, joined=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def run_here(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    num_threads = torch.get_num_threads()  # examples set it
    yield run_here if request.param == "here" else run_there
    torch.set_num_threads(num_threads)


EXPECTED = {
    "quickstart.py": r"[\d,]+ bytes in \d+ files; most frequent:( [a-z]){8}\n$",
    "digits.py --epochs 1 --target 0.3": r"bit for bit (.|\n)*by 2 Ray actors .*, and by 2 forks ",
    "parquet_stream.py --epochs 2 --target 0.5": r"epoch 1: continued after 640 images\nepoch 1: 1797 ",
    "text_stream.py --steps 30 --target 1": r"A sample:\n\ndef (.|\n)*loss \d\.\d\d bits per character, ",
    "cached_sounds.py --epochs 2 --sounds 64 --target 0": r"64 of 64 samples.*64 built: 50%",
}


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.full] * one.startswith("cached")) for one in EXPECTED]
)
def test_an_example_runs_to_its_end(command: str, output_of: Callable[..., str]) -> None:
    output = output_of(*command.split())
    assert re.search(EXPECTED[command], output), output


@pytest.mark.full
def test_digits_notices_other_batches() -> None:
    result = run_example("digits.py", "--epochs", "1", "--target", "0", "--reference-seed", "1")

    assert result.returncode == 1, result.stderr
    assert "Batches differ: batch 0 of 45 is not the one that torch's DataLoader gave." in result.stderr
    assert "bit for bit" not in result.stdout


@pytest.fixture(scope="module")
def whole_log(ray_session: object, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The log of two epochs of resume.py that nobody killed, in this process."""
    folder = tmp_path_factory.mktemp("whole")
    train_here(folder, 2, 20)
    log = (folder / "batches.log").read_text().splitlines()
    assert len({line.split()[1] for line in log}) == len(log) == 2 * BATCHES_PER_EPOCH
    return log


def train_here(folder: Path, workers: int, every: int) -> None:
    """Two epochs of resume.py, or the rest of them, in this process."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as resume.py does: the losses depend on it
    try:
        runpy.run_path(str(EXAMPLES / "resume.py"))["Training"](folder, workers, 0).run(2, every, None)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.full
@pytest.mark.parametrize(
    ("joined", "kill_at", "every", "workers"),
    [
        pytest.param(True, 75, 20, "1", id="in-the-second-epoch"),
        pytest.param(False, 75, 20, "3", id="each-with-a-ray-of-its-own"),
        pytest.param(True, 7, 8, "2", id="before-any-checkpoint"),
        pytest.param(True, 59, 57, "1", id="at-the-last-batch"),
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
