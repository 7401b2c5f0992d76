"""torch's own workers, which ours are compared with, are forks: on every Python, and of processes without Ray."""

import json
import multiprocessing

import pytest

from framework_data import run_script


@pytest.fixture(scope="session", autouse=True)
def forked():
    multiprocessing.set_start_method("fork", force=True)


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """What torch's loaders give for the cases of this run, by name: `test_x.py` has a script `x_cases.py`."""
    own = [item for item in request.session.items if item.path == request.path and "theirs" in item.fixturenames]
    out = tmp_path_factory.mktemp("theirs") / "written.json"
    run_script(f"{request.path.stem[5:]}_cases.py", out, *sorted({item.callspec.params["name"] for item in own}))
    return json.loads(out.read_text())
