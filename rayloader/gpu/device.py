"""What rayloader asks of an accelerator: to page-lock memory, to copy batches, and to tell when copies are done.

Promise: `Accelerator` is all of it; `TorchAccelerator` does it with torch, and the tests have a simulated one. Nothing
here waits, except for `Event.synchronize`. No call of a worker's process comes here: workers create no context of CUDA.

A *copy* reads memory some time after it was queued. Until its event has happened nobody may write to that memory; see
NOTE [Held slots] in page_locks.py.

NOTE [All streams]. A program queues copies on any stream, and nobody tells us. Drivers since CUDA 12.5 can record an
event of all that has been queued in a context, whatever the stream (`_Driver`). With older ones nothing is
page-locked: a copy on a stream that we do not know would read what the next batch writes.

NOTE [Captures]. While a stream captures a CUDA graph, an event of its context makes the graph invalid, whichever thread
records it, and nothing tells whether some stream captures. But a program's thread that asks for a batch is capturing
nothing, or else its current stream. So events of all streams are recorded there (`Marks`). Only the end of a worker,
whose memory must be unlocked although perhaps no batch will ever be asked for again, has them recorded at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from typing_extensions import override

from rayloader._compat import current_accelerator
from rayloader.errors import RayloaderError
from rayloader.interrupts import new_lock

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
# After page-locking or unlocking, so many times as long passes before the next time as this has taken.
PAUSES = 10
# Tensors up to this size are copied from whatever memory they are in: CUDA takes them over before the call returns.
PAGEABLE_BYTES = 1 << 16
# Results of cudaHostUnregister after which nothing is registered there: success, and that nothing was, for instance
# because the context is gone (InvalidValue, CudartUnloading, ContextIsDestroyed, HostMemoryNotRegistered).
_NOT_REGISTERED = (0, 1, 4, 709, 713)


class AcceleratorError(RayloaderError):
    """Memory cannot be page-locked here."""


class Event(Protocol):
    """Something that happens once everything is done that had been queued when it was made."""

    def query(self) -> bool:
        """Whether it has happened."""

    def synchronize(self) -> None:
        """Waits until it has happened."""


class Throttle:
    """When memory may be page-locked or unlocked: one slot at a time in a process, and with pauses.

    The driver lets no kernel start while it registers memory, so that training stands still. With pauses of `PAUSES`
    times the work it stands still for less than a tenth of the time, whatever the sizes. Any thread may call.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = new_lock(reentrant=False)  # by whom it is held, he works
        self._next = -math.inf  # when the next may begin

    def turn(self, work: Callable[[], None], patience: Callable[[float], bool] | None = None) -> bool:
        """Does the work if that is allowed now, and returns whether it was done.

        Args:
            work: on one slot.
            patience: waits for so many seconds, until it is allowed, and returns whether to give up.
        """
        while True:
            due = self._next
            left = due - self._clock()
            if left > 0 and (patience is None or patience(left)):
                return False
            if not self._turn.acquire(blocking=patience is not None):
                return False
            if self._next == due:
                break
            self._turn.release()  # another thread has worked meanwhile, and its pause is to come
        try:
            began = self._clock()
            try:
                work()
            finally:
                ended = self._clock()
                self._next = ended + PAUSES * (ended - began)
        finally:
            self._turn.release()
        return True


class Accelerator(Protocol):
    """The accelerators of this process, all of one kind. Any thread may call.

    Attributes:
        can_register: whether this kind can page-lock memory that it has not allocated, and has not failed to.
        throttle: of `register` and `unregister`.
    """

    can_register: bool
    throttle: Throttle

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks whole pages.

        Raises:
            AcceleratorError: they cannot be; the text is the accelerator's reason.
        """

    def unregister(self, address: int) -> None:
        """Ends what `register` began at this address; no copy from there may be pending.

        Raises:
            AcceleratorError: the memory is still page-locked.
        """

    def asks(self) -> None:
        """The program asks for a batch, in the calling thread; it may queue copies of it, and has dropped others.

        Raises:
            RuntimeError: the accelerator has failed; events that were to be recorded are at the next call.
        """

    def event(self, device: torch.device | None = None) -> Event:
        """An event of copies: of those to one device that `copy` has queued so far; or for None of all, by anyone.

        For None it is recorded when the program asks for a batch, or when somebody waits for it; see NOTE [Captures].
        """

    def copy(self, leaf: Any, device: torch.device) -> Any:
        """The result of `to` of a tensor, or of another object that has it, queued on a stream of our own.

        A tensor that is not page-locked is copied into page-locked memory of torch's first, which torch uses again.
        """

    def wait(self, event: Event, device: torch.device, leaves: Iterable[Any]) -> None:
        """Lets what the calling thread queues on the device from now on find what `copy` has returned.

        Args:
            event: from after the copies.
            device: to which they were made.
            leaves: their results. Their memory is not used for anything else before what is queued on that stream
                until their end is done.
        """


def current() -> Accelerator | None:
    """The accelerators of this process; None if torch finds none, or they have no streams."""
    kind = current_accelerator()
    if kind is None or not torch.accelerator.is_available() or not hasattr(torch.get_device_module(kind), "Stream"):
        return None
    return _made.setdefault(kind.type, TorchAccelerator(kind.type))


def move(leaf: Any, device: torch.device) -> Any:
    """`leaf.to(device)`, without waiting for the copy where the object's method has such an argument."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=True)
    try:
        moved = leaf.to(device, non_blocking=True)
    except TypeError:  # objects of the program's may take the device alone
        moved = leaf.to(device)
    return leaf if moved is None else moved  # which has moved itself


class _Events(Event):
    """Happens when all of these torch events have."""

    __slots__ = ("events",)

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events

    @override
    def query(self) -> bool:
        return not [event for event in self.events if not event.query()]

    @override
    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class Marks:
    """Events that are recorded later, all of them by one record; see NOTE [Captures]. Any thread may call.

    Args:
        record: makes an event of all that was queued so far.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        self._record = record
        self._lock = new_lock(reentrant=False)
        self._waiting: list[_Later] = []

    def event(self) -> Event:
        """An event that happens after what is queued before the next call of `record`."""
        self._waiting.append(later := _Later(self))
        return later

    def record(self) -> None:
        """Records the events that were made so far."""
        with self._lock:
            if waiting := self._waiting.copy():  # others may come meanwhile, for the next call
                event = self._record()  # if this fails, the next call records them
                for later in waiting:
                    later.recorded = event
                del self._waiting[: len(waiting)]  # after an interrupt before this line they are recorded again


class _Later(Event):
    __slots__ = ("_marks", "recorded")

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.recorded: Event | None = None

    @override
    def query(self) -> bool:
        return self.recorded is not None and self.recorded.query()

    @override
    def synchronize(self) -> None:
        if self.recorded is None:
            self._marks.record()
        if self.recorded is not None:
            self.recorded.synchronize()


class TorchAccelerator(Accelerator):
    """Torch's accelerators of one kind; page-locks memory for CUDA alone, see NOTE [All streams].

    Args:
        kind: type of the devices.
    """

    def __init__(self, kind: str) -> None:
        self._module: Any = torch.get_device_module(kind)
        driver = _Driver.of_this_machine() if kind == "cuda" else None
        self.can_register = driver is not None
        self.throttle = Throttle()
        self._queues: dict[torch.device, Any] = {}  # our streams
        self._marks = Marks(driver.record if driver is not None else lambda: _Events([]))
        self._registers = False  # whether something is, or was, registered

    @override
    def register(self, address: int, nbytes: int) -> None:
        try:
            runtime: Any = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        except (RuntimeError, AssertionError) as error:  # CUDA cannot be initialized
            raise AcceleratorError(str(error)) from error
        if int(code):
            with contextlib.suppress(RuntimeError):  # reports, and so clears, the error that the call has left
                torch.zeros(1, device="cuda")
            raise AcceleratorError(f"cudaHostRegister: {runtime.cudaGetErrorString(code)}")
        self._registers = True

    @override
    def unregister(self, address: int) -> None:
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostUnregister(address)
        if int(code) not in _NOT_REGISTERED:
            raise AcceleratorError(f"cudaHostUnregister: {runtime.cudaGetErrorString(code)}")

    @override
    def asks(self) -> None:
        if self._registers and not torch.cuda.is_current_stream_capturing():
            self._marks.record()

    @override
    def event(self, device: torch.device | None = None) -> Event:
        return self._marks.event() if device is None else _Events([self._queue(device).record_event()])

    @override
    def copy(self, leaf: Any, device: torch.device) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.nbytes > PAGEABLE_BYTES:
            with contextlib.suppress(RuntimeError):  # no room: then the copy waits for the device
                leaf = leaf.pin_memory()  # the same tensor, if it is page-locked
        with self._module.stream(self._queue(device)):
            return move(leaf, device)

    @override
    def wait(self, event: Event, device: torch.device, leaves: Iterable[Any]) -> None:
        assert isinstance(event, _Events)
        stream = self._module.current_stream(device)
        for one in event.events:
            stream.wait_event(one)
        for leaf in leaves:
            leaf.record_stream(stream)

    def _queue(self, device: torch.device) -> Any:
        queue = self._queues.get(device)
        return self._queues.setdefault(device, self._module.Stream(device)) if queue is None else queue


_made: dict[str, TorchAccelerator] = {}  # by kind


class _Driver:
    """The driver of CUDA itself, which knows the contexts that torch uses, one a device; see NOTE [All streams].

    Args:
        library: of the driver.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}  # by device index

    @classmethod
    def of_this_machine(cls) -> _Driver | None:
        """None if there is none, as for ROCm, or an older one."""
        with contextlib.suppress(OSError):
            library = ctypes.CDLL("libcuda.so.1")
            return cls(library) if hasattr(library, "cuCtxRecordEvent") else None
        return None

    def record(self) -> Event:
        """An event of all that was queued in all contexts.

        Raises:
            AcceleratorError: that is not possible now, for instance while a graph is captured.
        """
        events = []
        for index in range(torch.cuda.device_count()):
            if (context := self._context(index)) is None:
                continue
            event: Any = torch.cuda.Event()
            event.record(torch.cuda.default_stream(index))  # which also creates it
            if code := self._library.cuCtxRecordEvent(context, ctypes.c_void_p(event.cuda_event)):
                raise AcceleratorError(f"cuCtxRecordEvent: error {code}")
            events.append(event)
        return _Events(events)

    def _context(self, index: int) -> ctypes.c_void_p | None:
        """The context of a device; None while it has none, and none is created."""
        if index in self._contexts:
            return self._contexts[index]
        library, context = self._library, ctypes.c_void_p()
        number, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        failed = library.cuDeviceGet(ctypes.byref(number), index)
        failed = failed or library.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active))
        if failed or not active.value or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
            return None
        self._contexts[index] = context
        return context
