"""An accelerator that is none: its copies read their source only when they are carried out, which a test decides.

It notes what a real one would do wrong without a word: a source that was written to before its copy (`torn`), memory
that was unlocked or locked again while it was in use, an event of all streams while a graph is captured (`violations`).

Its clock goes on when memory is locked, for which a real one lets no kernel start, and when the program trains.
"""

import collections
import ctypes
import threading

import torch

from pretended import pretend_accelerator
from rayloader.gpu import device
from rayloader.gpu.device import (
    PAGEABLE_BYTES,
    Accelerator,
    AcceleratorError,
    Event,
    Marks,
    Throttle,
    move,
)
from rayloader.transport.arena import PAGE

# Seconds to lock a GB of pages that exist, and of others, as on an H100.
OLD_S, NEW_S = 0.15, 0.7
Locking = collections.namedtuple("Locking", "began ended address nbytes new_pages")  # began, ended: by the clock

DEVICE = torch.device("cuda", 0)
LIMIT_S = 500.0  # to wait for another thread; on expiry the test fails


class SimulatedEvent(Event):
    """Happens once so many copies were carried out."""

    def __init__(self, accelerator, count):
        self.accelerator, self.count = accelerator, count

    def query(self):
        if self.accelerator.at_each_query:
            self.accelerator.advance(self.accelerator.at_each_query)
        return self.accelerator.done >= self.count

    def synchronize(self):
        self.accelerator.advance(self.count - self.accelerator.done)


class SimulatedAccelerator(Accelerator):
    """Its devices are this process's memory.

    Args:
        at_each_query: how many copies are carried out when an event is asked whether it has happened.
        refuses: why no memory can be locked.
        takes_time: whether locking takes time.

    Attributes:
        seconds: what its clock shows.
        lockings: one after the other.
        staged: copies so far whose source was copied to page-locked memory first.
        registered: bytes of each locked range, by its address.
        most_registered: bytes that were locked at the same time, at most.
        queued, done: copies so far.
        torn: numbers of copies whose source was written to before they were carried out.
        waits: for how many batches a stream of the program's was told to wait.
        captures: whether a stream captures a graph, in the program's thread.
    """

    can_register = True

    def __init__(self, at_each_query=0, refuses="", takes_time=False):
        self.at_each_query, self.refuses, self.takes_time = at_each_query, refuses, takes_time
        self.seconds = 0.0
        self.throttle = Throttle(lambda: self.seconds)
        self.lockings = []
        self.staged = 0
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.registered = {}
        self.most_registered = 0
        self.pending = []  # of copies: address of the source, what it held then, the result
        self.queued = self.done = self.waits = 0
        self.captures = False
        self._marks = Marks(self._record)
        self.torn, self.violations = [], []
        self.pinned = 0

    # ---- what the library asks for

    def register(self, address, nbytes):
        with self.lock:
            if self.refuses:
                raise AcceleratorError(self.refuses)
            if any(self._overlap(address, nbytes, *other) for other in self.registered.items()):
                self.violations.append(f"{nbytes} bytes at {address:x} are locked twice")
            new_pages = _missing_pages(address, nbytes)
            began = self.seconds
            if self.takes_time:
                self.seconds += ((nbytes - new_pages * PAGE) * OLD_S + new_pages * PAGE * NEW_S) / 1e9
            self.lockings.append(Locking(began, self.seconds, address, nbytes, new_pages))
            self.registered[address] = nbytes
            self.most_registered = max(self.most_registered, sum(self.registered.values()))

    def unregister(self, address):
        with self.lock:
            nbytes = self.registered.pop(address)
            for copy in self.pending:
                if copy[0] is not None and self._overlap(address, nbytes, copy[0], copy[1].nbytes):
                    self.violations.append(f"{nbytes} bytes at {address:x} are unlocked before they were copied")
                    copy[0] = None  # it may not be mapped any more

    def asks(self):
        if not self.captures:
            self._marks.record()

    def event(self, device=None):
        with self.lock:
            return self._marks.event() if device is None else SimulatedEvent(self, self.queued)

    def _record(self):
        with self.lock:
            if self.captures:
                self.violations.append("an event of all streams was recorded while a graph was captured")
            return SimulatedEvent(self, self.queued)

    def copy(self, leaf, device):
        if not isinstance(leaf, torch.Tensor):
            return move(leaf, device)
        with self.lock:
            source, held, result = leaf.data_ptr(), leaf.clone(), torch.zeros_like(leaf)
            self.queued += 1
            self.changed.notify_all()
            if leaf.is_contiguous() and self.is_locked(source, held.nbytes):
                self.pending.append([source, held, result])
            else:  # its source is read before the call returns, into page-locked memory if it is large
                self.staged += leaf.nbytes > PAGEABLE_BYTES
                self.pending.append([held.data_ptr(), held, result])
            return result

    def wait(self, event, device, leaves):
        self.waits += 1
        event.synchronize()
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                leaf.record_stream(None)

    # ---- for the tests

    def train(self, seconds):
        """A step of so many seconds, in the program's thread."""
        with self.lock:  # no kernel starts while memory is being locked
            self.seconds += seconds

    def move_anything(self, to, moved=None):
        """Lets `Tensor.to` of a device that is none give the tensor itself."""
        before = torch.Tensor.to

        def move_here(tensor, *args, **kwargs):
            if args[:1] != (to,):
                return before(tensor, *args, **kwargs)
            if moved is not None:
                moved.append(to)
            return tensor

        self._monkeypatch.setattr(torch.Tensor, "to", move_here)

    def wait_for(self, queued):
        """Waits until so many copies were queued."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.queued >= queued, LIMIT_S), self.queued

    def advance(self, count=1):
        """Carries out so many copies, the oldest first."""
        with self.lock:
            for _ in range(min(count, len(self.pending))):
                source, held, result = self.pending.pop(0)
                if source is not None:
                    ctypes.memmove(result.data_ptr(), source, held.nbytes)
                if not torch.equal(result, held):
                    self.torn.append(self.done)
                self.done += 1

    def is_locked(self, address, nbytes):
        """Whether all these bytes lie in one range that is locked; with a part that is, CUDA would refuse a copy."""
        inside = [start <= address and address + nbytes <= start + size for start, size in self.registered.items()]
        if not any(inside) and any(self._overlap(address, nbytes, *other) for other in self.registered.items()):
            self.violations.append(f"of {nbytes} bytes at {address:x} a part is locked")
        return any(inside)

    def pin(self, tensor):
        """In place of `Tensor.pin_memory`."""
        if not self.is_locked(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()):
            self.pinned += 1
            return tensor.clone()
        return tensor

    def install(self, monkeypatch):
        """Puts it in the place of torch's."""
        self._monkeypatch = monkeypatch
        pretend_accelerator(monkeypatch, self.pin)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(device, "current", lambda: self)
        return self

    def assert_locked_at_leisure(self):
        """At most one slot at a time was locked, with pauses, and no memory that no batch had been in."""
        for before, locking in zip(self.lockings, self.lockings[1:], strict=False):
            assert locking.began >= before.ended + 10 * (before.ended - before.began)
        for locking in self.lockings:
            assert locking.new_pages * PAGE <= locking.nbytes / 8  # to which the sizes of slots are rounded

    @staticmethod
    def _overlap(start, nbytes, other, size):
        return start < other + size and other < start + nbytes


def _missing_pages(address, nbytes):
    """How many pages of a mapped file do not exist yet."""
    exists = (ctypes.c_ubyte * (nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), exists) == 0, ctypes.get_errno()
    return sum(not (page & 1) for page in exists)
