"""The thread that ends what finalizers leave behind, and the end of the program.

Promise: that of `Janitor`. At the end of the program `at_exit` does what is left to do, in a stated order.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from rayloader.interrupts import TICK_S, Bell, DaemonThread
from rayloader.workers import zygote

logger = logging.getLogger("rayloader")

# How often zygotes that are about to end are waited for, in seconds.
REAP_S = 0.02

Job = Callable[[], object]


class Janitor:
    """The thread for the work that finalizers must not do, and its jobs.

    `later` only enqueues. It takes no lock, calls no other code and never waits, so that a finalizer may call it at any
    point; in a forked child it does nothing. Jobs run one after the other in the thread, which no Ctrl-C reaches, so
    each runs to its end. The thread sleeps until a job or a deadline; it never polls.

    Users' threads wait for the one that is named `rayloader-janitor`, so what it does takes an instant.

    Args:
        tidies: as below.
        name: of the thread.

    Attributes:
        between_jobs: makes what is entered around each job: a lock of actors/session.py, where Ray is used.
        tidies: called after each job and at their own deadlines; each returns the seconds until the next one, None if
            there is none.
    """

    def __init__(self, *tidies: Callable[[], float | None], name: str = "rayloader-janitor") -> None:
        self.tidies = list(tidies)
        self._name = name
        self.between_jobs: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._abandoned: Any = None
        self._begin()

    def forget(self) -> None:
        """To be called in a forked child: the jobs and the thread are its parent's."""
        self._abandoned = self._jobs, self._thread, self._abandoned  # kept: dropping the references would call Ray
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[Job | DaemonThread] = queue.SimpleQueue()  # a thread: the one that ends here
        self._thread: DaemonThread | None = None

    def start(self) -> None:
        """Starts the thread unless it runs; it also does the jobs that came before. Not for finalizers."""
        if self._thread is None or self._thread.spent:
            self._thread = DaemonThread(self._work, self._name)
        self._thread.start()

    def later(self, job: Job) -> None:
        """Enqueues a job: it is done soon if the thread runs, otherwise when the thread is started again."""
        if os.getpid() == self._pid:
            self._jobs.put(job)

    def do(self, job: Job) -> None:
        """Runs a job in the thread and waits for it; in the thread itself, runs it at once. Not for finalizers."""
        if self._is_here():
            job()
        else:
            self.later(job)
            self.wait()

    def wait(self) -> None:
        """Waits until all jobs so far are done; returns at once in the thread itself. Not for finalizers."""
        thread = self._thread
        if os.getpid() != self._pid or thread is None or self._is_here():
            return
        done = Bell()
        self._jobs.put(done.ring)
        while thread.is_alive() and not done.wait(TICK_S):
            pass

    def end(self) -> None:
        """Ends the thread once all jobs so far are done; callable more than once."""
        thread = self._thread
        if os.getpid() == self._pid and thread is not None and not self._is_here():
            self._jobs.put(thread)
            thread.start()  # an interrupt may have prevented it
            thread.join()
            self._thread = None

    def _is_here(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        seconds_left: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=seconds_left)
            except queue.Empty:  # a deadline has passed
                job = _nothing
            if isinstance(job, DaemonThread):
                if job is threading.current_thread():
                    return
                job = _nothing  # it has ended already, and this is a second request
            with self.between_jobs():
                seconds_left = self._do(job)
                job = _nothing  # drops the job's references now: dropping Ray's references calls Ray

    def _do(self, job: Job) -> float | None:
        deadlines = []
        for step in (job, *self.tidies):
            try:
                seconds_left = step()
            except BaseException:  # including Ray's SystemExit: the next job must be done in any case
                logger.warning("rayloader: a worker process may be left behind", exc_info=True)
                seconds_left = None
            if step is not job and isinstance(seconds_left, float):
                deadlines.append(seconds_left)
        return min(deadlines, default=None)


def _nothing() -> None:
    pass


def _reap() -> float | None:
    return REAP_S if zygote.reap() else None


janitor = Janitor(_reap)
os.register_at_fork(after_in_child=janitor.forget)

_ends: dict[str, Callable[[], object]] = {}
_ORDER = "iterators", "actors", "forks"  # what ends, in this order


def ends_with_program(what: str, end: Callable[[], object]) -> None:
    """At the end of the program this is called, before the handlers that exist now: Ray's may be among them."""
    _ends[what] = end
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Ends what there is, and preserves the exit status.

    If Ctrl-C has ended a program, CPython ends the process by the same signal, so that a shell sees why. It decides
    that by how the code ended that was compiled last from text, and Ray's shutdown imports modules that compile some.
    """
    for what in _ORDER:
        _ends.get(what, _nothing)()
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def end_forks() -> None:
    """Ends the forks that are left, and the thread."""
    zygote.end_all()
    janitor.end()


ends_with_program("forks", end_forks)
