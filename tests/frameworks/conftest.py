"""torch's own workers, which ours are compared with, are forks here on every Python."""

import multiprocessing

import pytest


@pytest.fixture(scope="session", autouse=True)
def forked():
    multiprocessing.set_start_method("fork", force=True)
