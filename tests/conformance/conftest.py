"""Torch's side of the conformance suite runs beside the tests that come before, which need one core."""

import shutil
import tempfile
from pathlib import Path

import pytest

from conformance_side import FOLDER, Records

side = pytest.StashKey[Records]()


def pytest_collection_finish(session):
    """Starts torch's side of the cases that were selected."""
    parameters = [getattr(item, "callspec", None) for item in session.items if item.path.parent == FOLDER]
    names = {found.params["case"].name for found in parameters if found is not None and "case" in found.params}
    if names and not session.config.option.collectonly:
        folder = Path(tempfile.mkdtemp(prefix="conformance-"))
        session.config.stash[side] = Records(folder, "reference.py", *sorted(names))
        session.config.add_cleanup(lambda: shutil.rmtree(folder))
        session.config.add_cleanup(session.config.stash[side].end)


@pytest.fixture(scope="session")
def reference(request):
    """Torch's records of the cases that were selected, by name."""
    return request.config.stash[side].read()
