"""One thread that does what finalizers must not do: it ends what they leave behind, and keeps deadlines.

Promise: `later` only enqueues. It takes no lock, calls nothing and waits for nobody, so that a finalizer may call it in
the middle of anything; in a forked child it does nothing. Jobs run one after the other in the thread
`rayloader-janitor`, which no Ctrl-C reaches, so each runs to its end. The thread sleeps until a job or a deadline; it
never polls. See NOTE [our thread and Ray's shutdown] in session.py for when it may call Ray.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from rayloader import session
from rayloader.bell import TICK_S, Bell, DaemonThread

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
        self._jobs: queue.SimpleQueue[Job | DaemonThread] = queue.SimpleQueue()  # a thread: that ends here
        self._thread: DaemonThread | None = None

    def start(self) -> None:
        """Starts the thread unless it runs; jobs that came before are done too. Not for finalizers."""
        if self._thread is None or self._thread.spent:
            self._thread = DaemonThread(self._work, "rayloader-janitor")
        self._thread.start()

    def later(self, job: Job) -> None:
        """Has a job done soon, if the thread runs; else when it is started again."""
        if os.getpid() == self._pid:
            self._jobs.put(job)

    def do(self, job: Job) -> None:
        """Has a job done and waits for it; in the thread itself it is done at once. Not for finalizers."""
        if self._is_here():
            job()
        else:
            self.later(job)
            self.wait()

    def wait(self) -> None:
        """Waits until all jobs that came so far are done; at once in the thread itself. Not for finalizers."""
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
        """Ends the thread once all jobs that came so far are done; callable more than once."""
        thread = self._thread
        if os.getpid() == self._pid and thread is not None and not self._is_here():
            self._jobs.put(thread)
            thread.start()  # an interrupt may have come first
            thread.join()
            self._thread = None

    def _is_here(self) -> bool:
        """Whether the thread itself asks."""
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
                job = _nothing  # it has ended already, and was told twice
            with session.no_shutdown():
                seconds_left = self._do(job)
                job = _nothing  # what it refers to goes now: to drop Ray's references is to call Ray

    def _do(self, job: Job) -> float | None:
        for step in (job, self._tidy):
            try:
                seconds_left = step()
            except BaseException:  # Ray's SystemExit included: the next job must be done whatever became of this one
                logger.warning("rayloader: a worker process may be left behind", exc_info=True)
                seconds_left = None
        return seconds_left if isinstance(seconds_left, float) else None


def _nothing() -> None:
    pass
