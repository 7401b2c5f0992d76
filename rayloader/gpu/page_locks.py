"""Which slots of an arena are page-locked for an accelerator, and which of them wait for copies.

Promise: a slot is page-locked as a whole or not at all, because CUDA refuses a copy of which only a part is. Nothing
waits here, except for the thread `rayloader-unlock` and `PageLocks.wait`. A `PageLocks` is for the driver's side of one
arena; `lock` is for any thread, the rest for one at a time.

NOTE [One by one]. While memory is page-locked, the driver of CUDA lets no kernel start, and pages that nobody has
touched yet take several times as long as others. So only slots with a batch are locked, each by itself: after the
worker has written it, when it is used for the second time, and not more often than `Throttle` allows. Batches in other
slots go through page-locked memory of torch's, as they would with torch's loader.

NOTE [Held slots]. A program may drop a batch while a copy of it is still queued: `x.to("cuda", non_blocking=True)`
followed by `del x`. So a locked slot is *held* when its last view has died: its ticket goes back to the worker when the
event has happened that is recorded when the program next asks for a batch. Nobody waits for it; without room the worker
takes other memory. Which copies count says NOTE [All streams] in device.py. Copies from memory that is not locked read
all of it before the call returns.

NOTE [Locked memory]. The pages of a locked slot must stay where they are: the accelerator goes on reading those that it
was told of. So a locked slot is never given back to the system, as cold memory and that of resting workers is, until
its worker has ended. Then `Unlocker` unlocks each slot in which no batch lives, after the last copy, and gives it back.
An arena with locked slots is mapped until all are unlocked, even if nothing else refers to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Collection

from rayloader.gpu.device import Accelerator, AcceleratorError, Event
from rayloader.interrupts import Bell, DaemonThread, new_lock

logger = logging.getLogger("rayloader")

_WAKE_S = 60.0  # how long the thread sleeps at most; a ring wakes it
# A larger slot is not page-locked: training would stand still for tenths of a second.
MOST_BYTES = 512 << 20
# How long the end of the program waits for the slot that is being unlocked, in seconds.
_END_S = 10.0


class PageLocks:
    """The locked slots of one arena, and those that are held.

    Args:
        accelerator: for which they are locked.
        start: address of the arena.
    """

    def __init__(self, accelerator: Accelerator, start: int) -> None:
        self.accelerator = accelerator
        self._start = start
        self._lock = new_lock()  # while a slot is locked or unlocked; a finalizer may close the arena meanwhile
        self._used: dict[int, int] = {}  # sizes of slots, by offset, in which there was a batch
        self._locked: dict[int, int] = {}  # sizes of those that are locked
        self._closed = False
        self._held: deque[tuple[Event, list[int]]] = deque()

    def lock(self, offset: int, nbytes: int) -> int:
        """Page-locks a slot, which holds a batch, if that is worth it now: see NOTE [One by one].

        Returns:
            How many bytes were locked.
        """
        if self._closed or offset in self._locked or not self.accelerator.can_register:
            return 0
        if self._used.get(offset) != nbytes or nbytes > MOST_BYTES:
            self._used[offset] = nbytes
            return 0
        self.accelerator.throttle.turn(lambda: self._register(offset, nbytes))
        return self._locked.get(offset, 0)

    def _register(self, offset: int, nbytes: int) -> None:
        with self._lock:
            if self._closed or offset in self._locked:
                return
            self._locked[offset] = nbytes  # first, so that who closes the arena meanwhile knows of it
            try:
                self.accelerator.register(self._start + offset, nbytes)
            except AcceleratorError as error:
                del self._locked[offset]
                self._closed = True
                _warn(self.accelerator, error)

    def is_locked(self, offset: int) -> bool:
        """Whether the slot at this place is locked."""
        return offset in self._locked

    @property
    def locked(self) -> list[tuple[int, int]]:
        """Offset and size of each locked slot."""
        with self._lock:
            return sorted(self._locked.items())

    def hold(self, tickets: list[int]) -> None:
        """Nothing refers to these slots any more, but for copies that may be queued; see NOTE [Held slots]."""
        self._held.append((self.accelerator.event(), tickets))

    def free_passed(self, free: Callable[[Collection[int]], None]) -> None:
        """Calls `free` with slots that were held, and of which no copy is pending; after an interrupt once more."""
        with contextlib.suppress(RuntimeError):  # the accelerator has failed, and so will the program, or tries again
            while self._held and self._held[0][0].query():
                free(self._held[0][1])
                self._held.popleft()

    def held(self) -> set[int]:
        """Slots that are held. Any thread may ask."""
        return {ticket for _, tickets in self._held.copy() for ticket in tickets}

    def wait(self) -> None:
        """Waits for the copies from all slots that are held.

        Raises:
            RuntimeError: the accelerator can't tell now.
        """
        for event, _ in self._held.copy():
            event.synchronize()

    def close(self) -> bool:
        """Locks no further slots; returns whether some are locked."""
        with self._lock:
            self._closed = True
            return bool(self._locked)

    def unlock(self, in_use: Collection[int]) -> None:
        """Unlocks all slots but those at these places."""
        for offset in sorted(self._locked.keys() - set(in_use)):
            if unlocker.ended:
                return
            self.accelerator.throttle.turn(functools.partial(self._unregister, offset), unlocker.ends_within)

    def _unregister(self, offset: int) -> None:
        with self._lock:
            self.accelerator.unregister(self._start + offset)
            del self._locked[offset]

    def ring(self) -> None:
        """A batch of the arena has died, whose worker has ended. For finalizers."""
        unlocker.ring()

    def retire(self, unlock: Callable[[], bool]) -> None:
        """The worker has ended; see `Unlocker.retire`."""
        unlocker.retire(unlock)


def _warn(accelerator: Accelerator, error: AcceleratorError) -> None:
    """Says once why batches are copied once more."""
    if accelerator.can_register:
        accelerator.can_register = False
        logger.warning(
            "rayloader: the memory of batches cannot be page-locked (%s), so a thread copies them; raise the limit "
            "of locked memory (ulimit -l, docker run --ulimit memlock=-1) or that of the container's memory",
            str(error),  # the error itself would keep the batch
        )


class Unlocker:
    """Unlocks the slots of arenas whose workers have ended, in a thread that lives while there are some.

    Attributes:
        ended: the program ends, and the memory with the process: nothing more is unlocked.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """To be called in a forked child: the arenas and the thread are its parent's."""
        self.ended = False
        self._end = Bell()
        self._bell = Bell()  # a batch has died, or there is another arena
        self._lock = new_lock()  # a finalizer may come while its thread has it
        self._retired: list[Callable[[], bool]] = []  # `unlock` of each arena
        self._thread: DaemonThread | None = None
        self._has_warned = False

    def ends_within(self, seconds: float) -> bool:
        """Waits for so many seconds, or until the program ends, and returns whether it does."""
        return self.ended or (self._end.wait(seconds) and self.ended)

    def ring(self) -> None:
        """A batch of such an arena has died. For finalizers."""
        self._bell.ring()

    def retire(self, unlock: Callable[[], bool]) -> None:
        """Takes over an arena with locked slots. Finalizers may call it; after an interrupt it is called again.

        Args:
            unlock: the arena's method that unlocks what it can, and returns whether all is unlocked.
        """
        new = DaemonThread(self._work, "rayloader-unlock")
        with self._lock:
            if self.ended:
                return
            if unlock not in self._retired:
                self._retired.append(unlock)
            if self._thread is None:  # nothing is called from here to the next line, so no finalizer comes between
                self._thread = new
            thread = self._thread
        self._bell.ring()
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and the memory with the process
            thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._retired or self.ended:
                    self._thread = None
                    return
                arenas = self._retired.copy()
            done = [unlock for unlock in arenas if self._unlocks(unlock)]
            waits = not done
            with self._lock:
                while done:
                    self._retired.remove(done.pop())
            del arenas  # it keeps none mapped while it waits
            if waits:
                self._bell.wait(_WAKE_S)

    def _unlocks(self, unlock: Callable[[], bool]) -> bool:
        """The result of `unlock`. After an error the arena stays mapped, as locked memory must; a later try follows."""
        try:
            return unlock()
        except Exception as error:  # the accelerator's may be of any type, and the other arenas are to be unlocked
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "rayloader: page-locked memory of a worker that has ended cannot be unlocked now (%s), so it is "
                    "kept, and tried again later",
                    repr(error),  # the error itself would keep the arena
                )
            return False

    def end(self) -> None:
        """At the end of the program: a thread that is in C++ code when the interpreter ends would abort the process."""
        with self._lock:
            self.ended = True
            thread = self._thread
        self._bell.ring()
        self._end.ring()
        if thread is not None:
            thread.join(_END_S)


unlocker = Unlocker()
atexit.register(unlocker.end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=unlocker.forget)
