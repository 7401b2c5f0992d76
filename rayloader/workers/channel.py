"""How one actor receives its tasks, and how its answers come: the common interface of all channels.

Promise: all kinds (ray_calls.py, line_calls.py) take the same calls and return the same messages, in the order in which
the actor sent them (see `Up` in protocol.py); an actor that will not answer yields `ActorLost` as its last message.
Nothing here waits. A channel belongs to one fleet, and is used under the lock of its epoch.
"""

from __future__ import annotations

import contextlib
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from rayloader._compat_ray import said_of_end
from rayloader.resume.journal import Resumed
from rayloader.start import session
from rayloader.start.signals import exit_in_words
from rayloader.task import Task
from rayloader.transport.lanes import Lent, Room, to_wire
from rayloader.transport.line import Line
from rayloader.workers.actor import Actor

Message = Any  # a tuple that begins with an `Up`, ActorLost or LineRefused


class ActorLost(Exception):
    """An actor's answers will not come: the actor, its node or an object is gone.

    Args:
        actor: the one that is lost.
        error: Ray's; None if Ray says nothing.
    """

    def __init__(self, actor: Actor, error: Exception | None) -> None:
        super().__init__(_cause(actor, error))
        self.actor = actor


def _cause(actor: Actor, error: Exception | None) -> str:
    """How the process has ended: as torch says it, if that is known; and what Ray knows beyond that."""
    with contextlib.suppress(RayError):
        actor.has_started()  # notes the address
    where = actor.address
    code = session.exit_code(where.pid) if where is not None and where.hostname == socket.gethostname() else None
    known = [] if code is None else [exit_in_words(code)]
    if error is not None and (said := said_of_end(str(error))):
        known.append(f"Ray says: {said}" if known else said)
    return "; ".join(known) or "its process has ended; neither a signal nor an exit code is known"


class LineRefused(Exception):
    """The worker process cannot be reached over a line."""


class Channel(ABC):
    """The channel to one actor.

    Args:
        actor: the one that it leads to.

    Attributes:
        actor: the one that it leads to.
    """

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    @abstractmethod
    def run(self, worker_id: int, task: Task) -> Lent | None:
        """`WorkerProcess.run`; the call's number is the actor's newest. Pass the return value to `received`."""

    @abstractmethod
    def replay(self, worker_id: int, tasks: Sequence[Task]) -> None:
        """`WorkerProcess.replay`; the call's number is the actor's newest."""

    @abstractmethod
    def resume(self, worker_id: int, resumed: Resumed) -> None:
        """`WorkerProcess.resume`; the call's number is the actor's newest."""

    @abstractmethod
    def drop(self, after_call: int, from_task: int) -> None:
        """Cancels tasks from this one on, of the calls made after `after_call` so far, if the channel can do so."""

    @abstractmethod
    def pause(self) -> None:
        """To be called before other calls of the actor are made, so that they come after all calls made so far."""

    @abstractmethod
    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""

    @abstractmethod
    def descriptors(self) -> Iterator[tuple[int, int]]:
        """What to wait for, with the events of `select.poll`."""

    @abstractmethod
    def read(self) -> None:
        """Reads what has come, for `receive`. Any thread may call it, without the epoch's lock: it may take a while."""

    @abstractmethod
    def receive(self) -> list[Message]:
        """The messages of the actor that were read."""

    @property
    @abstractmethod
    def lane(self) -> str:
        """The kind of channel, in words, and how batches travel."""

    @property
    def quiet_line(self) -> Line | None:
        """The line that brings all answers, if it is open and has nothing to send; else None.

        While it is the same line, the descriptors and the patience are the same too.
        """
        return None

    @property
    def patience(self) -> float:
        """How long to wait at most for what the descriptors cannot show, in seconds."""
        return math.inf

    @abstractmethod
    def close(self) -> None:
        """Stops listening. Callable more than once, and by any thread."""

    def _lost(self, answer: Exception | None) -> ActorLost:
        """No answers will come: `answer` is Ray's reason, None if Ray gives none."""
        self.close()
        self.actor.vanished = answer is None or isinstance(answer, ActorUnavailableError)
        return ActorLost(self.actor, answer)

    def _run(self, worker_id: int, task: Task, room: Room | None) -> tuple[Any, ...]:
        """The message to `WorkerProcess.run`."""
        self.actor.calls += 1
        news = None if room is None else room.fields
        return worker_id, self.actor.calls, task.task_id, to_wire(task.indices.encoded).fields, news

    def _replay(self, worker_id: int, tasks: Sequence[Task]) -> tuple[Any, ...]:
        """The message to `WorkerProcess.replay`."""
        self.actor.calls += 1
        again = [(task.task_id, to_wire(task.indices.encoded).fields, task.digest) for task in tasks]
        return worker_id, self.actor.calls, again
