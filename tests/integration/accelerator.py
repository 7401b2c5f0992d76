"""An accelerator that is none: it notes what is pinned."""

import threading

import torch

from pretended import pretend_accelerator

LIMIT = 120.0  # seconds to wait for another thread; on expiry the test fails


class Pinned(torch.Tensor):
    """What the accelerator's pinned memory looks like here."""


class Accelerator:
    """Counts what is pinned, and where; `at` is called with the number of the tensor before it is pinned."""

    index = 3

    def __init__(self):
        self.changed = threading.Condition()
        self.pinned = 0
        self.threads = set()
        self.devices = set()
        self.at = lambda count: None

    def pin(self, tensor):
        with self.changed:
            count = self.pinned
            self.pinned += 1
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()
        self.at(count)
        return tensor.as_subclass(Pinned)

    def install(self, monkeypatch):
        """Puts it in the place of torch's; pins in Python."""
        pretend_accelerator(monkeypatch, self.pin, self.index, self.devices.add)

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: self.pinned >= count, LIMIT), self.pinned
