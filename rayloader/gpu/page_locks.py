"""Which parts of an arena are page-locked for an accelerator, and which slots wait for copies from them.

Promise: a slot lies in one *block*, and a block is page-locked as a whole or not at all, because CUDA refuses a copy
from memory of which only a part is. Nothing waits here, except for the thread `rayloader-unlock` and `PageLocks.wait`.
A `PageLocks` is for the driver's side of one arena; `lock` is for any thread, the rest for one at a time.

NOTE [Held slots]. A program may drop a batch while a copy of it is still queued: `x.to("cuda", non_blocking=True)`
followed by `del x`. So a slot of a locked block is *held* when its last view has died: its ticket goes back to the
worker when the event has happened that is recorded when the program next asks for a batch. Nobody waits for it; without
room the worker takes other memory. Which copies count says NOTE [All streams] in device.py. Copies from memory that is
not locked read all of it before the call returns.

NOTE [Locked memory]. The pages of a locked block must stay where they are: the accelerator goes on reading those that
it was told of. So nothing in an arena that may be locked is given back to the system, as cold or free memory of other
arenas is, until its worker has ended. Then `Unlocker` unlocks each block in which no batch lives, after the last copy,
and gives it back. A locked arena is mapped until all its blocks are unlocked, even if nothing else refers to it.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Collection

from rayloader.gpu.device import Accelerator, AcceleratorError, Event
from rayloader.interrupts import Bell, DaemonThread, new_lock

logger = logging.getLogger("rayloader")

_WAKE_S = 60.0  # how long the thread sleeps at most; a ring wakes it
# How long the end of the program waits for the block that is being unlocked, in seconds.
_END_S = 10.0


class PageLocks:
    """The locked blocks of one arena, and its held slots.

    Args:
        accelerator: for which they are locked.
        start: address of the arena.
        blocks: start and end of each of its blocks.
    """

    def __init__(self, accelerator: Accelerator, start: int, blocks: list[tuple[int, int]]) -> None:
        self.accelerator = accelerator
        self._start = start
        self._blocks = blocks
        self._lock = new_lock(reentrant=False)  # while a block is being locked or unlocked
        self._locked: set[tuple[int, int]] = set()
        self._closed = False
        self._held: deque[tuple[Event, list[int]]] = deque()

    def lock(self, offset: int) -> None:
        """Makes sure that the block of a slot is locked, if it can be; that may take a tenth of a second."""
        start, end = block = self._block(offset)
        if block in self._locked:
            return
        with self._lock:
            if self._closed or block in self._locked:
                return
            try:
                self.accelerator.register(self._start + start, end - start)
            except AcceleratorError as error:
                self._closed = True
                _warn(self.accelerator, error)
            else:
                self._locked.add(block)

    def is_locked(self, offset: int) -> bool:
        """Whether the block of a slot is locked."""
        return self._block(offset) in self._locked

    @property
    def locked(self) -> list[tuple[int, int]]:
        """Start and end of the locked blocks."""
        with self._lock:
            return sorted(self._locked)

    def hold(self, tickets: list[int]) -> None:
        """Nothing refers to these slots any more, but for copies that may be queued; see NOTE [Held slots]."""
        self._held.append((self.accelerator.event(), tickets))

    def passed(self) -> list[int]:
        """Slots that were held, and of which no copy is pending any more; each only once."""
        tickets: list[int] = []
        with contextlib.suppress(RuntimeError):  # the accelerator has failed, and so will the program, or tries again
            while self._held and self._held[0][0].query():
                tickets += self._held.popleft()[1]
        return tickets

    def held(self) -> set[int]:
        """Slots that are held. Any thread may ask."""
        return {ticket for _, tickets in self._held.copy() for ticket in tickets}

    def wait(self) -> None:
        """Waits for the copies from all slots that are held."""
        with contextlib.suppress(RuntimeError):  # as in `passed`
            for event, _ in self._held.copy():
                event.synchronize()

    def close(self) -> bool:
        """Locks no further blocks; returns whether some are locked."""
        with self._lock:
            self._closed = True
            return bool(self._locked)

    def unlock(self, in_use: Collection[int]) -> None:
        """Unlocks all blocks but those with slots at these places."""
        busy = {self._block(offset) for offset in in_use}
        with self._lock:
            for block in self._locked - busy:
                if unlocker.ended:
                    return
                self.accelerator.unregister(self._start + block[0])
                self._locked.remove(block)

    def ring(self) -> None:
        """A batch of the arena has died, whose worker has ended. For finalizers."""
        unlocker.ring()

    def retire(self, unlock: Callable[[], bool]) -> None:
        """The worker has ended; see `Unlocker.retire`."""
        unlocker.retire(unlock)

    def _block(self, offset: int) -> tuple[int, int]:
        return self._blocks[bisect.bisect_right(self._blocks, offset, key=_start) - 1]


def _start(block: tuple[int, int]) -> int:
    return block[0]


def _warn(accelerator: Accelerator, error: AcceleratorError) -> None:
    """Says once why batches are copied once more."""
    if accelerator.can_register:
        accelerator.can_register = False
        logger.warning(
            "rayloader: the memory of batches cannot be page-locked (%s), so a thread copies them into page-locked "
            "memory, as torch's does; raise the limit of locked memory (ulimit -l, docker run --ulimit memlock=-1) or "
            "the memory limit of the container",
            str(error),  # the error itself would keep the batch
        )


class Unlocker:
    """Unlocks the blocks of arenas whose workers have ended, in a thread that lives while there are some.

    Attributes:
        ended: the program ends, and the memory with the process: nothing more is unlocked.
    """

    def __init__(self) -> None:
        self.ended = False
        self.forget()

    def forget(self) -> None:
        """To be called in a forked child: the arenas and the thread are its parent's."""
        self._bell = Bell()  # a batch has died, or there is another arena
        self._lock = new_lock()  # a finalizer may come while its thread has it
        self._retired: list[Callable[[], bool]] = []  # `unlock` of each arena
        self._thread: DaemonThread | None = None
        self._has_warned = False

    def ring(self) -> None:
        """A batch of such an arena has died. For finalizers."""
        self._bell.ring()

    def retire(self, unlock: Callable[[], bool]) -> None:
        """Takes over an arena with locked blocks. Finalizers may call it; after an interrupt it is called again.

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
        if thread is not None:
            thread.join(_END_S)


unlocker = Unlocker()
atexit.register(unlocker.end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=unlocker.forget)
