"""Brings a fleet's workers from forks to actors, while the forks work.

Promise: the user's thread waits for nothing here. A worker moves only after an actor has rebuilt one of its batches,
and the batch was the same: a dataset with state that no snapshot sees stays with its forks, and so does one that cannot
be pickled, or that leaves something behind in the processes. The thread `rayloader-takeover` starts Ray and the actors;
it refers to no loader and to no iterator while it waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rayloader.interrupts import Bell, DaemonThread
from rayloader.start.zygote import Zygote
from rayloader.workers.worker import Worker

if TYPE_CHECKING:
    from rayloader.workers.actors import Actors

# Forks that have worked for so many seconds are to be taken over: short epochs never pay for it, or for Ray.
START_AFTER_S = 1.0
# Workers move in mid-epoch if actors were ready for their next batches within so many seconds; else they stay with
# forks.
MOVE_S = 0.5
# How often the thread looks for what it waits for, in seconds.
TICK_S = 0.05

_working: DaemonThread | None = None  # the one thread: the next takeover's begins after it


_Answer = TypeVar("_Answer")


class Stays(Exception):
    """The dataset stays with forks; the text says why."""


class Ended(Exception):
    """The fleet has ended meanwhile."""


class Takeover:
    """The way of one fleet's workers from forks to actors.

    Args:
        move: brings actors to where they can take over, and offers them; it joins or starts Ray. Its arguments are this
            object, the workers of the fleet, and how many processes these have.
        zygote: of the forks; it makes what the actors inherit.
        lock: guards the workers' journals.
        told: is told why the dataset stays with forks, if it does.
    """

    def __init__(
        self,
        move: Callable[[Takeover, list[Worker], int], None],
        zygote: Zygote,
        lock: threading.RLock,
        told: Callable[[str], None],
    ) -> None:
        self._due = time.monotonic() + START_AFTER_S
        self._move = move
        self.zygote = zygote
        self.lock = lock
        self.told = told
        self._thread: DaemonThread | None = None
        self._closed = Bell()
        self._ended = False
        self._ready: tuple[Actors, list[Any]] | None = None

    @property
    def has_news(self) -> bool:
        """Whether `step` has something to do; the question costs next to nothing."""
        if self._thread is not None:
            return self._ready is not None
        return time.monotonic() >= self._due and (_working is None or not _working.is_alive())

    def step(self, workers: list[Worker], count: int) -> tuple[Actors, list[Any]] | None:
        """Starts the thread if it is time; returns the actors to which the workers are to move, if they are.

        Args:
            workers: of the fleet.
            count: of the actors that will host them.
        """
        global _working
        if self._thread is None:
            self._thread = _working = DaemonThread(lambda: self._work(workers, count), "rayloader-takeover")
        self._thread.start()
        ready, self._ready = self._ready, None
        return ready

    def until(self, ask: Callable[[], _Answer | None]) -> _Answer:
        """Waits in the thread until an answer is true, or not empty; returns that.

        Raises:
            Ended: the fleet has ended meanwhile.
        """
        self.check()
        while not (answer := ask()):
            self._closed.wait(TICK_S)
            self.check()
        return answer

    def check(self) -> None:
        """Raises Ended if the fleet has ended meanwhile."""
        if self._ended:
            raise Ended

    def offer(self, actors: Actors, lent: list[Any], seconds: float) -> bool:
        """The workers are to move to these actors, unless they took too many seconds; returns whether they are."""
        if seconds > MOVE_S:
            return False
        self._ready = actors, lent
        if self._ended:
            self.close()
        return True

    def close(self) -> None:
        """The fleet has ended. Callable more than once."""
        self._ended = True
        self._closed.ring()
        ready, self._ready = self._ready, None
        if ready is not None:
            ready[0].release(busy=False, reuse=True)

    def _work(self, workers: list[Worker], count: int) -> None:
        try:
            self.check()
            self._move(self, workers, count)
        except Ended:
            pass
        except Stays as reason:
            self.told(str(reason))
        except Exception as error:  # whatever Ray says: the program has its workers
            if not self._ended:
                self.told(f"{type(error).__name__}: {error}")
