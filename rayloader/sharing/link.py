"""The connection to the producer of a share: its owner starts it, consumers find it by name and call it.

Promise: a producer ends with the process that started it, with `close` of its share, and with `rayloader.shutdown()`.
Nothing here calls Ray once its session is gone (NOTE [sessions] in session.py). Ray's errors about a dead producer
become a `ShareError`, and errors of the producer are raised unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayloader.errors import RaySessionError, ShareError, add_note
from rayloader.inherit.process_state import ProcessState
from rayloader.protocol import CARRY
from rayloader.random.generators import RECORDED
from rayloader.random.random_state import RandomState
from rayloader.replica import unpicklable
from rayloader.replica.image import Image
from rayloader.sharing.messages import NAMESPACE, Connection, Kind, Pipeline, Reply, Terms
from rayloader.sharing.producer import Producer
from rayloader.start import session
from rayloader.transport import codec
from rayloader.transport.lanes import switched_off
from rayloader.transport.mapped import Mappings
from rayloader.workers.actor import NONE_YET, wait_for

# After this many seconds of waiting for others, a consumer logs which ones it waits for.
NOTICE_S = 60.0
# How often to look for a share that does not exist yet, in seconds.
LOOK_EVERY_S = 0.2

logger = logging.getLogger("rayloader")
_remote_producer: Any = ray.remote(Producer)
_owned: list[tuple[session.SessionName, Any]] = []  # producers that this process has started


def start(loader: Any, terms: Terms, ray_remote_args: dict[str, Any]) -> Any:
    """Starts the producer of a loader, in a process of its own; returns the actor.

    Raises:
        ShareError: there is a share with that name.
        Exception: pickling the loader raises it, or unpickling it there.
    """
    name = session.ensure()
    pipeline, image = _pipeline(loader)
    here = NodeAffinitySchedulingStrategy(session.node_id(), soft=True)
    options = {"num_cpus": 0, "scheduling_strategy": here, "enable_task_events": False, **ray_remote_args}
    try:
        producer = _remote_producer.options(name=terms.name, namespace=NAMESPACE, **options).remote(terms)
    except ValueError as error:
        if _named(terms.name) is None:
            raise  # about the options
        raise ShareError(
            f"there is a share {terms.name!r} in this Ray already; read it with rayloader.shared({terms.name!r}, "
            "rank=...), close it, or choose another name"
        ) from error
    _owned.append((name, producer))
    try:
        if not _opened(producer, terms.name, pipeline):
            contents = [ray.put([PickleBuffer(content) for content in image.contents()])]
            _opened(producer, terms.name, pipeline._replace(contents=contents))
    except BaseException:
        end(producer)
        raise
    return producer


def _opened(producer: Any, name: str, pipeline: Pipeline) -> bool:
    def note_wait() -> None:
        logger.warning(
            "rayloader: the producer of the share %r has not opened the loader within %.0f s; still waiting. If Ray "
            "has no place for it, change ray_remote_args",
            name,
            NOTICE_S,
        )

    try:
        return bool(_answer(producer.open.remote(pipeline), name, note_wait))
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None


def _answer(ref: Any, name: str, note_wait: Callable[[], None]) -> Any:
    """The answer to a call of the producer; calls `note_wait` each time that none has come for NOTICE_S.

    Raises:
        ShareError: the producer is gone.
        RayTaskError: the call has raised.
    """
    while True:
        (answer,) = wait_for([ref], 1, NOTICE_S)
        if isinstance(answer, RayTaskError):
            raise answer
        if isinstance(answer, RayError):
            raise ShareError(
                f"the producer of the share {name!r} is gone: it was closed, the process that had called share() has "
                f"ended, or it died. Share the loader again. Ray said: {answer}"
            ) from answer
        if answer is not NONE_YET:
            return answer
        note_wait()


def _pipeline(loader: Any) -> tuple[Pipeline, Image]:
    """The loader in the form that is sent; the image must live until it was opened."""
    shared = copy.copy(loader)
    shared._iterator = None  # of persistent workers, which belong to this process
    mappings = Mappings()
    try:
        encoded = codec.encode(shared, carry=CARRY, mapped=mappings, special=RECORDED)
    except Exception as error:  # the user's objects may raise anything: add a note that names the culprit
        if (explanation := unpicklable.explain(shared.__dict__, "loader")) is not None:
            add_note(error, f"It cannot be sent to the producer: {explanation}")
        raise
    image = Image.write(encoded, mappings)
    process = ProcessState.capture(session.node_id())
    return Pipeline(image.address, list(encoded.carried), None, process, RandomState.capture([])), image


def end(producer: Any) -> None:
    """Ends a producer, and with it the workers of its loader; callable more than once."""
    for name, owned in list(_owned):
        if owned == producer:
            _owned.remove((name, owned))
            if session.current() == name:
                ray.kill(owned)


def end_all() -> None:
    """Ends all that this process has started."""
    for _, producer in list(_owned):
        with contextlib.suppress(Exception):  # one that cannot be ended must not keep the others alive
            end(producer)


def find(name: str, timeout: float) -> Any:
    """The producer of that name, as soon as it exists.

    Raises:
        ShareError: there is none within `timeout` seconds.
    """
    session.ensure()
    began = time.monotonic()
    while True:
        if (producer := _named(name)) is not None:
            return producer
        if time.monotonic() - began >= timeout:
            own = " This program has started a Ray of its own: set RAY_ADDRESS to the one of that process."
            raise ShareError(
                f"there is no share {name!r} in this Ray within {timeout:g} s; some process of the same Ray must call "
                f"rayloader.share(loader, consumers=..., name={name!r}) and keep running while it is read."
                f"{own if session.started_here() else ''}"
            )
        time.sleep(LOOK_EVERY_S)


def _named(name: str) -> Any | None:
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, NAMESPACE)
    return None


class Link:
    """One consumer's connection to its producer.

    Args:
        producer: the actor.
        name: of the share.
        rank: of the consumer.
    """

    def __init__(self, producer: Any, name: str, rank: int) -> None:
        self._session, self._pid = session.ensure(), os.getpid()
        self._producer, self.name, self._rank = producer, name, rank
        self._known_gone: dict[int, str] = {}
        self.check_session()
        self.connection: Connection = self.result(self._producer.connect.remote(rank)).payload

    @property
    def may_use_lines(self) -> bool:
        """Whether batches may come over a line."""
        return self.connection.lines and not switched_off() and not session.uses_tls()

    def call(self, method: str, *arguments: Any) -> Any:
        """Makes a Ray call to the producer on behalf of this consumer; pass the return value to `result`."""
        self.check_session()
        return getattr(self._producer, method).remote(self._rank, self.connection.number, *arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the producer answers to a call; raises as `result` does."""
        return self.result(self.call(method, *arguments)).payload

    def result(self, ref: Any) -> Reply:
        """The reply to a call, once it has come; may be requested again.

        Raises:
            RayloaderError: the producer refuses, or it or Ray is gone.
            ValueError: it refuses an argument.
        """
        self.check_session()
        reply: Reply = _answer(ref, self.name, self.note_wait)
        if reply.kind is Kind.REFUSED:
            raise reply.payload
        self.note_gone(reply.gone)
        return reply

    def note_gone(self, gone: dict[int, str]) -> None:
        """Logs which consumers no longer read, once for each."""
        for rank in gone.keys() - self._known_gone.keys():
            logger.warning("rayloader: consumer %d of the share %r reads no more: %s", rank, self.name, gone[rank])
        self._known_gone = gone

    def note_wait(self) -> None:
        """Logs that this consumer has waited for NOTICE_S, if it waits for other consumers."""
        (holders,) = wait_for([self._producer.held_up_by.remote()], 1, NOTICE_S)
        if isinstance(holders, list) and holders:  # otherwise the producer does not answer, or is busy
            logger.warning(
                "rayloader: consumer %d of the share %r has waited for %.0f s: consumer(s) %s must first take "
                "the batches that are ready for them",
                self._rank,
                self.name,
                NOTICE_S,
                ", ".join(map(str, holders)),
            )

    def check_session(self) -> None:
        """Raises RaySessionError unless Ray is the one that it was, and this process the one that connected."""
        if os.getpid() != self._pid:  # Ray would wait for ever: its threads are not here
            raise RaySessionError(
                f"a consumer of the share {self.name!r} works in the process that made it, and this one was forked "
                "from it; start this process with the spawn method, and get the share by its name there"
            )
        if session.current() != self._session:
            raise RaySessionError(f"Ray was shut down while the share {self.name!r} was read; connect to it again")
