"""What several files of integration tests use."""

import pytest


@pytest.fixture
def accelerator(monkeypatch):
    """Pins in Python: what `Tensor.pin_memory` does is put in."""
    from accelerator import Accelerator

    fake = Accelerator()
    fake.install(monkeypatch)
    return fake
