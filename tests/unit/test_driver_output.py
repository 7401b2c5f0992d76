"""The thread that has the program's handlers handle what workers log; no Ray, and no worker but this process."""

import errno
import logging
import os
import pickle
import sys

import pytest

from rayloader.transport.line import LineError
from rayloader.transport.local_line import connect
from rayloader.workers.output import Output


@pytest.fixture
def output():
    output = Output()
    output.start()
    yield output
    output.close()


@pytest.fixture
def handled():
    """A logger with a handler that raises what is logged if that is an exception, and else keeps it."""
    kept = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.msg in ERRORS:
                raise ERRORS[record.msg]
            kept.append(record)

    logger, handler = logging.getLogger("handled"), Handler()
    logger.addHandler(handler)
    logger.propagate = False
    yield kept
    logger.removeHandler(handler)
    logger.propagate = True


ERRORS = {"raise": RuntimeError("from the handler"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}


def send(output, *messages):
    line = connect(output.address, {})
    for message in messages:
        message, *arguments = message if isinstance(message, tuple) else (message,)
        fields = logging.LogRecord("handled", logging.WARNING, "path", 1, message, tuple(arguments), None).__dict__
        line.send(pickle.dumps((["handled"], fields)))
    line.drain()
    line.close()
    output.settle()


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_a_handler_raises_the_next_record_is_handled_and_the_next_worker_too(output, handled, error, capsys):
    send(output, error, "next")
    send(output, "later")
    assert [record.msg for record in handled] == ["next", "later"]
    assert type(ERRORS[error]).__name__ in capsys.readouterr().err


def test_what_is_no_record_is_told_and_the_next_is_handled(output, handled, capsys):
    line = connect(output.address, {})
    line.send(b"no pickle")
    line.drain()
    line.close()
    send(output, "next")
    assert [record.msg for record in handled] == ["next"]
    assert "UnpicklingError" in capsys.readouterr().err


def test_arguments_come_as_they_were(output, handled, capsys):
    """A record keeps its only argument by itself where that is a dict."""
    send(output, ("%(step)d", {"step": 3}), ("%d of %d", 1, 2), ("%s", {}), "none")
    assert [record.getMessage() for record in handled] == ["3", "1 of 2", "{}", "none"]
    assert capsys.readouterr().err == ""


def test_only_streams_of_the_program_are_handed_over(output, monkeypatch):
    """A program that was started without a standard output has a file of its own at descriptor 1."""
    handed_over = {}
    connect(output.address, handed_over).close()
    assert sorted(handed_over) == [1, 2]
    monkeypatch.setattr(sys, "__stdout__", None)
    without = {}
    connect(output.address, without).close()
    assert sorted(without) == [1, 2]
    assert os.path.samestat(os.fstat(without[1]), os.stat(os.devnull))
    assert os.path.samestat(os.fstat(without[2]), os.fstat(2))
    for descriptor in [*handed_over.values(), *without.values()]:
        os.close(descriptor)


def test_the_programs_factory_makes_the_record_and_its_filters_see_it_once(output, handled, monkeypatch):
    seen = []

    def see(record):
        seen.append(record.msg)
        return len(seen) > 1

    def make(name, *arguments, **named):
        record = logging.LogRecord(name, *arguments, **named)
        record.short = name.split("d")[0]
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", make)
    logger = logging.getLogger("handled")
    logger.addFilter(see)
    try:
        send(output, "dropped", "kept")
    finally:
        logger.removeFilter(see)
    assert seen == ["dropped", "kept"]
    assert [(record.msg, record.short) for record in handled] == [("kept", "han")]


@pytest.mark.parametrize("spare", [True, False])
def test_without_descriptors_a_worker_is_turned_away_and_the_next_one_served(output, handled, monkeypatch, spare):
    accept, refused = output._listener.accept, []

    def fails(*arguments):
        if len(refused) < (1 if spare else 3):
            refused.append(arguments)
            raise OSError(errno.EMFILE, "too many open files")
        return accept(*arguments)

    monkeypatch.setattr(output._listener, "accept", fails)
    if not spare:
        opened = os.open
        monkeypatch.setattr(os, "open", lambda *arguments: opened(*arguments) if len(refused) > 2 else fails())
    if spare:
        with pytest.raises(LineError, match="no descriptor left"):
            connect(output.address, {})
    send(output, "next")
    assert [record.msg for record in handled] == ["next"]
