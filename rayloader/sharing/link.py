"""The connection to the producer of a share: its owner starts it, consumers find it, call it and receive its batches.

Promise: a producer ends with the process that started it, with `close` of its share, and with `rayloader.shutdown()`.
Nothing here calls Ray once its session is gone (NOTE [sessions] in session.py). Ray's errors about a dead producer
become a `ShareError`, and errors of the producer are raised unchanged.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import pickle
import select
import time
import weakref
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayloader.actors import session
from rayloader.actors.actor import RayAnswer, wait_for
from rayloader.actors.image import Contents, Image
from rayloader.actors.replica import module_folders
from rayloader.actors.start import SessionName
from rayloader.actors.tcp_line import TcpDriverLine
from rayloader.epoch.ahead import COPIED_AHEAD_BYTES, AheadThread
from rayloader.errors import RaySessionError, ShareError, add_note
from rayloader.interrupts import TICK_S, Waker
from rayloader.protocol import carried
from rayloader.random.generators import RECORDED
from rayloader.random.random_state import RandomState
from rayloader.sharing.messages import (
    NAMESPACE,
    Connection,
    Kind,
    Pipeline,
    Terms,
    Wants,
    content_of,
    head_of,
    nbytes_of,
)
from rayloader.sharing.producer import Producer
from rayloader.transport import codec, unpicklable
from rayloader.transport.lanes import SMALL_BYTES, Recycled
from rayloader.transport.line import LineError, Message
from rayloader.workers.connection import NONE_YET

# After this many seconds of waiting for others, a consumer logs which ones it waits for.
NOTICE_S = 60.0
# How often to look for a share that does not exist yet, in seconds.
LOOK_EVERY_S = 0.2
# How many batches the producer may send beyond those that the user has taken, if they are small.
MOST_AHEAD = 8
# The size of the largest recent batch decays by this factor with each smaller batch.
DECAY = 0.98
# How often a line that has ended is replaced without a message in between.
_MOST_FRUITLESS = 3

logger = logging.getLogger("rayloader")
_remote_producer: Any = ray.remote(Producer)
_owned: list[tuple[SessionName, Any]] = []  # producers that this process has started


def start(loader: Any, terms: Terms, ray_remote_args: dict[str, Any]) -> Any:
    """Starts the producer of a loader, in a process of its own; returns the actor.

    Raises:
        ShareError: there is a share with that name.
        Exception: pickling the loader raises it, or unpickling it there.
    """
    name = _ensured()
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
            content = [ray.put(PickleBuffer(image.content()))]
            _opened(producer, terms.name, pipeline._replace(content=content))
    except BaseException:
        end(producer)
        raise
    return producer


def _ensured() -> SessionName:
    """The session of Ray, joined or started.

    Raises:
        RaySessionError: there is none, or Ray encrypts its connections.
    """
    name = session.ensure()
    if session.uses_tls():
        raise RaySessionError(
            "the batches of a share travel over connections of their own, and Ray's TLS (RAY_USE_TLS=1) would not "
            "encrypt these; give each process a loader of its own, or switch TLS off in a network that is safe"
        )
    return name


def _opened(producer: Any, name: str, pipeline: Pipeline) -> bool:
    def note_wait() -> None:
        logger.warning(
            "rayloader: the producer of the share %r has not opened the loader within %.0f s; still waiting. If Ray "
            "has no place for it, change ray_remote_args",
            name,
            NOTICE_S,
        )

    return bool(_answer(producer.open.remote(pipeline), name, note_wait))


def _answer(ref: Any, name: str, note_wait: Callable[[], None]) -> Any:
    """The answer to a call of the producer; calls `note_wait` each time that none has come for NOTICE_S.

    Raises:
        ShareError: the producer is gone.
        Exception: the call has raised it.
    """
    while True:
        (answer,) = wait_for([ref], 1, NOTICE_S)
        if isinstance(answer, RayTaskError):
            raise (answer.cause if isinstance(answer.cause, Exception) else answer) from None
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
    try:
        encoded = codec.encode(shared, carry=carried(), replica=True, special=RECORDED)
    except Exception as error:  # the user's objects may raise anything: add a note that names the culprit
        if (explanation := unpicklable.explain(shared.__dict__, "loader")) is not None:
            add_note(error, f"It cannot be sent to the producer: {explanation}")
        raise
    image = Image.write(Contents(encoded))
    random = RandomState.capture([])
    return Pipeline(image.address, list(encoded.carried), None, session.node_id(), module_folders(), random), image


def end(producer: Any) -> None:
    """Ends a producer, and with it the workers of its loader; callable more than once."""
    for name, owned in list(_owned):
        if owned == producer:
            _owned.remove((name, owned))
            if session.current() == name:
                ray.kill(owned)


def close_all() -> None:
    """Ends what this process reads, and the producers that it has started."""
    close_inboxes()
    for _, producer in list(_owned):
        with contextlib.suppress(Exception):  # one that cannot be ended must not keep the others alive
            end(producer)


def find(name: str, timeout: float) -> Any:
    """The producer of that name, as soon as it exists.

    Raises:
        ShareError: there is none within `timeout` seconds.
    """
    _ensured()
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
        self._session, self._pid = _ensured(), os.getpid()
        self._producer, self.name, self._rank = producer, name, rank
        self.check_session()
        self.connection: Connection = self.result(self._producer.connect.remote(rank))

    def call(self, method: str, *arguments: Any) -> Any:
        """Makes a Ray call to the producer on behalf of this consumer; pass the return value to `result`."""
        self.check_session()
        return getattr(self._producer, method).remote(self._rank, self.connection.number, *arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the producer answers to a call; raises as `result` does."""
        return self.result(self.call(method, *arguments))

    def result(self, ref: Any) -> Any:
        """What the producer answers to a call, once that has come; may be requested again.

        Raises:
            RayloaderError: the producer refuses, or it or Ray is gone.
            ValueError: it refuses an argument.
        """
        self.check_session()
        return _answer(ref, self.name, self.note_wait)

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


class Inbox:
    """Where the batches of one consumer come in: over a line of its own.

    `next` gives the same batch again until it is removed from `pending`, so an interrupted `next` of the user loses
    none. The producer learns from `tell` what the user has taken, and keeps everything else, so a line that has ended,
    or that an interrupt may have torn, is replaced by a new one, and nothing is lost.

    Small batches are read when the user asks for one; once a large buffer arrives, `rayloader-ahead` reads, until the
    epoch is over, into memory of transport/lanes.py, which is the user's to write to. One thread reads at a time:
    the user's, or `rayloader-ahead` while there is one. Only the user's sends, and puts batches together.

    Args:
        link: to the producer.

    Attributes:
        pending: messages with batches that have come, and that the user has not taken: by number. Remove a batch once
            the user has it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pending: dict[int, Message] = {}
        self._epoch = self._taken = 0
        self._sampler_epoch: int | None = None
        self._pid = os.getpid()
        self._memory = Recycled()
        self._waker = Waker()  # of the thread
        self._line: TcpDriverLine | None = None
        self._torn = False  # whether an interrupt may have come within a call of the line
        self._fruitless = 0  # times that the line has ended since the last message
        self._thread: AheadThread | None = None
        self._is_large = False  # whether large buffers come, so that the thread is to read them
        self._series = 0
        self._largest = 0.0  # bytes of a recent batch; 0: none has come yet
        _live.add(self)

    def begin(self, epoch: int, taken: int, sampler_epoch: int | None) -> None:
        """The consumer iterates from this place on; the producer may begin the epoch.

        Raises:
            RayloaderError: there can be no line, or the producer or Ray is gone.
        """
        self.rest(wait=True)
        self._link.check_session()
        self._epoch, self._taken, self._sampler_epoch = epoch, taken, sampler_epoch
        self._is_large = False
        if self._is_usable:
            self._send()
        else:
            self._connect()

    def next(self, number: int) -> tuple[Kind, Any]:
        """Waits for the batch of that number, which is the next, or what is in its place; with its payload.

        Raises:
            RayloaderError: the producer refuses, or it or Ray is gone.
            ValueError: it refuses the sampler's epoch.
        """
        kind, payload = content_of(self._received(number))
        if kind is Kind.REFUSED:
            raise payload
        return kind, payload

    def tell(self, taken: int) -> None:
        """Reports how many batches were taken, and requests more. May be repeated."""
        self._taken = taken
        if self._is_usable:
            self._send()

    def rest(self, *, wait: bool) -> None:
        """No batch is needed until the next `begin`: ends what is done ahead, and waits for its end if so asked."""
        self._end_thread(wait=wait)
        self._series += 1  # what comes now is of no use
        self.pending = {}

    def close(self) -> None:
        """Nothing more is needed; callable more than once."""
        if os.getpid() != self._pid:  # the memory is the parent's
            return
        self.rest(wait=True)
        line, self._line = self._line, None
        if line is not None:
            line.close()
        self._memory.close()

    # ---- the line

    @property
    def _is_usable(self) -> bool:
        return self._line is not None and not self._torn and not self._line.ended

    def _send(self) -> None:
        assert self._line is not None
        first = self._taken
        while first in self.pending:
            first += 1
        ahead = int(COPIED_AHEAD_BYTES // self._largest) if self._largest else 1
        until = self._taken + max(1, min(MOST_AHEAD, ahead))
        wants = Wants(self._series, self._epoch, self._taken, first, until, self._sampler_epoch)
        self._torn = True
        self._line.send(pickle.dumps(wants, pickle.HIGHEST_PROTOCOL))
        self._torn = False

    def _connect(self) -> None:
        """Makes a line, in place of one that has ended, and begins the series on it.

        Raises:
            ShareError: there can be no line.
        """
        self._torn = True
        if self._line is not None:
            self._line.close()
        try:
            self._line = line = TcpDriverLine(session.node_ip(), self._room)
            call = self._link.call("attach", line.address)
            answer = RayAnswer(call)
            while not line.is_quiet:
                self._link.check_session()
                if answer.value is not NONE_YET:
                    self._link.result(call)  # raises LineError where there can be no line
                if line.refused or line.ended:
                    raise LineError(line.refused or "it was closed at once")
                self._poll(line)
                line.read()
        except LineError as error:
            raise ShareError(
                f"the producer of the share {self._link.name!r} cannot connect to this consumer, whose machine must "
                f"accept TCP connections from the producer's: {error}"
            ) from error
        self._torn = False
        self._send()

    def _reconnect(self) -> None:
        """The line has ended, or is torn: makes a new one, or raises the error that tells why the producer is gone."""
        self._fruitless += not self._torn
        if self._fruitless > _MOST_FRUITLESS:
            raise ShareError(
                "the connection to the producer of a share has ended again and again, without a message; if something "
                "between the two machines ends it, let it pass"
            )
        self._end_thread(wait=True)
        self._series += 1
        self._connect()

    def _received(self, number: int) -> Message:
        """Waits for the message that holds the batch of that number."""
        self._link.check_session()
        since = time.monotonic()
        while number not in self.pending:
            if not self._is_usable:
                self._reconnect()
            self._wait()
            self._link.check_session()
            if time.monotonic() - since >= NOTICE_S:
                since = time.monotonic()
                self._link.note_wait()
        if self._is_large and self._is_usable:
            self._start_thread()
        return self.pending[number]

    def _wait(self) -> None:
        """Waits until something has come, or for TICK_S; in the user's thread."""
        line = self._line
        assert line is not None
        if line.unsent:
            self._torn = True
            line.flush()
            self._torn = False
        if self._is_large:
            thread = self._start_thread()
            thread.check()
            thread.wait(TICK_S)
            return
        self._torn = True
        came = self._read(line)
        self._torn = False
        if not came and not self._is_large:
            self._poll(line)

    def _room(self, nbytes: int) -> memoryview:
        """Memory for a buffer that arrives."""
        self._is_large |= nbytes > SMALL_BYTES
        return self._memory.room(nbytes)

    def _poll(self, line: TcpDriverLine) -> None:
        """Waits until something can be read, or for TICK_S."""
        waiting = select.poll()
        for descriptor, _ in line.descriptors:
            waiting.register(descriptor, select.POLLIN)
        waiting.register(self._waker.descriptor, select.POLLIN)
        if (self._waker.descriptor, select.POLLIN) in waiting.poll(1000 * TICK_S):
            self._waker.heard()

    def _read(self, line: TcpDriverLine) -> bool:
        """Takes in what has come; returns whether something has."""
        messages = line.receive()
        for message in messages:
            self._fruitless = 0
            series, number = head_of(message)
            if series == self._series:
                self._largest = max(nbytes_of(message), DECAY * self._largest)
                self.pending[number] = message
        return bool(messages)

    # ---- the thread

    def _start_thread(self) -> AheadThread:
        """The thread, which begins to read if it has not begun."""
        if self._thread is None:
            self._thread = AheadThread(self._work, None)
        self._thread.start()  # again, after an interrupt
        return self._thread

    def _end_thread(self, *, wait: bool) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid:  # a forked child has neither its locks nor the thread
            thread.close(wait=False)
            self._waker.ring()
            if wait:
                thread.close()

    def _work(self) -> bool:
        """In the thread: waits for a message, and takes it in; False if the line has ended."""
        line = self._line
        if line is None or line.ended:
            return False  # the user's thread replaces it
        if not self._read(line):
            self._poll(line)
        return True


def close_inboxes() -> None:
    """Closes all inboxes of this process."""
    for inbox in list(_live):
        inbox.close()


_live: weakref.WeakSet[Inbox] = weakref.WeakSet()
# Runs before Ray's own handler, which was registered before it.
atexit.register(close_inboxes)
