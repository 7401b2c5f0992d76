"""Signal handlers are the program's: they stay, and what they raise in a waiting next() arrives as it is."""

import contextlib
import os
import signal
import subprocess
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

import rayloader
from latches import Gate, Mail
from probes import Calls
from rayloader import DataLoader
from rayloader.actors import pool

pytestmark = pytest.mark.usefixtures("ray_session")


class Preempted(Exception):
    pass


each_error = pytest.mark.parametrize("error", [SystemExit(7), Preempted("now"), KeyboardInterrupt("text")], ids=repr)


@pytest.fixture
def check(tmp_path):
    """Has a handler raise an error while an iterator of a loader waits for its second batch, which comes later."""
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        if index == 1:
            mail.send("waits")
            gate.wait()
        return torch.tensor(index)

    def check(iterator_of, error):
        def handler(*_):
            raise error

        def strike():
            mail.receive()
            os.kill(os.getpid(), signal.SIGUSR1)

        iterator = iterator_of(Calls(get, 3))
        assert next(iterator).item() == 0
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            thread = threading.Thread(target=strike)
            with pytest.raises(type(error)) as caught:  # noqa: PT012
                thread.start()
                next(iterator)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert caught.value is error
        thread.join()
        gate.open()
        assert [batch.item() for batch in iterator] == [1, 2]

    yield check
    mail.close()


@pytest.mark.parametrize("pin_memory", [False, True])
@each_error
def test_what_a_handler_raises_in_a_waiting_next_passes_through_and_the_batch_comes_later(
    accelerator, check, error, pin_memory
):
    check(lambda dataset: iter(DataLoader(dataset, None, num_workers=1, pin_memory=pin_memory)), error)


@pytest.fixture
def raises_while_waiting(monkeypatch):
    """Has a signal's handler raise an error while a module waits for calls of Ray's, which waits until then."""

    def arm(module, error):
        wait_for = module.wait_for

        def strike(*_):
            raise error

        def wait(refs, *_):
            monkeypatch.undo()  # once
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            return wait_for([*refs, SimpleNamespace(future=Future)], 60.0)

        monkeypatch.setattr(module, "wait_for", wait)
        signal.signal(signal.SIGALRM, strike)

    before = signal.getsignal(signal.SIGALRM)
    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@each_error
def test_what_a_handler_raises_in_an_iter_that_waits_for_its_workers_passes_through(error, raises_while_waiting):
    loader = DataLoader(range(3), None, num_workers=1)
    assert list(loader) == [0, 1, 2]
    with pytest.raises(type(error)) as caught:  # noqa: PT012
        raises_while_waiting(pool, error)
        iter(loader)
    assert caught.value is error
    assert list(loader) == [0, 1, 2]


@pytest.mark.parametrize("lines", [True, False])
@each_error
def test_what_a_handler_raises_in_a_waiting_consumer_passes_through_and_the_batch_comes_later(check, error, lines):
    with contextlib.ExitStack() as stack:

        def iterator_of(dataset):
            loader = DataLoader(dataset, None, num_workers=0, arenas=lines)
            return iter(stack.enter_context(rayloader.share(loader, consumers=1)).consumer(0))

        check(iterator_of, error)


@pytest.mark.parametrize("lines", [True, False])
def test_a_ctrl_c_that_reaches_an_actor_does_nothing(lines, tmp_path):
    """At work, in a program that it has started, or idle."""
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as started:
            mail.send(f"{os.getpid()} {started.pid}")
            gate.wait()
            started.wait()
        return os.getpid(), started.returncode

    loader = DataLoader(Calls(get, 2), None, num_workers=1, workers="ray", arenas=lines)
    iterator = iter(loader)
    pid, started = map(int, mail.receive()[0].split())
    for _ in range(3):
        os.kill(pid, signal.SIGINT)
    os.kill(started, signal.SIGINT)
    gate.open()
    assert next(iterator) == [pid, -signal.SIGINT]
    os.kill(int(mail.receive()[0].split()[1]), signal.SIGINT)
    assert list(iterator) == [[pid, -signal.SIGINT]]
    os.kill(pid, signal.SIGINT)
    iterator = iter(loader)
    for _ in range(2):
        worker, started = map(int, mail.receive()[0].split())
        assert worker == pid
        os.kill(started, signal.SIGINT)
        next(iterator)
    mail.close()
