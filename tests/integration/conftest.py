"""What several files of integration tests use."""

import pytest


@pytest.fixture
def accelerator(monkeypatch):
    """A simulated one, which pins, and page-locks nothing else."""
    from simulated_device import SimulatedAccelerator

    return SimulatedAccelerator().install(monkeypatch, locks=False)
