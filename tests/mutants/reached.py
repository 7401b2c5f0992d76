"""A plugin of pytest's: writes down which sites of mutants each test reaches, in all of its processes.

It has to be loaded by `-p`, before anything imports the library, which then knows the file of the sites. A line of the
report is a test that has passed, its seconds, and the sites.
"""

import json
import mmap
import os
import tempfile

import pytest

from mutation import REACHED

_file = tempfile.NamedTemporaryFile(prefix="reached-")  # noqa: SIM115 - for as long as the tests run
_file.truncate(65536)
os.environ[REACHED] = _file.name
_sites = mmap.mmap(_file.fileno(), 0)
_reports = {}


def pytest_addoption(parser):
    """Adds `--reached`."""
    parser.addoption("--reached", help="the file to which the report is added")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Around each test."""
    _sites[:] = bytes(len(_sites))
    _reports.clear()
    result = yield
    if _reports and all(report.passed for report in _reports.values()):
        reached = [number for number, byte in enumerate(_sites[:]) if byte]
        seconds = sum(report.duration for report in _reports.values())
        with open(item.config.getoption("--reached"), "a") as report:
            print(json.dumps([item.nodeid, round(seconds, 3), reached]), file=report)
    return result


def pytest_runtest_logreport(report):
    """Of a test's setup, call and end."""
    _reports[report.when] = report
