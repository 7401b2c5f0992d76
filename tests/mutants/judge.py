"""A plugin of pytest's: gives mutants to the tests that it has collected, each in a fork, which need not import torch.

Each line of the standard input names a mutant, a file with the names of tests, in order, and the file for their output.
The answers, on the standard output that it was started with, are the number of the fork's process, and when that has
ended 0 if all these tests have passed.
"""

import os
from pathlib import Path

import pytest
from _pytest.main import pytest_runtestloop as run_all

from mutation import ACTIVE

_questions, _answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)  # pytest captures the others
os.dup2(2, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """In place of the tests."""
    by_name = {item.nodeid: item for item in session.items}
    for line in _questions:
        mutant, names, output = line.rstrip("\n").split("\t")
        if (pid := os.fork()) == 0:
            _judge(session, int(mutant), [by_name[name] for name in Path(names).read_text().split("\n")], output)
        print(pid, file=_answers)
        _, status = os.waitpid(pid, 0)
        print(status, file=_answers)
    os._exit(0)


def _judge(session, mutant, items, output):
    os.setsid()
    log = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in range(3):
        os.dup2(log, number)
    session.config.get_terminal_writer()._file = os.fdopen(log, "w", buffering=1)
    from rayloader import _mutants

    os.environ[ACTIVE], _mutants._active = str(mutant), mutant
    session.items, session.testscollected = items, len(items)
    try:
        run_all(session)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Of a test's setup, call and end: the first that fails is all there is to know."""
    if report.failed:
        os._exit(1)
