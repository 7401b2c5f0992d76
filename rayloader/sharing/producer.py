"""The process that hosts a shared loader: produces each batch once, and gives it to every consumer.

Promise: what is produced when, and what is kept, the ledger decides. The batches are those that the loader would have
given where it was shared. A large batch is put into Ray's object store once, from where all consumers of a node copy
it; a small one travels with each reply. An error of the loader's takes the place of its batch.

Threads: Ray runs the methods on the event loop, which alone touches the ledger. The loader lives on one further thread,
`rayloader-producer`: in it `_open`, `_begin_epoch` and `_next_batch` run, one at a time.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import cloudpickle
import ray

from rayloader import session
from rayloader.errors import ConsumerDroppedError, ShareError, StateError, add_note
from rayloader.protocol import CARRY
from rayloader.replica.opening import open_image
from rayloader.sharing.ledger import End, Ledger, Passed, Place, Step
from rayloader.sharing.messages import Connection, Kind, Pipeline, Reply, Terms
from rayloader.state.process_state import Baseline
from rayloader.transport import codec
from rayloader.transport.lanes import fits_in_band, to_wire
from rayloader.transport.memory_file import MemoryFileError

# Batches up to so many bytes travel with each consumer's reply, which Ray then keeps out of its object store.
INLINE_BYTES = 50_000
# The share of its time that the producer may spend on states of the loader, for the consumers' `state_dict()`.
STATE_SHARE = 0.01

_T = TypeVar("_T")


class Producer:
    """The actor of one share."""

    def __init__(self, terms: Terms) -> None:
        # Blocking calls are made in the thread alone, which Ray does not see.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        self._terms = terms
        self._share = uuid.uuid4().hex
        self._ledger = Ledger(terms.consumers, terms.buffer, terms.buffer_bytes)
        self._connections = [0] * terms.consumers  # number of the newest
        self._sampler_epochs: dict[int, int | None] = {}  # by epoch: what the first consumer had set
        self._changed = asyncio.Event()  # replaced with each change
        self._failure: BaseException | None = None  # of this file's own code: nothing goes on
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # produces
        self._thread = ThreadPoolExecutor(1, "rayloader-producer")
        self._length: int | str = 0
        self._pinning = False, ""  # the loader's pin_memory and pin_memory_device
        # Only in the thread.
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._states: dict[Place, Any] = {}  # of the loader, or the error in place of one; oldest first
        self._began = self._spent = 0.0  # seconds: time.perf_counter(); on states

    # ---- for the owner

    async def open(self, pipeline: Pipeline) -> bool:
        """Opens the loader; False if that takes the image's contents. Raises what unpickling it raises."""
        if not await self._in_thread(self._open, pipeline):
            return False
        self._task = asyncio.get_running_loop().create_task(self._produce())
        self._opened.set()
        return True

    # ---- for the consumers

    async def connect(self, rank: int) -> Reply:
        """Makes the caller this consumer, in place of whoever was it; waits until the loader is open."""
        await self._opened.wait()
        if not 0 <= rank < self._terms.consumers:
            number = self._terms.consumers
            text = f"rank must be a whole number from 0 to {number - 1}, got {rank}: this share has {number} consumers"
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
            self._length,
            *self._pinning,
            self._terms.origin,
        )
        return self._done(tuple(connection))

    async def begin(self, rank: int, connection: int, epoch: int, taken: int, sampler_epoch: int | None) -> Reply:
        """The consumer iterates from this place on. What it has set for the sampler must be what the others have."""
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
        self._tell()
        return self._done()

    async def take(self, rank: int, connection: int, epoch: int, taken: int, wanted: int) -> Reply:
        """The consumer has taken so many batches of the epoch; waits for the one that it wants."""
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
                kind, payload = found
                return Reply(kind, payload, self._ledger.gone())
            await self._changed.wait()
        return refusal

    async def held_up_by(self) -> list[int]:
        """The consumers that the others wait for."""
        return self._ledger.held_up_by()

    async def state(self, rank: int, connection: int, epoch: int, taken: int) -> Reply:
        """The newest state of the loader from before a place of the consumer's, and how many batches lie in between.

        With it comes that place, as `Ledger.place_of` has it.
        """
        while (refusal := self._refusal(rank, connection)) is None:
            self._ledger.reach(rank, Place(epoch, taken))
            place = self._ledger.place_of(rank)
            states = await self._in_thread(lambda: dict(self._states))
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
        """The consumer goes on at this place."""
        if (refusal := self._refusal(rank, connection)) is not None:
            return refusal
        try:
            self._ledger.seek(rank, Place(epoch, taken))
        except Passed:
            return Reply(
                Kind.REFUSED,
                StateError(
                    f"the state is of batch {taken} of epoch {epoch}, which all consumers have taken and the producer "
                    "does not keep any more; to go back that far, load the state's entry 'loader' into the loader and "
                    "share it again"
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
        """Why the consumer gets nothing."""
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

    # ---- producing

    def _tell(self) -> None:
        """Something has changed: wakes all who wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _produce(self) -> None:
        try:
            while True:
                await self._go_on()
                self._tell()
        except BaseException as error:  # else the consumers would wait for ever
            self._failure = error
            self._tell()
            raise

    async def _go_on(self) -> None:
        """Does what is due, or waits until something is."""
        ledger = self._ledger
        step = ledger.step()
        if step is Step.WAIT:
            await self._wait()
            return
        epoch = ledger.front.epoch + 1
        if step is Step.BEGIN:
            ledger.begin()
            for past in [past for past in self._sampler_epochs if past < ledger.lowest.epoch]:
                del self._sampler_epochs[past]
            found = await self._in_thread(self._begin_epoch, epoch, self._sampler_epochs.get(epoch))
        else:
            found = await self._in_thread(self._next_batch, ledger.front, ledger.lowest)
        if found is not None:
            ledger.add(*found)
        if found is None if step is Step.PRODUCE else found is not None:  # the last; or `iter()` has raised
            ledger.end()

    async def _wait(self) -> None:
        """Until something changes; drops those consumers that have been waited for too long."""
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

    # ---- in the thread

    def _open(self, pipeline: Pipeline) -> bool:
        own = {key for key in os.environ if key.startswith("RAY_")}
        here = pipeline.process.node_id == session.node_id()
        Baseline(session.node_id(), own).adopt(pipeline.process)
        contents = ray.get(pipeline.contents[0]) if pipeline.contents is not None else None
        try:
            opened = open_image(pipeline.image, here=here, contents=contents)
        except MemoryFileError:
            return False
        self._loader = loader = codec.decode(*opened, pipeline.carried)
        self._pinning = bool(loader.pin_memory), loader.pin_memory_device
        loader.pin_memory = False  # the consumers do it
        pipeline.random.restore([])
        try:
            self._length = len(self._loader)
        except TypeError as error:
            self._length = str(error)
        self._began = time.perf_counter()
        self._note_state(Place(0, 0))
        return True

    def _begin_epoch(self, epoch: int, sampler_epoch: int | None) -> tuple[Any, int] | None:
        """Begins to iterate; the error that came of it, as for a batch."""
        loader = self._loader
        if sampler_epoch is not None:
            for part in (loader.batch_sampler, loader.sampler, loader.dataset):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(sampler_epoch)
        try:
            self._iterator = iter(loader)
        except Exception as error:  # what the user's objects raise, or the loader: it is the consumers'
            self._iterator = iter(())
            return self._as_error(error)
        self._note_state(Place(epoch, 0))
        return None

    def _next_batch(self, front: Place, lowest: Place) -> tuple[Any, int] | None:
        """What the consumers get at the front, and its bytes; None behind the last batch."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._note_state(Place(front.epoch + 1, 0))
            return None
        except Exception as error:  # as above
            found = self._as_error(error)
        else:
            found = self._as_batch(batch)
        if self._spent < STATE_SHARE * (time.perf_counter() - self._began):
            self._note_state(Place(front.epoch, front.number + 1))
        needed = [place for place in self._states if place <= lowest][-1:]
        for place in [place for place in self._states if needed and place < needed[0]]:
            del self._states[place]
        return found

    def _note_state(self, place: Place) -> None:
        began = time.perf_counter()
        try:
            self._states[place] = self._loader.state_dict()
        except Exception as error:  # it is told to who asks
            self._states[place] = error if isinstance(error, StateError) else StateError(str(error))
        self._spent += time.perf_counter() - began

    def _as_batch(self, batch: Any) -> tuple[Any, int]:
        try:
            encoded = codec.encode(batch, carry=CARRY)
        except Exception as error:  # the user's own pickling
            return self._as_error(error)
        wire = to_wire(encoded)
        if fits_in_band(wire, INLINE_BYTES):
            return (Kind.INLINE, pickle.dumps(wire, pickle.HIGHEST_PROTOCOL)), encoded.nbytes
        return (Kind.STORED, [ray.put(wire)]), encoded.nbytes

    def _as_error(self, error: Exception) -> tuple[Any, int]:
        if self._loader.num_workers == 0:  # workers have put the traceback into the text
            add_note(error, "".join(traceback.format_tb(error.__traceback__)))
        text = f"Caught {type(error).__name__} in the producer of the share {self._terms.name!r}: {error}"
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # its type's own pickling may raise anything
            pickled = pickle.dumps(RuntimeError(text))
        return (Kind.ERROR, pickled), len(pickled)
