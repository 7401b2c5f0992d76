"""The examples, each run whole in this process; the one that goes on after SIGKILL in processes of its own."""

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES_PER_EPOCH = 57  # of resume.py
HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the example and raises


def run_example(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run an example with this interpreter, outside any cluster that the tests have running."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *options], env=environment, capture_output=True, text=True, timeout=HANG_LIMIT
    )


@pytest.fixture
def output_of(
    ray_session: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs an example to its end in this process; gives what it prints."""

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    num_threads = torch.get_num_threads()  # examples set it
    yield run
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
def test_resume_goes_on_after_sigkill(tmp_path: Path) -> None:
    """Each process with a Ray of its own: the first half up to its checkpoint and the second half are the whole."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = "--epochs", "2", "--every", "20"
    assert run_example("resume.py", str(whole), *options).returncode == 0
    first = run_example("resume.py", str(halves), *options, "--kill-at", "75")
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = run_example("resume.py", str(halves), *options, "--workers", "3")
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("continuing after batch 60, ")
    logs = [(folder / "batches.log").read_text().splitlines() for folder in (whole, halves)]
    assert logs[0] == logs[1]
    assert len({line.split()[1] for line in logs[0]}) == len(logs[0]) == 2 * BATCHES_PER_EPOCH
