"""Training over batches on a device, real or simulated: the losses are those over torch's loader, bit for bit."""

from pathlib import Path

import pytest
import torch

import programs
import script_training

SIMULATED = script_training.SIMULATED
REAL = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SAMPLE = "two loaders"  # which `make test` runs


@pytest.mark.parametrize(
    "arguments",
    [
        *(pytest.param([case], marks=REAL, id=case) for case in script_training.CASES),
        *(pytest.param([case, "--simulate"], marks=[pytest.mark.full] * (case != SAMPLE)) for case in SIMULATED),
    ],
)
def test_losses_are_torchs(arguments):
    done = programs.run(Path(script_training.__file__), *arguments, timeout=600.0)  # compiling included
    assert (done.returncode, done.stdout) == (0, f"passed {arguments[0]}\n"), done.stderr
