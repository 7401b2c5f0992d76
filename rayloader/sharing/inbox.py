"""Where a consumer's batches come in: over a line of its own, or by Ray calls where there can be none.

Promise: `next` gives the same batch again until it is removed from `pending`, so an interrupted `next` of the user
loses none. The producer learns from `tell` what the user has taken, and keeps everything else, so a line that has
ended, or that an interrupt may have torn, is replaced by a new one, and nothing is lost.

Over a line, small batches are read when the user asks for one; once a large buffer arrives, `rayloader-ahead` reads,
until the epoch is over, into memory of transport/lanes.py, which is the user's to write to. One thread reads at a
time: the user's, or `rayloader-ahead` while there is one. Only the user's sends, and puts batches together.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import select
import time
import weakref
from typing import Any

from rayloader.bell import TICK_S, Waker
from rayloader.epoch.ahead import COPIED_AHEAD_BYTES, AheadThread
from rayloader.errors import ShareError
from rayloader.sharing.link import NOTICE_S, Link
from rayloader.sharing.messages import Kind, Reply, Wants, content_of, head_of, nbytes_of
from rayloader.start import session
from rayloader.transport.lanes import SMALL_BYTES, Recycled
from rayloader.transport.line import LineError, Message
from rayloader.transport.tcp_line import TcpDriverLine
from rayloader.workers.actor import NONE_YET, RayAnswer

# How many batches a consumer requests by Ray calls, over those that the user has taken.
_CALLS_AHEAD = 3
# How many batches the producer may send over a line beyond those that the user has taken, if they are small.
MOST_AHEAD = 8
# The size of the largest recent batch decays by this factor with each smaller batch.
DECAY = 0.98
# How often a line that has ended is replaced without a message in between.
_MOST_FRUITLESS = 3

logger = logging.getLogger("rayloader")


class Inbox:
    """The batches of one consumer.

    Args:
        link: to the producer.

    Attributes:
        pending: batches that have come, or are on their way, and that the user has not taken: by number. Remove a batch
            once the user has it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pending: dict[int, Any] = {}  # messages of the line, or Ray calls
        self._epoch = self._taken = 0
        self._sampler_epoch: int | None = None
        self._by_calls = not link.may_use_lines
        self._pid = os.getpid()
        self._memory = Recycled()
        self._waker = Waker()  # of the thread
        self._line: TcpDriverLine | None = None
        self._torn = False  # whether an interrupt may have come within a call of the line
        self._fruitless = 0  # times that the line has ended since the last message
        self._thread: AheadThread | None = None
        self._is_large = False  # whether large buffers come, so that the thread is to read them
        self._series = 0
        self._gone: dict[int, str] | None = None  # news
        self._largest = 0.0  # bytes of a recent batch; 0: none has come yet
        _live.add(self)

    def begin(self, epoch: int, taken: int, sampler_epoch: int | None) -> None:
        """The consumer iterates from this place on; the producer may begin the epoch."""
        self.rest(wait=True)
        self._link.check_session()
        self._epoch, self._taken, self._sampler_epoch = epoch, taken, sampler_epoch
        self._is_large = False
        try:
            if self._is_usable:
                self._send()
            elif not self._by_calls:
                self._connect()
        except LineError as error:
            logger.warning(
                "rayloader: batches of the share %r come by Ray calls, which take longer than a socket: %s",
                self._link.name,
                error,
            )
            self.close()
            self._by_calls = True
        if self._by_calls:
            self.tell(taken)

    def next(self, number: int) -> Reply:
        """Waits for the batch of that number, which is the next.

        Raises:
            RayloaderError: the producer refuses, or it or Ray is gone.
            ValueError: it refuses the sampler's epoch.
        """
        if self._by_calls:
            return self._link.result(self.pending[number])
        kind, payload = content_of(self._received(number))
        if self._gone is not None:
            self._link.note_gone(self._gone)
            self._gone = None
        if kind is Kind.REFUSED:
            raise payload
        if kind is Kind.BY_CALL:
            return self._link.result(self._take(number))
        return Reply(kind, payload)

    def tell(self, taken: int) -> None:
        """Reports how many batches were taken, and requests more. May be repeated."""
        self._taken = taken
        if self._by_calls:
            for number in range(taken, taken + _CALLS_AHEAD):
                if number not in self.pending:
                    self.pending[number] = self._take(number)
        elif self._is_usable:
            self._send()

    def _take(self, number: int) -> Any:
        return self._link.call("take", self._epoch, self._taken, number, self._sampler_epoch)

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
        """Makes a line, and begins the series on it.

        Raises:
            LineError: there can be no line.
        """
        self._torn = True
        if self._line is not None:
            self._line.close()
        self._line = line = TcpDriverLine(session.node_ip(), self._room)
        call = self._link.call("attach", line.address)
        answer = RayAnswer(call)
        while not line.is_quiet:
            self._link.check_session()
            if answer.value is not NONE_YET and (reason := self._link.result(call).payload):
                raise LineError(reason)
            if line.refused or line.ended:
                raise LineError(line.refused or "it was closed at once")
            self._poll(line)
            line.read()
        self._torn = False
        self._send()

    def _reconnect(self) -> None:
        """The line has ended, or is torn: makes a new one, or raises the error that tells why the producer is gone."""
        self._fruitless += not self._torn
        if self._fruitless > _MOST_FRUITLESS:
            raise ShareError(
                "the connection to the producer of a share has ended again and again, without a message; if something "
                "between the two machines ends it, set RAYLOADER_ARENAS=0, and batches come by Ray calls"
            )
        self._end_thread(wait=True)
        self._series += 1
        try:
            self._connect()
        except LineError as error:
            raise ShareError(
                f"the connection to the producer of a share is lost, and there can be no other: {error}"
            ) from error

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
        message: Message = self.pending[number]
        return message

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
            if number < 0:
                _, self._gone = content_of(message)
            elif series == self._series:
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


def close_all() -> None:
    """Closes all inboxes of this process."""
    for inbox in list(_live):
        inbox.close()


_live: weakref.WeakSet[Inbox] = weakref.WeakSet()
# Runs before Ray's own handler, which was registered before it.
atexit.register(close_all)
