"""One actor as the driver knows it: its process, its lease, the answers to its calls, what it shares with this process.

Promise: no thread waits inside Ray (NOTE [waiting] in connection.py), so exceptions of signal handlers pass through
unchanged; and only `wait_for` waits at all.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ray.exceptions import RayError
from typing_extensions import override

from rayloader.actors import session
from rayloader.actors._compat_ray import said_of_end
from rayloader.actors.image import Image
from rayloader.interrupts import Bell
from rayloader.protocol import NONE_YET
from rayloader.workers.connection import NeverStarts, Process, Started

Ref = Any  # an ObjectRef; Ray's own type is generic over a type that cannot be checked here


def on_completed(ref: Ref, callback: Callable[[Any], None]) -> None:
    """Makes one of Ray's threads call this with the answer of a call, or with Ray's error."""

    def tell(future: Future[Any]) -> None:
        error = future.exception()
        callback(future.result() if error is None else error)

    ref.future().add_done_callback(tell)


class RayAnswer(Started):
    """The answer to a Ray call, once it comes; no thread waits inside Ray to find out.

    Attributes:
        ref: of the call.
        value: the answer, or an error of Ray's; NONE_YET before.

    Args:
        ref: of the call.
        tell: called when it has come, in one of Ray's threads.
    """

    def __init__(self, ref: Any, tell: Callable[[], object] = lambda: None) -> None:
        self.ref = ref
        self.value: Any = NONE_YET
        self._tell = tell
        on_completed(ref, self._note)

    @property
    def succeeded(self) -> bool:  # type: ignore[override]
        """Whether an answer came, and no error."""
        return self.value is not NONE_YET and not isinstance(self.value, Exception)

    def _note(self, value: Any) -> None:  # in one of Ray's threads
        self.value = value
        self._tell()


def wait_for(refs: Sequence[Any], timeout: float) -> list[Any]:
    """Waits until these calls are answered, for `timeout` seconds at most.

    Returns:
        The answer to each of them: an error of Ray's if there will be none, NONE_YET if there is none so far.
    """
    bell = Bell()
    answers = [RayAnswer(ref, bell.ring) for ref in refs]
    until = time.monotonic() + timeout
    while [1 for answer in answers if answer.value is NONE_YET] and (left := until - time.monotonic()) > 0:
        bell.wait(left)
    return [answer.value for answer in answers]


class Lease:
    """A fleet's right to its actors.

    Args:
        ended: called, perhaps in a finalizer, when no reference to the lease is left.
        name: of the loader, for the names of actors that are made for it.
    """

    __slots__ = ("__weakref__", "name", "ref")

    def __init__(self, ended: Callable[[object], object], name: str = "") -> None:
        self.name = name
        # The actors hold this weak reference, so that it outlives the lease and its callback runs.
        self.ref = weakref.ref(self, ended)


class ActorState(Enum):
    """Whom an actor works for; see pool.py."""

    LENT = "lent"  # to the lease of a fleet
    IDLE = "idle"  # told to stop, or made in advance: free for any loader with the same options
    ENDING = "ending"  # finalizes what user code has left: nobody can have it any more
    GONE = "gone"  # killed, or to be forgotten with its session


@dataclass(eq=False, slots=True)
class Actor(Process):
    """One actor process; methods that take or return a `Ref` return at once."""

    kind = "Ray actor"
    tells_start = True
    handle: Any
    key: bytes  # of the user's options
    options: dict[str, Any]  # that it was made with
    hello: RayAnswer  # its address, once it runs
    # Whether the node that it must be on had room for it when it was created; None if Ray tells who has no place.
    had_room: bool | None
    lease: weakref.ref[Lease] | None = None  # of the lease that holds it
    state: ActorState = ActorState.LENT
    stopped: RayAnswer | None = None  # to `stop`, or to `end`
    was_busy: bool = False  # when it was told to stop: user code may go on with what nobody wants any more
    keep_until: float = math.inf  # time.monotonic(): when it is to end if it is idle, or is killed if it is ending
    no_line: str = ""  # why no line can reach it
    hosted: tuple[str, RayAnswer] | None = None  # the image that it holds for its node: name, answer to `host`

    @property
    def is_near(self) -> bool:
        """Whether it is known to be on this machine and to open our files."""
        address = self.address
        return address is not None and address.node_id == session.node_id() and address.reaches_driver

    @override
    def cause(self, error: Exception | None) -> str:
        """How the process has ended, as far as Ray knows it."""
        with contextlib.suppress(NeverStarts):
            self.has_started()  # notes the address
        said = said_of_end(str(error)) if error is not None else ""
        return said or "its process has ended; Ray knows neither a signal nor an exit code, and its logs may say more"

    @override
    def has_started(self) -> bool:
        if self.address is None:
            if (address := self.hello.value) is NONE_YET:
                return False
            if isinstance(address, RayError):
                raise NeverStarts(str(address)) from address
            self.address, self.started_at = address, time.monotonic()
        return True

    def host(self, image: Image, content: Ref) -> None:
        """Calls `WorkerProcess.host`, so that the other actors of its node can open the image."""
        call = self.handle.host.remote(image.address.name, image.address, content)
        self.hosted = image.address.name, RayAnswer(call)
