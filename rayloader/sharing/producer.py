"""The process that hosts a shared loader: produces each batch once, and gives it to every consumer.

Promise: the batches are those that the loader would have given in the program that shared it. Each is encoded once. Its
bytes stay where the loader's worker has built them; without workers they are copied, because the dataset may write to
them again. An error of the loader takes the place of its batch.

The ledger decides what is produced when, and what is kept. Every waiting consumer gets an answer: a batch, the end of
the epoch, or an error. Over its line a consumer gets its batches in order, each once, before it asks for them one by
one, and never more than it has room for. What the socket does not accept is sent when it does. All else that a consumer
asks for is a Ray call.

Threads: Ray runs the methods on the event loop, which alone touches the ledger and the lines. The loader lives on one
further thread, `rayloader-producer`: the `HostedLoader`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import cloudpickle
import ray

from rayloader.actors import session, tcp_line
from rayloader.actors.image import decode_replica, open_image
from rayloader.errors import ConsumerDroppedError, ShareError, StateError, add_note
from rayloader.options import is_whole
from rayloader.protocol import Caught, carried
from rayloader.sharing.ledger import END, Ledger, Place, PlacesLeft, Step
from rayloader.sharing.messages import (
    REFUSALS,
    Connection,
    Kind,
    Pipeline,
    Terms,
    Wants,
    for_line,
    packed_content,
)
from rayloader.transport import codec, unpicklable
from rayloader.transport.lanes import Recycled, in_message
from rayloader.transport.line import Line, Message
from rayloader.transport.memory_file import MemoryFileError
from rayloader.transport.raw import new_memory

_T = TypeVar("_T")
logger = logging.getLogger("rayloader")


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
        self._loop = asyncio.get_running_loop()
        self._descriptor = line.descriptor
        self._loop.add_reader(self._descriptor, hear, self)

    def send(self, body: Message) -> None:
        """Sends the next batch, or what is in its place."""
        assert self.place is not None
        self.line.send(for_line(self.series, self.place.number, body))
        if self.line.unsent:
            self._loop.add_writer(self._descriptor, self._send_rest)
        self.place = self.place._replace(number=self.place.number + 1)

    def end(self, kind: Kind, payload: object = None) -> None:
        """Sends this in place of the next batch, and none after it."""
        self.send(packed_content(kind, payload))
        self.place = None

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
    """The actor of one share. A consumer's calls begin with its rank and the number of its connection.

    What a call raises reaches the caller: one of `REFUSALS`, a LineError where no line is possible, or the error with
    which the loader could not be opened.
    """

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
        """For the owner: opens the loader; False if that requires the image's contents."""
        if not await self._in_thread(self._hosted.open, pipeline):
            return False
        self._task = asyncio.get_running_loop().create_task(self._produce())
        self._opened.set()
        return True

    # ---- for the consumers

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
            *self._hosted.pinning,
            self._terms.origin,
        )

    async def attach(self, rank: int, connection: int, address: tcp_line.TcpAddress) -> None:
        """Sends this consumer's batches over a line from now on; raises LineError where there can be none."""
        self._check(rank, connection)
        line = await asyncio.get_running_loop().run_in_executor(None, tcp_line.connect, address, new_memory)
        for outbox in [one for one in self._outboxes if (one.rank, one.connection) == (rank, connection)]:
            self._hang_up(outbox)
        self._outboxes.append(_Outbox(rank, connection, line, self._hear))

    async def held_up_by(self) -> list[int]:
        """The consumers that the others wait for."""
        return self._ledger.held_up_by()

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

    async def seek(self, rank: int, connection: int, epoch: int, taken: int) -> None:
        """The consumer continues at this place."""
        self._check(rank, connection)
        if not self._ledger.seek(rank, Place(epoch, taken)):
            raise StateError(
                f"the state is of batch {taken} of epoch {epoch}, which all consumers have taken and the producer no "
                "longer keeps; to go back that far, load the state's entry 'loader' into the loader and share it again"
            )
        self._tell()

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
        if why := self._ledger.gone(rank):
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
                ended = outbox.rank, outbox.connection
                asyncio.get_running_loop().call_later(self._terms.absence, self._give_up, *ended)
            self._tell()

    def _give_up(self, rank: int, connection: int) -> None:
        """Waits no longer for a consumer whose line has ended, unless it has connected again, or was closed."""
        lines = [(one.rank, one.connection) for one in self._outboxes]
        if connection == self._connections[rank] and (rank, connection) not in lines and not self._ledger.gone(rank):
            self._leave(rank, f"its process ended {self._terms.absence:g} s ago, and none came instead")
            self._tell()

    def _leave(self, rank: int, why: str) -> None:
        self._ledger.leave(rank, why)
        logger.warning("rayloader: consumer %d of the share %r reads no more: %s", rank, self._terms.name, why)

    def _heard(self, outbox: _Outbox, wants: Wants) -> None:
        if wants.series != outbox.series:
            outbox.series, outbox.place = wants.series, Place(wants.epoch, wants.first)
        outbox.until = wants.until
        try:
            self._check(outbox.rank, outbox.connection)
            self._check_sampler_epoch(wants)
        except REFUSALS as error:
            if outbox.place is not None:
                outbox.end(Kind.REFUSED, error)
            return
        self._ledger.reach(outbox.rank, Place(wants.epoch, wants.taken))
        self._ledger.ask(outbox.rank, Place(wants.epoch, wants.until - 1))

    def _check_sampler_epoch(self, wants: Wants) -> None:
        """What the first consumer that begins an epoch says of the sampler's epoch, that of the others must equal."""
        first = self._sampler_epochs.setdefault(wants.epoch, wants.sampler_epoch)
        if wants.sampler_epoch is not None and first != wants.sampler_epoch:
            raise ValueError(
                f"set_epoch({wants.sampler_epoch}) differs from what the consumer that began this epoch had set, which "
                f"is {first}; call set_epoch with the same number in all consumers, before each epoch"
            )

    def _send(self, outbox: _Outbox) -> None:
        """Sends what a consumer has room for, as far as it is produced."""
        while outbox.place is not None and outbox.place.number < outbox.until:
            try:
                self._check(outbox.rank, outbox.connection)
            except REFUSALS as error:
                outbox.end(Kind.REFUSED, error)
                break
            found = self._ledger.find(outbox.place)
            if found is None:
                break
            if found is END:
                outbox.end(Kind.END)
            else:
                outbox.send(found)

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

            def give(produced: tuple[Message, int] | None) -> None:  # in the thread
                loop.call_soon_threadsafe(self._take_in, produced)

            await self._in_thread(self._hosted.produce, ledger.front, ledger.lowest, ledger.room, give)

    def _take_in(self, produced: tuple[Message, int] | None) -> None:
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
        except TimeoutError:
            for rank in self._ledger.held_up_by():
                self._leave(rank, f"the others had waited for it for {timeout:g} s")

    async def _until_freed(self, lowest: Place) -> None:
        while self._ledger.lowest == lowest and self._ledger.held_up_by():
            await self._changed.wait()


# For how many seconds batches are produced without a look at what the consumers do.
_AT_ONCE_S = 0.001
# The share of its time that the producer may spend on states of the loader, for the consumers' `state_dict()`.
STATE_SHARE = 0.01


class HostedLoader:
    """The loader of one share.

    Args:
        name: of the share.
        kept_bytes: how many bytes of batches the share keeps, besides those that the loader prefetches.

    Attributes:
        length: batches in an epoch; or why there is no length.
        pinning: its pin_memory and pin_memory_device, which the consumers carry out.
        states: of the loader at some places, or the error in place of one; oldest first. They start with the newest
            that is not after the slowest consumer's place.
    """

    def __init__(self, name: str, kept_bytes: int) -> None:
        self._name, self._kept_bytes = name, kept_bytes
        self.length: int | str = 0
        self.pinning = False, ""
        self.states: dict[Place, Any] = {}
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._copies: Recycled | None = None  # without workers
        self._began = self._spent = 0.0  # time.perf_counter(); seconds spent on states

    def open(self, pipeline: Pipeline) -> bool:
        """Opens the loader; False if that requires the image's contents. Raises the errors of unpickling it."""
        here = pipeline.node_id == session.node_id()
        sys.path[:] = [*pipeline.sys_path, *(entry for entry in sys.path if entry not in pipeline.sys_path)]
        content = ray.get(pipeline.content[0]) if pipeline.content is not None else None
        try:
            opened = open_image(pipeline.image, here=here, content=content)
        except MemoryFileError:
            return False
        self._loader = loader = decode_replica(*opened, pipeline.carried, "loader")
        self.pinning = bool(loader.pin_memory), loader.pin_memory_device
        loader.pin_memory = False  # the consumers pin batches
        self._copies = Recycled() if loader.num_workers == 0 else None
        pipeline.random.restore([])
        try:
            self.length = len(self._loader)
        except TypeError as error:
            self.length = str(error)
        self._began = time.perf_counter()
        self._note_state(Place(0, 0))
        return True

    def begin(self, epoch: int, sampler_epoch: int | None) -> tuple[Message, int] | None:
        """Begins to iterate; returns the error if that fails, in the form of a batch."""
        loader = self._loader
        try:
            if sampler_epoch is not None:
                loader.set_epoch(sampler_epoch)
            self._iterator = iter(loader)
        except Exception as error:  # of the user's objects or the loader: the consumers get it
            self._iterator = iter(())
            return self._as_error(error)
        self._note_state(Place(epoch, 0))
        return None

    def produce(
        self, front: Place, lowest: Place, room: PlacesLeft, give: Callable[[tuple[Message, int] | None], object]
    ) -> None:
        """Gives the consumers' batches from the front on, and the bytes of each; None after the last batch.

        They are one, or as many as fit in `room` if they come at once: meanwhile nothing can be asked of the loader,
        nor does it notice that nobody reads any more.
        """
        until, nbytes = time.perf_counter() + _AT_ONCE_S, 0
        for number in range(front.number, front.number + room.batches):
            found = self._next(Place(front.epoch, number), lowest)
            give(found)
            if found is None or (nbytes := nbytes + found[1]) >= room.nbytes or time.perf_counter() >= until:
                break

    def _next(self, front: Place, lowest: Place) -> tuple[Message, int] | None:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._note_state(Place(front.epoch + 1, 0))
            return None
        except Exception as error:  # of the user's objects or the loader
            found = self._as_error(error)
        else:
            found = self._as_batch(batch)
        if self._spent < STATE_SHARE * (time.perf_counter() - self._began):
            self._note_state(Place(front.epoch, front.number + 1))
        needed = [place for place in self.states if place <= lowest][-1:]
        for place in [place for place in self.states if needed and place < needed[0]]:
            del self.states[place]
        return found

    def _note_state(self, place: Place) -> None:
        began = time.perf_counter()
        try:
            self.states[place] = self._loader.state_dict()
        except Exception as error:  # raised in the consumer that asks for it
            self.states[place] = error if isinstance(error, StateError) else StateError(str(error))
        self._spent += time.perf_counter() - began

    def _as_batch(self, batch: Any) -> tuple[Message, int]:
        try:
            encoded = codec.encode(batch, carry=carried())
        except Exception as error:  # of the user's own pickling
            unpicklable.note_batch(error, batch, functools.partial(codec.encode, carry=carried()))
            return self._as_error(error)
        if self._copies is not None:
            encoded = encoded._replace(buffers=[self._copies.copy(buffer) for buffer in encoded.buffers])
        if encoded.carried:
            return self._as_error(
                TypeError("a batch of a shared loader must not refer to Ray's objects; call ray.get() in collate_fn")
            )
        return packed_content(Kind.BATCH, in_message(encoded), tcp_line.TcpLine.apart), encoded.nbytes

    def _as_error(self, error: Exception) -> tuple[Message, int]:
        if self._loader.num_workers == 0:  # with workers, the traceback is in the text already
            add_note(error, "".join(traceback.format_tb(error.__traceback__)))
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # the pickling of its type may raise anything
            caught = Caught(error, f"in the producer of the share {self._name!r}")
            pickled = pickle.dumps(RuntimeError(caught.text))
        return packed_content(Kind.ERROR, pickled), len(pickled)
