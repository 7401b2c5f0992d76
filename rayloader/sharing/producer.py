"""The process that hosts a shared loader: produces each batch once, and gives it to every consumer.

Promise: the ledger decides what is produced when, and what is kept. Every waiting consumer gets an answer: a batch, the
end of the epoch, or an error. Batches go out over each consumer's line, or where it has none as the answers to Ray
calls (`take`); all else that a consumer asks for is a Ray call. Over a line a consumer gets its batches in order, each
once, before it asks for them one by one, and never more than it has room for. What the socket does not accept is sent
when it does.

Threads: Ray runs the methods on the event loop, which alone touches the ledger and the lines. The loader lives on one
further thread, `rayloader-producer`; see hosted.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pickle
import traceback
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayloader.errors import ConsumerDroppedError, RayloaderError, ShareError, StateError
from rayloader.options import is_whole
from rayloader.sharing.hosted import HostedLoader
from rayloader.sharing.ledger import END, Ledger, Passed, Place, Step
from rayloader.sharing.messages import (
    Connection,
    Kind,
    Pipeline,
    Produced,
    Reply,
    Terms,
    Wants,
    for_line,
    packed_content,
)
from rayloader.transport import tcp_line
from rayloader.transport.line import Line, LineError, Message
from rayloader.transport.raw import new_memory

_T = TypeVar("_T")
# What a consumer is refused with: the errors of a share, and those of arguments.
_REFUSALS = (RayloaderError, ValueError)


def _answering(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Reply]]:
    """Makes a consumer's Ray call of a method: what it returns, or refuses with, becomes a reply."""

    @functools.wraps(method)
    async def answer(self: Producer, *arguments: Any) -> Reply:
        try:
            found = await method(self, *arguments)
        except _REFUSALS as error:
            return Reply(Kind.REFUSED, error)
        reply = found if isinstance(found, Reply) else Reply(Kind.DONE, found)
        return reply._replace(gone=self._ledger.gone())

    return answer


class _Outbox:
    """A consumer's line: what it is still to be sent.

    Args:
        rank: of the consumer.
        connection: its number.
        line: to it, connected.
        hear: called when something has come, or the line has ended.
    """

    def __init__(self, rank: int, connection: int, line: Line, hear: Callable[[_Outbox], None]) -> None:
        self.rank, self.connection, self.line = rank, connection, line
        self.series = -1
        self.place: Place | None = None  # of the batch that is sent next; None: there is none
        self.until = 0  # number after the last batch to send for now
        self._gone: dict[int, str] = {}  # as the consumer knows it
        self._loop = asyncio.get_running_loop()
        self._descriptor = line.descriptor
        self._loop.add_reader(self._descriptor, hear, self)

    def send(self, body: Message) -> None:
        """Sends the next batch, or what is in its place."""
        assert self.place is not None
        self._send(self.place.number, body)
        self.place = self.place._replace(number=self.place.number + 1)

    def end(self, kind: Kind, payload: object = None) -> None:
        """Sends this in place of the next batch, and none after it."""
        self.send(packed_content(kind, payload))
        self.place = None

    def tell_gone(self, gone: dict[int, str]) -> None:
        """Tells the consumer which others no longer read, if that is news."""
        if gone != self._gone:
            self._gone = gone
            self._send(-1, packed_content(Kind.GONE, gone))

    def _send(self, number: int, body: Message) -> None:
        self.line.send(for_line(self.series, number, body))
        if self.line.unsent:
            self._loop.add_writer(self._descriptor, self._send_rest)

    def _send_rest(self) -> None:
        self.line.flush()
        if not self.line.unsent:
            self._loop.remove_writer(self._descriptor)

    def close(self) -> None:
        """Ends the line."""
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self.place = None
        self.line.close()


class Producer:
    """The actor of one share. A consumer's calls begin with its rank and the number of its connection."""

    def __init__(self, terms: Terms) -> None:
        # Blocking calls are made only in the thread, which Ray does not see.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        self._terms = terms
        self._share = uuid.uuid4().hex
        self._ledger = Ledger(terms.consumers, terms.buffer, terms.buffer_bytes)
        self._connections = [0] * terms.consumers  # number of the newest one
        self._outboxes: list[_Outbox] = []
        self._sampler_epochs: dict[int, int | None] = {}  # by epoch: what the first consumer had set
        self._changed = asyncio.Event()  # replaced with each change
        self._failure: BaseException | None = None  # of this file's own code: then everything stops
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # produces
        self._hosted = HostedLoader(terms.name, terms.buffer_bytes)  # only in the thread
        self._thread = ThreadPoolExecutor(1, "rayloader-producer")

    async def open(self, pipeline: Pipeline) -> bool:
        """For the owner: opens the loader; False if that requires the image's contents. May raise any error."""
        if not await self._in_thread(self._hosted.open, pipeline):
            return False
        self._task = asyncio.get_running_loop().create_task(self._produce())
        self._opened.set()
        return True

    # ---- for the consumers

    @_answering
    async def connect(self, rank: int) -> Connection:
        """Makes the caller this consumer, and replaces the previous one; waits until the loader is open."""
        await self._opened.wait()
        number = self._terms.consumers
        if not is_whole(rank) or not 0 <= rank < number:
            raise ValueError(
                f"rank must be a whole number from 0 to {number - 1}, got {rank!r}: this share has {number} consumers, "
                "numbered from 0"
            )
        self._connections[rank] += 1
        self._check(rank, self._connections[rank])
        self._tell()
        return Connection(
            self._share,
            self._connections[rank],
            number,
            *self._ledger.place_of(rank),
            self._hosted.length,
            self._hosted.lines,
            *self._hosted.pinning,
            self._terms.origin,
        )

    @_answering
    async def attach(self, rank: int, connection: int, address: tcp_line.TcpAddress) -> str:
        """Sends this consumer's batches over a line from now on; the answer says why there can be none, or is empty."""
        self._check(rank, connection)
        try:
            line = await asyncio.get_running_loop().run_in_executor(None, tcp_line.connect, address, new_memory)
        except LineError as error:
            return str(error)
        for outbox in [one for one in self._outboxes if (one.rank, one.connection) == (rank, connection)]:
            self._hang_up(outbox)
        self._outboxes.append(_Outbox(rank, connection, line, self._hear))
        return ""

    def _reads(self, rank: int, connection: int, taken: Place, wanted: int, sampler_epoch: int | None) -> None:
        """The consumer has read up to this place, and wants the batches to that number. May raise refusals.

        The first consumer that begins an epoch says what the sampler's epoch is; that of the others must equal it.
        """
        self._check(rank, connection)
        first = self._sampler_epochs.setdefault(taken.epoch, sampler_epoch)
        if sampler_epoch is not None and first != sampler_epoch:
            raise ValueError(
                f"set_epoch({sampler_epoch}) differs from what the consumer that began this epoch had set, which "
                f"is {first}; call set_epoch with the same number in all consumers, before each epoch"
            )
        self._ledger.reach(rank, taken)
        self._ledger.ask(rank, Place(taken.epoch, wanted))

    @_answering
    async def take(
        self, rank: int, connection: int, epoch: int, taken: int, wanted: int, sampler_epoch: int | None
    ) -> Reply:
        """The consumer has taken this many batches of the epoch; waits for the batch that it wants."""
        self._reads(rank, connection, Place(epoch, taken), wanted, sampler_epoch)
        self._tell()
        while True:
            self._check(rank, connection)
            found = self._ledger.find(Place(epoch, wanted))
            if found is not None:
                return Reply(Kind.END) if found is END else Reply(found.kind, found.payload)
            await self._changed.wait()

    async def held_up_by(self) -> list[int]:
        """The consumers that the others wait for."""
        return self._ledger.held_up_by()

    @_answering
    async def state(self, rank: int, connection: int, epoch: int, taken: int) -> tuple[int, int, Any, int]:
        """The newest state of the loader that is not after a consumer's place, and how many batches lie between them.

        Before these comes that place, as `Ledger.place_of` tells it.
        """
        while True:
            self._check(rank, connection)
            self._ledger.reach(rank, Place(epoch, taken))
            place = self._ledger.place_of(rank)
            states = await self._in_thread(lambda: dict(self._hosted.states))
            if before := [known for known in states if known.epoch == place.epoch and known <= place]:
                break
            await self._changed.wait()  # all have broken off the epoch before; this one is about to begin
        state = states[before[-1]]
        if isinstance(state, BaseException):
            raise state
        return (*place, state, place.number - before[-1].number)

    @_answering
    async def seek(self, rank: int, connection: int, epoch: int, taken: int) -> None:
        """The consumer continues at this place."""
        self._check(rank, connection)
        try:
            self._ledger.seek(rank, Place(epoch, taken))
        except Passed:
            raise StateError(
                f"the state is of batch {taken} of epoch {epoch}, which all consumers have taken and the producer no "
                "longer keeps; to go back that far, load the state's entry 'loader' into the loader and share it again"
            ) from None
        self._tell()

    @_answering
    async def leave(self, rank: int, connection: int) -> None:
        """The consumer needs no more batches."""
        self._check(rank, connection)
        self._ledger.leave(rank, "it was closed")
        self._tell()

    def _check(self, rank: int, connection: int) -> None:
        """Raises the reason why the consumer gets nothing, if there is one."""
        name = self._terms.name
        if self._failure is not None:
            text = "".join(traceback.format_exception(self._failure))
            raise ShareError(f"the producer of the share {name!r} has failed:\n{text}")
        if connection != self._connections[rank]:
            raise ShareError(
                f"consumer {rank} of the share {name!r} is another object or process by now, which has connected with "
                "the same rank; give each consumer a rank of its own"
            )
        if why := self._ledger.gone().get(rank):
            place = self._ledger.place_of(rank)
            raise ConsumerDroppedError(
                f"consumer {rank} of the share {name!r} reads no more: {why}; it had taken {place.number} batches of "
                f"epoch {place.epoch}. Share the loader again, with a longer consumer_timeout if that was it"
            )

    # ---- over lines

    def _hear(self, outbox: _Outbox) -> None:
        """A consumer has said something, or has gone."""
        with self._failing():
            for message in outbox.line.receive():
                self._heard(outbox, pickle.loads(message))  # type: ignore[arg-type] # no parcels
            if outbox.line.ended:
                self._hang_up(outbox)
            self._tell()

    def _heard(self, outbox: _Outbox, wants: Wants) -> None:
        if wants.series != outbox.series:
            outbox.series, outbox.place = wants.series, Place(wants.epoch, wants.first)
        outbox.until = wants.until
        taken = Place(wants.epoch, wants.taken)
        try:
            self._reads(outbox.rank, outbox.connection, taken, wants.until - 1, wants.sampler_epoch)
        except _REFUSALS as error:
            if outbox.place is not None:
                outbox.end(Kind.REFUSED, error)

    def _send(self, outbox: _Outbox) -> None:
        """Sends what a consumer has room for, as far as it is produced."""
        while outbox.place is not None and outbox.place.number < outbox.until:
            outbox.tell_gone(self._ledger.gone())
            try:
                self._check(outbox.rank, outbox.connection)
            except _REFUSALS as error:
                outbox.end(Kind.REFUSED, error)
                break
            found = self._ledger.find(outbox.place)
            if found is None:
                break
            if found is END:
                outbox.end(Kind.END)
            else:
                outbox.send(found.content)

    def _hang_up(self, outbox: _Outbox) -> None:
        outbox.close()
        self._outboxes.remove(outbox)

    # ---- producing

    def _tell(self) -> None:
        """Something has changed: wakes all waiting calls, and sends what can be sent."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        for outbox in self._outboxes:
            self._send(outbox)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Tells all consumers if own code fails, for otherwise they would wait for ever."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._tell()
            raise

    async def _in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _produce(self) -> None:
        with self._failing():
            while True:
                await self._go_on()
                self._tell()

    async def _go_on(self) -> None:
        """Does the next step, or waits until there is one."""
        ledger = self._ledger
        step = ledger.step()
        if step is Step.WAIT:
            await self._wait()
        elif step is Step.BEGIN:
            epoch = ledger.front.epoch + 1
            ledger.begin()
            for past in [past for past in self._sampler_epochs if past < ledger.lowest.epoch]:
                del self._sampler_epochs[past]
            error = await self._in_thread(self._hosted.begin, epoch, self._sampler_epochs.get(epoch))
            if error is not None:
                ledger.add(*error)
                ledger.end()
        else:
            loop = asyncio.get_running_loop()

            def give(produced: tuple[Produced, int] | None) -> None:  # in the thread
                loop.call_soon_threadsafe(self._take_in, produced)

            await self._in_thread(self._hosted.produce, ledger.front, ledger.lowest, ledger.room, give)

    def _take_in(self, produced: tuple[Produced, int] | None) -> None:
        """The next batch is there; None: the epoch has no more."""
        with self._failing():
            if produced is None:
                self._ledger.end()
            else:
                self._ledger.add(*produced)
            self._tell()

    async def _wait(self) -> None:
        """Waits until something changes; drops consumers that have kept the others waiting for too long."""
        timeout, changed = self._terms.consumer_timeout, self._changed
        if timeout is None or not self._ledger.held_up_by():
            await changed.wait()
            return
        try:
            await asyncio.wait_for(self._until_freed(self._ledger.lowest), timeout)
        except asyncio.TimeoutError:
            for rank in self._ledger.held_up_by():
                self._ledger.leave(rank, f"the others had waited for it for {timeout:g} s")

    async def _until_freed(self, lowest: Place) -> None:
        while self._ledger.lowest == lowest and self._ledger.held_up_by():
            await self._changed.wait()
