"""An accelerator that is none: its copies read their source only when they are carried out, which a test decides.

It notes what a real one would do wrong without a word: a source that was written to before its copy (`torn`), memory
that was unlocked or locked again while it was in use, an event of all streams while a graph is captured (`violations`).
"""

import ctypes
import threading

import torch

from pretended import pretend_accelerator
from rayloader.gpu import device
from rayloader.gpu.device import Accelerator, AcceleratorError, Event, Marks, Throttle, move
from rayloader.transport.arena import PAGE

DEVICE = torch.device("cuda", 0)
LIMIT_S = 500.0  # to wait for another thread; on expiry the test fails


def wait_for_unlocking():
    """Until no thread unlocks memory of arenas that have ended."""
    for thread in threading.enumerate():
        if thread.name == "rayloader-unlock":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


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

    Attributes:
        captures: whether a stream captures a graph, in the program's thread.
        devices, threads: those for which, and in which, tensors were pinned.
        lockings: bytes of each range that was locked, one after the other.
        pinned, queued, done, waits, moved: how many tensors were copied to pinned memory, copies queued and carried
            out, batches waited for by the program's stream, and tensors moved without a stream of ours.
        refuses: why no memory can be locked.
        registered: bytes of each locked range, by its address.
        seconds: what its clock shows, which goes on when memory is locked, by `s_per_gb`.
        torn: numbers of copies whose source was written to before they were carried out.
    """

    can_register = True

    def __init__(self, at_each_query=0):
        self.at_each_query, self.refuses, self.captures = at_each_query, "", False
        self.seconds = self.s_per_gb = 0.0
        self.throttle = Throttle(lambda: self.seconds)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.pinned = self.queued = self.done = self.waits = self.moved = 0
        self.devices, self.threads = set(), set()
        self.registered, self.lockings = {}, []
        self.pending = []  # of copies: address of the source, what it held then, the result
        self.torn, self.violations = [], []
        self._marks = Marks(self._record)

    # ---- what the library asks for

    def register(self, address, nbytes):
        with self.lock:
            if self.refuses:
                raise AcceleratorError(self.refuses)
            if self._overlaps(address, nbytes):
                self.violations.append(f"{nbytes} bytes at {address:x} are locked twice")
            if _missing_pages(address, nbytes) * PAGE > nbytes / 8:  # to which the sizes of slots are rounded
                self.violations.append(f"{nbytes} bytes at {address:x} are locked of which nobody has written most")
            self.seconds += nbytes * self.s_per_gb / 1e9
            self.lockings.append(nbytes)
            self.registered[address] = nbytes

    def unregister(self, address):
        with self.lock:
            nbytes = self.registered.pop(address)
            for copy in self.pending:
                if copy[0] is not None and copy[0] < address + nbytes and address < copy[0] + copy[1].nbytes:
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
            if not (leaf.is_contiguous() and self.is_locked(source, held.nbytes)):
                source = held.data_ptr()  # its source is read before the call returns
            self.pending.append([source, held, result])
            return result

    def wait(self, event, device, leaves):
        self.waits += 1
        event.synchronize()
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                leaf.record_stream(None)

    # ---- for the tests

    def wait_for(self, **counts):
        """Waits until there were so many, for instance `queued=3`."""
        with self.changed:
            assert self.changed.wait_for(lambda: all(getattr(self, name) >= counts[name] for name in counts), LIMIT_S)

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
        if not any(inside) and self._overlaps(address, nbytes):
            self.violations.append(f"of {nbytes} bytes at {address:x} a part is locked")
        return any(inside)

    def holds(self, tensor):
        """Whether the tensor lies in locked memory."""
        return self.is_locked(tensor.data_ptr(), tensor.nbytes)

    def install(self, monkeypatch, *, locks=True, index=0):
        """Puts it in the place of torch's; without `locks` it only pins. `index` is that of the current device."""
        to = torch.Tensor.to

        def moved(tensor, *args, **kwargs):
            self.moved += (here := args[:1] == (DEVICE,))
            return tensor if here else to(tensor, *args, **kwargs)

        pretend_accelerator(monkeypatch, self._pin, index, self.devices.add)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(device, "current", lambda: self if locks else None)
        monkeypatch.setattr(torch.Tensor, "to", moved)
        return self

    def _pin(self, tensor):
        """In place of `Tensor.pin_memory`."""
        with self.changed:
            if self.holds(tensor):
                return tensor
            self.pinned += 1
            self.threads.add(threading.current_thread().name)
            self.changed.notify_all()
        return tensor.clone()

    def _overlaps(self, address, nbytes):
        return any(address < start + size and start < address + nbytes for start, size in self.registered.items())


def _missing_pages(address, nbytes):
    """How many pages of a mapped file do not exist yet."""
    exists = (ctypes.c_ubyte * (nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), exists) == 0, ctypes.get_errno()
    return sum(not (page & 1) for page in exists)
