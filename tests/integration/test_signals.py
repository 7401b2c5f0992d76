"""Signal handlers are the program's: they stay, and what they raise in a waiting next() arrives as it is."""

import os
import signal
import threading

import pytest
import torch

import rayloader
from latches import Gate, Mail
from probes import Calls
from rayloader import DataLoader
from rayloader.driver import lifetimes
from rayloader.sharing import link

pytestmark = pytest.mark.usefixtures("ray_session")


class Preempted(Exception):
    pass


each_error = pytest.mark.parametrize("error", [SystemExit(7), Preempted("now"), KeyboardInterrupt("text")], ids=repr)


@pytest.mark.parametrize("pin_memory", [False, True])
@each_error
def test_what_a_handler_raises_in_a_waiting_next_passes_through_and_the_batch_comes_later(
    accelerator, tmp_path, error, pin_memory
):
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        if index == 1:
            mail.send("waits")
            gate.wait()
        return torch.tensor(index)

    def handler(*_):
        raise error

    def strike():
        mail.receive()
        os.kill(os.getpid(), signal.SIGUSR1)

    iterator = iter(DataLoader(Calls(get, 3), None, num_workers=1, pin_memory=pin_memory))
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
    mail.close()


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
            return wait_for(refs, len(refs) + 1, 60.0)

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
        raises_while_waiting(lifetimes, error)
        iter(loader)
    assert caught.value is error
    assert list(loader) == [0, 1, 2]


@each_error
def test_what_a_handler_raises_in_a_waiting_consumer_passes_through_and_the_batch_comes_later(
    error, raises_while_waiting
):
    with rayloader.share(DataLoader(range(3), None, num_workers=0), consumers=1) as share:
        iterator = iter(share.consumer(0))
        assert next(iterator) == 0
        with pytest.raises(type(error)) as caught:  # noqa: PT012
            raises_while_waiting(link, error)
            next(iterator)
        assert caught.value is error
        assert list(iterator) == [1, 2]
