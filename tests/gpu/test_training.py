"""Training over batches on a device, real or simulated: the losses are those over torch's loader, bit for bit."""

from pathlib import Path

import pytest
import torch

import programs
import script_training

SCRIPT = Path(script_training.__file__)
LIMIT_S = 600.0  # compiling included; on expiry the test fails
SAMPLE = "two loaders"  # which `make test` runs


def passes(*arguments):
    done = programs.run(SCRIPT, *arguments, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (0, f"passed {arguments[0]}\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", script_training.CASES)
def test_losses_are_torchs(case):
    passes(case)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (case != SAMPLE)) for case in script_training.SIMULATED]
)
def test_on_a_simulated_device_losses_are_torchs(case):
    passes(case, "--simulate")
