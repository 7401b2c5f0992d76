"""The process that hosts a shared loader: produces each batch once, and gives it to every consumer.

Promise: the ledger decides what is produced when, and what is kept. Every waiting consumer gets an answer: a batch, the
end of the epoch, or an error. Batches go out over each consumer's line (outbox.py), or where it has none as the answers
to Ray calls (`take`); all else that a consumer asks for is a Ray call.

Threads: Ray runs the methods on the event loop, which alone touches the ledger and the lines. The loader lives on one
further thread, `rayloader-producer`; see hosted.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayloader.errors import ConsumerDroppedError, ShareError, StateError
from rayloader.sampling.sharding import is_whole
from rayloader.sharing.hosted import HostedLoader
from rayloader.sharing.ledger import End, Ledger, Passed, Place, Step
from rayloader.sharing.messages import Begin, Connection, Kind, Pipeline, Produced, Reply, Take, Terms
from rayloader.sharing.outbox import Outbox
from rayloader.transport import tcp_line
from rayloader.transport.line import Line, LineError
from rayloader.transport.raw import new_memory

_T = TypeVar("_T")


class Producer:
    """The actor of one share."""

    def __init__(self, terms: Terms) -> None:
        # Blocking calls are made only in the thread, which Ray does not see.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        self._terms = terms
        self._share = uuid.uuid4().hex
        self._ledger = Ledger(terms.consumers, terms.buffer, terms.buffer_bytes)
        self._connections = [0] * terms.consumers  # number of the newest one
        self._outboxes: list[Outbox] = []
        self._sampler_epochs: dict[int, int | None] = {}  # by epoch: what the first consumer had set
        self._changed = asyncio.Event()  # replaced with each change
        self._failure: BaseException | None = None  # of this file's own code: then everything stops
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # produces
        self._hosted = HostedLoader(terms.name, terms.buffer_bytes)  # only in the thread
        self._thread = ThreadPoolExecutor(1, "rayloader-producer")

    # ---- for the owner

    async def open(self, pipeline: Pipeline) -> bool:
        """Opens the loader; False if that requires the image's contents. Raises the errors of unpickling it."""
        if not await self._in_thread(self._hosted.open, pipeline):
            return False
        self._task = asyncio.get_running_loop().create_task(self._produce())
        self._opened.set()
        return True

    # ---- for the consumers

    async def connect(self, rank: int) -> Reply:
        """Makes the caller this consumer, and replaces the previous one; waits until the loader is open."""
        await self._opened.wait()
        if not is_whole(rank) or not 0 <= rank < self._terms.consumers:
            number = self._terms.consumers
            text = (
                f"rank must be a whole number from 0 to {number - 1}, got {rank!r}: this share has {number} consumers, "
                "numbered from 0"
            )
            return Reply(Kind.REFUSED, ValueError(text))
        self._connections[rank] += 1
        if (refusal := self._refusal(rank, self._connections[rank])) is not None:
            return refusal
        self._tell()
        connection = Connection(
            self._share,
            self._connections[rank],
            self._terms.consumers,
            *self._ledger.place_of(rank),
            self._hosted.length,
            self._hosted.lines,
            *self._hosted.pinning,
            self._terms.origin,
        )
        return self._done(tuple(connection))

    async def attach(self, rank: int, connection: int, address: tcp_line.TcpAddress) -> Reply:
        """Sends this consumer's batches over a line from now on; the answer says why there can be none, or is empty."""
        if (refusal := self._refusal(rank, connection)) is not None:
            return refusal
        try:
            line = await asyncio.get_running_loop().run_in_executor(None, _connected, address)
        except LineError as error:
            return self._done(str(error))
        for outbox in [one for one in self._outboxes if (one.rank, one.connection) == (rank, connection)]:
            self._hang_up(outbox)
        self._outboxes.append(Outbox(rank, connection, line, self._hear))
        return self._done("")

    async def begin(self, rank: int, connection: int, epoch: int, taken: int, sampler_epoch: int | None) -> Reply:
        """The consumer iterates from this place on. Its epoch for the sampler must equal that of the others."""
        reply = self._begun(rank, connection, epoch, taken, sampler_epoch)
        self._tell()
        return reply

    def _begun(self, rank: int, connection: int, epoch: int, taken: int, sampler_epoch: int | None) -> Reply:
        if (refusal := self._refusal(rank, connection)) is not None:
            return refusal
        first = self._sampler_epochs.setdefault(epoch, sampler_epoch)
        if sampler_epoch is not None and first != sampler_epoch:
            return Reply(
                Kind.REFUSED,
                ValueError(
                    f"set_epoch({sampler_epoch}) differs from what the consumer that began this epoch had set, which "
                    f"is {first}; call set_epoch with the same number in all consumers, before each epoch"
                ),
            )
        self._ledger.reach(rank, Place(epoch, taken))
        self._ledger.ask(rank, Place(epoch, taken))
        return self._done()

    async def take(self, rank: int, connection: int, epoch: int, taken: int, wanted: int) -> Reply:
        """The consumer has taken this many batches of the epoch; waits for the batch that it wants."""
        place = Place(epoch, wanted)
        if self._refusal(rank, connection) is None:
            self._ledger.reach(rank, Place(epoch, taken))
            self._ledger.ask(rank, place)
            self._tell()
        while (refusal := self._refusal(rank, connection)) is None:
            found = self._ledger.find(place)
            if found is End.END:
                return Reply(Kind.END, gone=self._ledger.gone())
            if found is not None:
                return Reply(found.kind, found.payload, self._ledger.gone())
            await self._changed.wait()
        return refusal

    async def held_up_by(self) -> list[int]:
        """The consumers that the others wait for."""
        return self._ledger.held_up_by()

    async def state(self, rank: int, connection: int, epoch: int, taken: int) -> Reply:
        """The newest state of the loader that is not after a consumer's place, and how many batches lie between them.

        Also returns that place, in the form of `Ledger.place_of`.
        """
        while (refusal := self._refusal(rank, connection)) is None:
            self._ledger.reach(rank, Place(epoch, taken))
            place = self._ledger.place_of(rank)
            states = await self._in_thread(lambda: dict(self._hosted.states))
            before = [known for known in states if known.epoch == place.epoch and known <= place]
            if not before:  # all have broken off the epoch before; this one is about to begin
                await self._changed.wait()
                continue
            state = states[before[-1]]
            if isinstance(state, BaseException):
                return Reply(Kind.REFUSED, state)
            return self._done((*place, state, place.number - before[-1].number))
        return refusal

    async def seek(self, rank: int, connection: int, epoch: int, taken: int) -> Reply:
        """The consumer continues at this place."""
        if (refusal := self._refusal(rank, connection)) is not None:
            return refusal
        try:
            self._ledger.seek(rank, Place(epoch, taken))
        except Passed:
            return Reply(
                Kind.REFUSED,
                StateError(
                    f"the state is of batch {taken} of epoch {epoch}, which all consumers have taken and the producer "
                    "no longer keeps; to go back that far, load the state's entry 'loader' into the loader and share "
                    "it again"
                ),
            )
        self._tell()
        return self._done()

    async def leave(self, rank: int, connection: int) -> Reply:
        """The consumer needs no more batches."""
        if self._refusal(rank, connection) is None:
            self._ledger.leave(rank, "it was closed")
            self._tell()
        return self._done()

    def _refusal(self, rank: int, connection: int) -> Reply | None:
        """The reason why the consumer gets nothing, if there is one."""
        name = self._terms.name
        if self._failure is not None:
            text = "".join(traceback.format_exception(self._failure))
            return Reply(Kind.REFUSED, ShareError(f"the producer of the share {name!r} has failed:\n{text}"))
        if connection != self._connections[rank]:
            return Reply(
                Kind.REFUSED,
                ShareError(
                    f"consumer {rank} of the share {name!r} is another object or process by now, which has connected "
                    "with the same rank; give each consumer a rank of its own"
                ),
            )
        if why := self._ledger.why_gone(rank):
            place = self._ledger.place_of(rank)
            return Reply(
                Kind.REFUSED,
                ConsumerDroppedError(
                    f"consumer {rank} of the share {name!r} reads no more: {why}; it had taken {place.number} batches "
                    f"of epoch {place.epoch}. Share the loader again, with a longer consumer_timeout if that was it"
                ),
            )
        return None

    def _done(self, payload: Any = None) -> Reply:
        return Reply(Kind.DONE, payload, self._ledger.gone())

    # ---- over lines

    def _hear(self, outbox: Outbox) -> None:
        """A consumer has said something, or has gone."""
        with self._failing():
            for message in outbox.received():
                self._heard(outbox, message)
            if outbox.has_ended:
                self._hang_up(outbox)
            self._tell()

    def _heard(self, outbox: Outbox, message: Begin | Take) -> None:
        rank = outbox.rank
        if isinstance(message, Begin):
            outbox.begin(message)
            epoch, taken = message.epoch, message.taken
            reply = self._begun(rank, outbox.connection, epoch, taken, message.sampler_epoch)
            if reply.kind is Kind.REFUSED:
                outbox.end(reply.kind, reply.payload)
                return
        elif not outbox.allow(message) or self._refusal(rank, outbox.connection) is not None:
            return
        else:
            epoch, taken = outbox.epoch, message.taken
            self._ledger.reach(rank, Place(epoch, taken))
        self._ledger.ask(rank, Place(epoch, message.until - 1))

    def _send(self, outbox: Outbox) -> None:
        """Sends what a consumer has room for, as far as it is produced."""
        while (place := outbox.wants) is not None:
            refusal = self._refusal(outbox.rank, outbox.connection)
            found = None if refusal is not None else self._ledger.find(place)
            outbox.tell_gone(self._ledger.gone())
            if refusal is not None:
                outbox.end(refusal.kind, refusal.payload)
            elif found is End.END:
                outbox.end(Kind.END)
            elif isinstance(found, Produced):
                outbox.send(found.content)
            else:
                break

    def _hang_up(self, outbox: Outbox) -> None:
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
            return
        if step is Step.BEGIN:
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


def _connected(address: tcp_line.TcpAddress) -> Line:
    return tcp_line.connect(address, new_memory)
