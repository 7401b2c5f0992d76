"""Tracebacks that users see: their own lines, and one of this package's."""

import functools
import signal
import traceback

import pytest

import rayloader
from rayloader.actors import pool


def files_of_failed_iter(monkeypatch, fails, kind):
    """The files of the lines in the traceback of an error that comes from within the package.

    `fails` is written in C, so that it is in no line itself.
    """
    monkeypatch.setattr(pool.session, "ensure", lambda *_: "no number")
    monkeypatch.setattr(pool, "Pool", fails)
    with pytest.raises(kind) as caught:
        iter(rayloader.DataLoader([1, 2], num_workers=1, workers="ray"))
    return [frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_interrupt_while_an_epoch_begins_shows_where_the_program_was(monkeypatch):
    interrupted = functools.partial(signal.default_int_handler, signal.SIGINT)
    files = files_of_failed_iter(monkeypatch, interrupted, KeyboardInterrupt)
    assert files == ["test_tracebacks.py", "loader.py"]


def test_an_error_in_this_package_keeps_all_its_lines(monkeypatch):
    files = files_of_failed_iter(monkeypatch, int, ValueError)
    assert len(files) > 3
    assert files[-1] == "pool.py"
