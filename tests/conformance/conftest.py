"""Torch's side of the conformance suite runs beside the tests that come before, which need one core."""

import shutil
import tempfile
from pathlib import Path

import pytest

from conformance_side import FOLDER, LANES, Records

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


@pytest.fixture
def lane(request, monkeypatch):
    """The way that the batches take in this test."""
    from rayloader.actors import actors
    from rayloader.transport import lanes
    from rayloader.workers import ray_use

    monkeypatch.setenv(lanes.ARENAS_VARIABLE, LANES[request.param])
    monkeypatch.setattr(lanes, "SMALL_BYTES", 0)
    monkeypatch.setattr(actors, "LOCAL_LINES", request.param != "tcp")
    monkeypatch.setattr(ray_use, "is_used", lambda: request.param != "fork")
    return request.param
