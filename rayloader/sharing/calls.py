"""The calls to the producer of a share, of the process that starts it and of its consumers.

Promise: nothing here calls Ray once its session is gone (NOTE [sessions] in session.py), nor in a forked process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayloader.actors import session
from rayloader.actors._compat_ray import on_completed
from rayloader.actors.actor import wait_for
from rayloader.actors.image import Contents, Image
from rayloader.actors.replica import Source, module_folders
from rayloader.errors import RaySessionError, ShareError, add_note
from rayloader.interrupts import Bell
from rayloader.protocol import carried
from rayloader.random.generators import RECORDED
from rayloader.random.random_state import RandomState
from rayloader.sharing.producer import NOTICE_S, Producer
from rayloader.transport import codec, unpicklable
from rayloader.workers.connection import NONE_YET

logger = logging.getLogger("rayloader")
_NAMESPACE = "rayloader-shares"  # independent of those of the programs that meet in one Ray


class Calls:
    """The calls of one process to a producer.

    Args:
        producer: the actor.
        name: of the share.
    """

    def __init__(self, producer: Any, name: str) -> None:
        self._session, self._pid = session.ensure(), os.getpid()
        self.producer, self.name = producer, name

    @property
    def is_live(self) -> bool:
        """Whether Ray may be called: this is the process, and the session."""
        return os.getpid() == self._pid and session.current() == self._session

    def check(self) -> None:
        """Raises RaySessionError if Ray may not be called."""
        if not self.is_live:
            raise RaySessionError(
                f"the share {self.name!r} can't be read: Ray was shut down, or this process was forked from the one "
                "that has joined the share. Join it in a process that was started with the spawn method"
            )

    def begin(self, method: str, *arguments: Any) -> Any:
        """Makes a call; returns the reference to its answer."""
        self.check()
        return getattr(self.producer, method).remote(*arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the producer answers to a call.

        Raises:
            Exception: the call has raised it; a ShareError where the producer is gone.
        """
        ref = self.begin(method, *arguments)
        while (answer := wait_for([ref], 1, NOTICE_S)[0]) is NONE_YET:
            self.check()
            logger.warning(
                "rayloader: the producer of the share %r has not answered for %.0f s; it may still open the loader. If "
                "Ray has no place for it, change ray_remote_args",
                self.name,
                NOTICE_S,
            )
        return self.checked(answer)

    def checked(self, answer: Any) -> Any:
        """An answer, unless it is an error: this is raised."""
        if isinstance(answer, RayTaskError):
            raise (answer.cause if isinstance(answer.cause, Exception) else answer) from None
        if isinstance(answer, Exception):
            raise ShareError(
                f"the producer of the share {self.name!r} is gone: it was closed, the process that had called share() "
                f"has ended, or it died. Share the loader again, from the last state. Ray said: {answer}"
            ) from answer
        return answer

    def end(self) -> None:
        """Ends the producer, and with it the workers of its loader."""
        if self.is_live:
            ray.kill(self.producer)


class Read:
    """A call of `Producer.read`, and the items that it brings; Ray's threads note them.

    Args:
        calls: to the producer.
        rank: of the consumer.
        place: of the consumer.
        found: items by number, which this adds to; in place of one that is still on its way NONE_YET.
        bell: rung when something has come.
        sampler_epoch: as for `Producer.read`.

    Attributes:
        number: of the place.
        answer: Ray's error, or what has come; NONE_YET before.
    """

    def __init__(
        self,
        calls: Calls,
        rank: int,
        place: tuple[int, int],
        found: dict[int, Any],
        bell: Bell,
        sampler_epoch: int | None,
    ) -> None:
        self.number, self._found, self._bell = place[1], found, bell
        self.answer: Any = NONE_YET
        first = max([self.number - 1, *found]) + 1
        # Kept until it is answered: Ray ends the process if it tells of a reference that was dropped.
        self._ref = calls.begin("read", rank, place, first, sampler_epoch)
        on_completed(self._ref, self._note)

    def _note(self, answer: Any) -> None:
        if isinstance(answer, dict):
            self._found.update({n: NONE_YET if item.kind == "stored" else item for n, item in answer.items()})
            for ref in {item.payload[0] for item in answer.values() if item.kind == "stored"}:
                on_completed(ref, functools.partial(self._note_stored, answer, ref))
        self.answer = answer
        self._bell.ring()

    def _note_stored(self, answer: dict[int, Any], ref: Any, value: Any) -> None:
        for number, item in answer.items():
            if item.kind == "stored" and item.payload[0] == ref:
                is_error = isinstance(value, Exception)
                self._found[number] = value if is_error else item._replace(payload=value[item.payload[1]])
        self._bell.ring()


def start(loader: Any, name: str, consumers: int, buffer: int, ray_remote_args: dict[str, Any]) -> Calls:
    """Starts the producer of a loader.

    Raises:
        ShareError: there is a share with that name.
        Exception: pickling the loader raises it, or unpickling it there.
    """
    session.ensure()
    shared = copy.copy(loader)
    shared._iterator = None  # of persistent workers, which belong to this process
    try:
        encoded = codec.encode(shared, carry=carried(), replica=True, special=RECORDED)
    except Exception as error:  # the user's objects may raise anything: add a note that names the culprit
        if (explanation := unpicklable.explain(shared.__dict__, "loader")) is not None:
            add_note(error, f"It cannot be sent to the producer: {explanation}")
        raise
    image = Image.write(Contents(encoded))
    # Where the user may have the producer elsewhere, it may not be able to open the file of the image.
    content = [ray.put(PickleBuffer(image.content()))] if ray_remote_args else None
    source = Source(session.node_id(), module_folders(), image.address, list(encoded.carried), content)
    here = NodeAffinitySchedulingStrategy(session.node_id(), soft=True)
    options = {"num_cpus": 0, "scheduling_strategy": here, "enable_task_events": False, **ray_remote_args}
    actor: Any = ray.remote(Producer)
    try:
        producer = actor.options(name=name, namespace=_NAMESPACE, **options).remote(name, consumers, buffer)
    except ValueError as error:
        if find(name) is None:
            raise  # about the options
        raise ShareError(f"there is a share {name!r} in this Ray already; close it, or choose another name") from error
    calls = Calls(producer, name)
    try:
        calls.ask("open", source, RandomState.capture([]))
    except BaseException:
        calls.end()
        raise
    return calls


def find(name: str) -> Calls | None:
    """The producer of that name, if there is one in this Ray, which is joined or started."""
    session.ensure()
    with contextlib.suppress(ValueError):
        return Calls(ray.get_actor(name, _NAMESPACE), name)
    return None
