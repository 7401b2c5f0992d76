"""The actor of a share: it iterates over the loader, and hands out references to the batches.

Promise: the batches are those that the loader would have given in the program that shared it. Each is built, encoded
and stored once. An error takes the place of its batch. An item stays in the window until the last consumer has taken
it, and while there are `buffer` of them nothing is produced: no consumer gets further ahead of the slowest. Each call
of a consumer is answered, if need be with the error that says why it gets nothing.

Ray runs the methods on the event loop, which alone touches the window. The loader lives on one further thread.

NOTE [Items]. A consumer takes items (kind, payload, state): the batches of an epoch, and then its end. Of some, for the
consumers' states, `state` is that of the loader before it, or the error in place of one; of an epoch's end it is the
one after it. A consumer at the place (epoch, number) has taken all items of this epoch before that number.

NOTE [Promises]. A consumer that has ended must not be waited for, and one that is slow must not be dropped, however
slow it is. So each brings a promise: the reference to the result of its call of `hold`, which lasts as long as it
reads. Its process owns that reference, and once this is dead, or its node, Ray resolves the reference with an error.
Ray asks the node for that: a process that merely does not answer, in a debugger for instance, is not taken for dead.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import cloudpickle
from ray.exceptions import RayError

from rayloader.actors import session
from rayloader.actors.image import decode_replica, open_image
from rayloader.actors.replica import Source
from rayloader.errors import ShareError, add_note
from rayloader.options import is_whole
from rayloader.protocol import carried
from rayloader.random.random_state import RandomState
from rayloader.transport import codec
from rayloader.transport.lanes import SMALL_BYTES, in_message

logger = logging.getLogger("rayloader")
# After consumers have waited for another one for so many seconds, a line in the log names it.
NOTICE_S = 60.0
# For so long batches are produced before the consumers are given them: a call costs more than a batch.
AT_ONCE_S = 0.02


class Place(NamedTuple):
    """How far a consumer has got; see NOTE [Items]."""

    epoch: int
    number: int


class Item(NamedTuple):
    """See NOTE [Items]."""

    kind: Literal["batch", "stored", "error", "end"]
    # The fields of the batch's `Wire`, or the error, pickled; or a reference to Ray's object with such fields, of
    # several batches, and the index of this one.
    payload: Any
    state: Any


START = Place(0, 0)


@dataclass(slots=True)
class _Reader:
    """A consumer."""

    place: Place = START
    joined: bool = False
    begun: int = -1  # the last epoch that it has begun
    read: object = None  # its newest call of `read`, until that is answered
    gone: str = ""  # why it reads no more


class Producer:
    """The actor of one share.

    Args:
        name: of the share.
        consumers: how many there are.
        buffer: how many items are kept at most.
    """

    def __init__(self, name: str, consumers: int, buffer: int) -> None:
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # such calls are made only in the thread
        self._name, self._buffer = name, buffer
        self._readers = [_Reader() for _ in range(consumers)]
        self._window: dict[Place, Item] = {}  # in order
        self._front = START  # of the next item
        self._sampler_epochs: dict[int, int | None] = {}  # by epoch: what the consumer that began it had set
        self._facts: dict[str, Any] = {}  # of the loader, once it is open
        self._failure = ""  # of this file's own code: then everything stops
        self._changed = asyncio.Event()  # replaced with each change
        self._tasks: list[asyncio.Task[None]] = []  # asyncio does not keep them
        self._thread = ThreadPoolExecutor(1, "rayloader-producer")
        self._loader: Any = None  # this and the next are the thread's
        self._iterator: Iterator[Any] = iter(())

    async def open(self, source: Source, random: RandomState) -> None:
        """For the owner: opens the loader, with the program's global generators."""
        self._facts = await self._in_thread(self._open, source, random)
        self._tasks.append(asyncio.create_task(self._produce()))
        self._tell()

    # ---- for the consumers

    async def join(self, rank: int, promise: list[Any]) -> dict[str, Any]:
        """Makes the caller this consumer, once the loader is open."""
        if not is_whole(rank) or not 0 <= rank < len(self._readers):
            raise ValueError(f"rank must be a whole number from 0 to {len(self._readers) - 1}, got {rank!r}")
        await self._until(lambda: self._facts)
        reader = self._readers[rank]
        if reader.joined:
            state = f"reads no more: {reader.gone}" if reader.gone else "is another object or process"
            raise ShareError(f"consumer {rank} of the share {self._name!r} {state}; each can join once, for all epochs")
        reader.joined = True
        self._tasks.append(asyncio.create_task(self._watch(rank, promise[0])))
        return {"consumers": len(self._readers), "buffer": self._buffer, **self._facts}

    async def hold(self, rank: int) -> None:
        """Lasts until this consumer reads no more; see NOTE [Promises]."""
        await self._until(lambda: self._readers[rank].gone)

    async def read(self, rank: int, place: tuple[int, int], first: int, sampler_epoch: int | None) -> dict[int, Item]:
        """A consumer has got to this place, and asks for the items of its epoch from number `first` on.

        Returns:
            What there is of them, by number, as soon as there is one; nothing if the consumer has asked anew meanwhile.
        """
        reader, call, wanted = self._readers[rank], object(), Place(place[0], first)
        begun_with = self._sampler_epochs.setdefault(wanted.epoch, sampler_epoch)
        if sampler_epoch not in (None, begun_with):
            raise ValueError(
                f"set_epoch({sampler_epoch}) differs from what the consumer that began this epoch had set, which is "
                f"{begun_with}; call set_epoch with the same number in all consumers, before each epoch"
            )
        reader.begun, reader.read = wanted.epoch, call
        await self.reach(rank, place)
        await self._until(lambda: reader.read is not call or wanted in self._window or reader.gone or self._failure)
        if reader.gone:
            raise ShareError(f"consumer {rank} of the share {self._name!r} reads no more: {reader.gone}")
        if self._failure:
            raise ShareError(f"the producer of the share {self._name!r} has failed:\n{self._failure}")
        if reader.read is not call:
            return {}
        reader.read = None
        return {at.number: item for at, item in self._window.items() if at >= wanted and at.epoch == wanted.epoch}

    async def reach(self, rank: int, place: tuple[int, int]) -> None:
        """A consumer has got to this place."""
        self._readers[rank].place = max(self._readers[rank].place, Place(*place))
        self._forget()

    async def leave(self, rank: int, why: str) -> None:
        """A consumer reads no more, and the others do not wait for it."""
        self._readers[rank].gone = self._readers[rank].gone or why
        self._forget()

    async def _watch(self, rank: int, promise: Any) -> None:
        try:
            await promise
        except RayError:
            logger.info("rayloader: the process of consumer %d of the share %r has ended", rank, self._name)
            await self.leave(rank, "its process has ended")

    # ---- the window

    def _lowest(self) -> Place:
        """The place of the slowest consumer."""
        return min((reader.place for reader in self._readers if not reader.gone), default=self._front)

    def _forget(self) -> None:
        """Drops what all consumers have taken, and wakes whoever waits."""
        for place in [place for place in self._window if place < self._lowest()]:
            del self._window[place]
        self._tell()

    def _is_wanted(self) -> bool:
        """Whether the next item may be produced, or all consumers have broken off its epoch."""
        begun = any(reader.begun >= self._front.epoch and not reader.gone for reader in self._readers)
        return begun and (len(self._window) < self._buffer or self._lowest().epoch > self._front.epoch)

    async def _produce(self) -> None:
        try:
            while True:
                await self._wait()
                epoch, number = self._front
                if self._lowest().epoch > epoch:  # all have broken it off
                    self._front = Place(epoch + 1, 0)
                    continue
                room = self._buffer - len(self._window)
                for item in await self._in_thread(self._some, number, room, self._sampler_epochs[epoch]):
                    self._window[self._front] = item
                    self._front = Place(epoch + 1, 0) if item.kind == "end" else Place(epoch, self._front.number + 1)
                self._forget()
        except BaseException:  # otherwise the consumers would wait for ever
            self._failure = traceback.format_exc()
            self._tell()
            raise

    async def _wait(self) -> None:
        """Waits until something is wanted; names those that the others wait for."""
        while not self._is_wanted():
            try:
                await asyncio.wait_for(self._until(self._is_wanted), NOTICE_S)
            except TimeoutError:
                if any(reader.read and reader.place >= self._front and not reader.gone for reader in self._readers):
                    logger.warning(
                        "rayloader: a consumer of the share %r has waited for %.0f s: consumer(s) %s must first take "
                        "their batches. If one of these has not joined and never will: "
                        "rayloader.shared(name, rank).close()",
                        self._name,
                        NOTICE_S,
                        [
                            rank
                            for rank, one in enumerate(self._readers)
                            if not one.gone and one.place == self._lowest()
                        ],
                    )

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, holds: Callable[[], object]) -> None:
        while not holds():
            await self._changed.wait()

    # ---- in the thread

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _open(self, source: Source, random: RandomState) -> dict[str, Any]:
        sys.path[:] = [*source.sys_path, *(entry for entry in sys.path if entry not in source.sys_path)]
        content = session.imported().get(source.content[0]) if source.content else None
        opened = open_image(source.image, here=source.node_id == session.node_id(), content=content)
        self._loader = loader = decode_replica(*opened, source.carried, "loader")
        pinning = {"pin_memory": loader.pin_memory, "pin_memory_device": loader.pin_memory_device}
        loader.pin_memory = False  # the consumers do it
        random.restore([])
        try:
            length: int | str = len(loader)
        except TypeError as error:
            length = str(error)
        return {"length": length, "pinning": pinning, "state": self._state()}

    def _some(self, number: int, room: int, sampler_epoch: int | None) -> list[Item]:
        """The next items of the epoch: one, or as many as come at once, up to half of what is kept.

        Their large batches are one object of Ray's, which costs little more than if there were one.
        """
        until, items = time.monotonic() + AT_ONCE_S, [self._next(number, sampler_epoch)]
        # Without workers the dataset may write to the memory of a batch as soon as it is asked for the next.
        most = min(room, self._buffer // 2) if self._loader.num_workers else 1
        while len(items) < most and items[-1].kind != "end" and time.monotonic() < until:
            items.append(self._next(number + len(items), sampler_epoch))
        if large := [item.payload for item in items if item.kind == "stored"]:
            ref, indices = session.imported().put(large), itertools.count()
            items = [one._replace(payload=(ref, next(indices))) if one.kind == "stored" else one for one in items]
        return items

    def _next(self, number: int, sampler_epoch: int | None) -> Item:
        """The next item of the epoch, which begins with number 0."""
        state = None
        try:
            if number == 0:
                self._iterator = iter(())  # all that there is if this fails
                if sampler_epoch is not None:
                    self._loader.set_epoch(sampler_epoch)
                self._iterator = iter(self._loader)
            if number % self._buffer == 0:
                state = self._state()
            encoded = codec.encode(next(self._iterator), carry=carried())
        except StopIteration:
            return Item("end", None, self._state())
        except Exception as error:  # of the user's objects or the loader
            state = self._state() if number == 0 and state is None else state
            return Item("error", self._pickled(error), state)
        if encoded.carried or encoded.nbytes > SMALL_BYTES:
            return Item("stored", in_message(encoded), state)
        return Item("batch", pickle.dumps(in_message(encoded), pickle.HIGHEST_PROTOCOL), state)

    def _state(self) -> Any:
        try:
            return self._loader.state_dict()
        except Exception as error:  # of the user's objects or the loader: for a consumer that asks for a state
            return error

    def _pickled(self, error: Exception) -> bytes:
        if self._loader.num_workers == 0:  # with workers, the traceback is in the text already
            add_note(error, "".join(traceback.format_tb(error.__traceback__)))
        try:
            pickled: bytes = cloudpickle.dumps(error)
            pickle.loads(pickled)
            return pickled
        except Exception:  # the pickling of its type may raise anything
            return pickle.dumps(RuntimeError(f"Caught {type(error).__name__} in the producer of a share: {error}"))
