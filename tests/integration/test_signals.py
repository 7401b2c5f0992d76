"""Signal handlers are the program's: they stay, and what they raise in a waiting next() arrives as it is."""

import contextlib
import os
import signal
import subprocess
import threading

import pytest
import torch

import rayloader
from latches import Gate, Mail
from probes import Calls
from rayloader import DataLoader

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

    loader = DataLoader(Calls(get, 1), None, num_workers=1, workers="ray", arenas=lines)
    for _ in range(2):
        iterator = iter(loader)
        pid, started = map(int, mail.receive()[0].split())
        os.kill(pid, signal.SIGINT)
        os.kill(started, signal.SIGINT)
        gate.open()
        assert list(iterator) == [[pid, -signal.SIGINT]]
        os.kill(pid, signal.SIGINT)
    mail.close()
