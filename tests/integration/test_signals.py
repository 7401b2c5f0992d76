"""Signal handlers are the program's: they stay, and what they raise in a waiting next() arrives as it is."""

import os
import signal
import threading

import pytest
import torch

from latches import Gate, Mail
from probes import Calls
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")


class Preempted(Exception):
    pass


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("error", [SystemExit(7), Preempted("now"), KeyboardInterrupt("text")], ids=repr)
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
