"""One thread for the work that finalizers must not do: it ends what they leave behind, and keeps deadlines.

Promise: `later` only enqueues. It takes no lock, calls no other code and never waits, so that a finalizer may call it
at any point; in a forked child it does nothing. Jobs run one after the other in the thread
`rayloader-janitor`, which no Ctrl-C reaches, so each runs to its end. The thread sleeps until a job or a deadline; it
never polls. See NOTE [our thread and Ray's shutdown] in session.py for when it may call Ray.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from rayloader.bell import TICK_S, Bell, DaemonThread
from rayloader.start import session

logger = logging.getLogger("rayloader")

Job = Callable[[], object]


class Janitor:
    """The thread and its jobs.

    Args:
        tidy: called after each job and at its own deadlines; returns the seconds until the next one, None if there is
            none.
    """

    def __init__(self, tidy: Callable[[], float | None]) -> None:
        self._tidy = tidy
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[Job | DaemonThread] = queue.SimpleQueue()  # a thread: the one that ends here
        self._thread: DaemonThread | None = None

    def start(self) -> None:
        """Starts the thread unless it runs; it also does the jobs that came before. Not for finalizers."""
        if self._thread is None or self._thread.spent:
            self._thread = DaemonThread(self._work, "rayloader-janitor")
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
        done: list[bool] = []
        bell = Bell()

        def tell() -> None:
            done.append(True)
            bell.ring()

        self._jobs.put(tell)
        while thread.is_alive() and not done:
            bell.wait(TICK_S)

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
            with session.no_shutdown():
                seconds_left = self._do(job)
                job = _nothing  # drops the job's references now: dropping Ray's references calls Ray

    def _do(self, job: Job) -> float | None:
        for step in (job, self._tidy):
            try:
                seconds_left = step()
            except BaseException:  # including Ray's SystemExit: the next job must be done in any case
                logger.warning("rayloader: a worker process may be left behind", exc_info=True)
                seconds_left = None
        return seconds_left if isinstance(seconds_left, float) else None


def _nothing() -> None:
    pass
