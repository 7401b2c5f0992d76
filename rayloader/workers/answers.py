"""The answers to Ray calls, and the one wait for everything that workers send.

Promise: `wait` returns when something has come, over a line or from Ray, and lets any exception through that a signal
handler raises meanwhile. No thread waits inside Ray.

NOTE [waiting]
Python runs signal handlers in the main thread. If that thread waits in `ray.get` or `ray.wait`, Ray calls the handlers
and changes their exceptions: SystemExit loses its code, and any other exception ends as SystemError, or is printed
and dropped. So Ray is only asked to report when a call is answered, which it does in a thread of its own, and this
module waits for descriptors: those of the lines, and one that Ray's thread, or any other, makes readable. Nor is a
thread that waits here inside Ray while another thread shuts Ray down.
"""

from __future__ import annotations

import functools
import math
import select
from itertools import chain
from typing import Any

from rayloader._compat_ray import on_completed
from rayloader.bell import Waker
from rayloader.workers.waiting import NONE_YET


class Answers:
    """Answers by the reference of the call, or Ray's error if there will be none. Any thread may wait.

    Each call and descriptor has an *owner*, which receives what has come. Owners with something to receive are found
    without asking the others: a wait costs no more with many workers than with one, except for the system call itself.

    Attributes:
        ready: owners for which something has come; they are removed before it is received.
    """

    def __init__(self) -> None:
        self._answers: dict[Any, Any] = {}  # to the watched calls
        self._waker = Waker()
        self._waiting = 0  # threads that wait
        self._descriptors: dict[Any, tuple[tuple[int, int], ...]] = {}  # by owner
        self._owners: dict[int, Any] = {}  # by descriptor
        self._poll: Any = None  # of these descriptors; None while a thread has it, or when they have changed
        self._changes = 0  # counts the changes of these descriptors
        self.ready: set[Any] = set()

    def watch(self, ref: Any, owner: Any = None) -> None:
        """The answer to this call will end a wait, and make its owner ready."""
        if ref not in self._answers:
            self._answers[ref] = NONE_YET
            on_completed(ref, functools.partial(self._answered, ref, owner))

    def watch_descriptors(self, owner: Any, descriptors: tuple[tuple[int, int], ...]) -> None:
        """Sets what to wait for besides answers: the owner's descriptors, with the events of `select.poll`."""
        before = self._descriptors.get(owner, ())
        if descriptors == before:
            return
        for descriptor, _ in before:
            if self._owners.get(descriptor) is owner:  # otherwise it was closed, and its number now belongs to another
                del self._owners[descriptor]
        self._owners.update((descriptor, owner) for descriptor, _ in descriptors)
        self._descriptors[owner] = descriptors
        if not descriptors:
            del self._descriptors[owner]
            self.ready.discard(owner)  # it refers to this object, and must not depend on the garbage collector
        self._changes += 1
        self._poll = None
        self.ring_others()  # they do not wait for these yet

    def __getitem__(self, ref: Any) -> Any:
        """The answer to a watched call, or NONE_YET."""
        return self._answers[ref]

    def forget(self, ref: Any) -> None:
        """The answer is not needed any more."""
        self._answers.pop(ref, None)

    def ring(self) -> None:
        """Ends all waits in progress, or the next one."""
        self._waker.ring()

    def ring_others(self) -> None:
        """Ends the waits of other threads: this one may have received what they wait for."""
        if self._waiting:
            self._waker.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; returns whether it has."""
        changes, (poll, self._poll) = self._changes, (self._poll, None)  # two threads cannot use one at a time
        if poll is None:
            poll = select.poll()
            for descriptor, events in list(chain(*self._descriptors.values())):
                poll.register(descriptor, events)
            poll.register(self._waker.descriptor, select.POLLIN)
        self._waiting += 1
        try:
            found = poll.poll(math.ceil(max(0.0, timeout) * 1000))
        finally:
            self._waiting -= 1
        if changes == self._changes:
            self._poll = poll
        for descriptor, _ in found:
            if descriptor == self._waker.descriptor:
                self._waker.heard()
            elif descriptor in self._owners:
                self.ready.add(self._owners[descriptor])
        return bool(found)

    def _answered(self, ref: Any, owner: Any, answer: Any) -> None:
        """Called in Ray's thread."""
        if ref in self._answers:
            self._answers[ref] = answer
            self.ready.add(owner)
            self._waker.ring()
