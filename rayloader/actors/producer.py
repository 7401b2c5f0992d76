"""The actor of a share: it iterates over the loader, and hands out references to the batches. And the calls to it.

Promise: the batches are those that the loader would have given in the program that shared it. Each is built, encoded
and stored once, in Ray's object store. An error takes the place of its batch. If this file's own code fails, the
process ends: otherwise the consumers would wait for ever.

Threads: Ray runs the actor's methods on the event loop, which alone touches the window. The loader lives on one further
thread, `rayloader-producer`.

NOTE [Items]. The items of an epoch are its batches and then its end, and each has its `Place`. A consumer at a place
has taken all items before it; at GONE it was dropped. The front is the place of the next item to be stored.

NOTE [Bundles]. What one batch costs of Ray, a hundred of its size would: some milliseconds of CPU for a call, a
reference and an object. So items that come at once are a bundle, at most half as many as may be kept. The next ones are
made as soon as there is room for so many. No item waits for another one longer than AT_ONCE_S: a dataset may wait for
the trainer. A bundle is kept until all consumers have taken all of it, so the fastest may be at least half a window
ahead of the slowest, and never more than one.

NOTE [Leaving]. A consumer leaves when it is closed or nothing refers to it any more, and some time after the end of its
process: until then another one may join in its place. A consumer that has left is not waited for, and cannot come back.
None must be dropped because it is slow, however slow it is. So each brings a promise: the reference to its call of
`hold`, which never ends. Ray answers that with an error once the process or the node that has made the call is dead,
and asks the node for that: a process that only does not answer, in a debugger for instance, is not taken for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import length_hint
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typing_extensions import override

from rayloader.actors import session
from rayloader.actors.actor import RayAnswer, on_completed, wait_for
from rayloader.actors.image import Contents, Image, Source, decode_replica, encode, module_folders, open_image
from rayloader.errors import RaySessionError, ShareError, StateError
from rayloader.protocol import Caught, carried
from rayloader.random.generators import RandomState
from rayloader.transport import codec, raw
from rayloader.transport.lanes import in_message

logger = logging.getLogger("rayloader")
_NAMESPACE = "rayloader-shares"  # independent of those of the programs that meet in one Ray
_MOST_CALLS = 1 << 20  # that the producer answers at once; Ray's default is 1000
_FOR_EVER_S = 1e9  # a lock takes no infinite time
# For so many seconds items are collected before they are stored; see NOTE [Bundles].
AT_ONCE_S = 0.02


class Place(NamedTuple):
    """The place before an item; see NOTE [Items]."""

    epoch: int
    number: int


GONE = Place(sys.maxsize, 0)


class Terms(NamedTuple):
    """How a loader is shared."""

    name: str
    consumers: int
    buffer: int  # items
    restart_timeout: float  # seconds for which the others wait for a consumer whose process has ended
    behind: int  # so many items of the first epoch precede the consumers' first one
    place: tuple[int, int]  # of that


@dataclass(slots=True)
class _Reader:
    """A consumer."""

    place: Place
    connection: int = 0  # counts those that have joined as this consumer: only the last one reads


class Producer:
    """The actor of one share."""

    def __init__(self, terms: Terms, source: Source, rng: RandomState) -> None:
        # Blocking calls are made only in the thread, which Ray does not see.
        os.environ["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"
        sys.path[:] = [*source.sys_path, *(entry for entry in sys.path if entry not in source.sys_path)]
        self._loader: Any = decode_replica(*open_image(source.image), source.carried, "loader")
        rng.restore([])
        self._terms, self._half = terms, terms.buffer // 2 or 1
        self._readers = [_Reader(Place(*terms.place)) for _ in range(terms.consumers)]
        self._front = Place(terms.place[0], terms.place[1] - terms.behind)
        # Bundles, in order: by their first place, the next one, and the reference.
        self._window: dict[Place, tuple[Place, Any]] = {}
        self._fresh: list[Any] = []  # items to be stored, from the front on
        self._begun: dict[int, int | None] = {}  # epochs, and what the consumer that began one gave to `set_epoch`
        self._changed = asyncio.Event()  # replaced with each change
        self._thread = ThreadPoolExecutor(1, "rayloader-producer")
        self._epoch, self._items = -1, iter(())  # of the thread
        self._noted = self._front.number, self._state()  # the loader's state before that item
        self._known = terms.consumers, length_hint(self._loader, -1), terms.place, self._noted

    async def start(self) -> None:
        """For the owner: the loader is open, and will be iterated."""
        self._producing = asyncio.create_task(self._produce())
        self._producing.add_done_callback(_end_process)

    # ---- for the consumers

    async def hold(self) -> None:
        """Never ends; see NOTE [Leaving]."""
        await asyncio.Event().wait()

    async def join(self, rank: int, promise: list[Any]) -> tuple[Any, ...]:
        """Makes the caller this consumer, in place of the last one; returns what it must know of the share."""
        if rank not in range(len(self._readers)):
            raise ValueError(f"rank must be a whole number from 0 to {len(self._readers) - 1}, got {rank!r}")
        reader, loop = self._readers[rank], asyncio.get_running_loop()
        if reader.place == GONE:
            raise ShareError(f"consumer {rank} of this share has left; share the loader again, with state=")
        reader.connection += 1
        # Ray needs the promise until it has told of its end.
        left = functools.partial(self._left, reader, reader.connection, promise)
        later = functools.partial(loop.call_later, self._terms.restart_timeout, left)

        def ended(_: object) -> None:  # in one of Ray's threads
            loop.call_soon_threadsafe(later)

        on_completed(promise[0], ended)
        return *self._known, reader.place, reader.connection

    async def read(self, rank: int, connection: int, place: Place, number: int, set_to: int | None) -> list[Any]:
        """A consumer has got to a place, and asks for the items of that epoch from a number on.

        Returns:
            A reference to the bundle: a state of the loader, with its number; the number of the first item; and the
            items, each the fields of a `Wire`, or a state for the end.
        """
        at = Place(place[0], number)
        if set_to not in (None, begun := self._begun.setdefault(at.epoch, set_to)):
            raise ValueError(f"set_epoch({set_to}) differs from another consumer's, {begun}; give all the same number")
        await self.reach(rank, connection, place)
        while at >= self._front and at >= self._readers[rank].place:
            await self._changed.wait()
        for begin, (end, ref) in self._window.items():
            if begin <= at < end:
                return [await ref]
        raise ShareError(f"batch {number} of epoch {at.epoch} is no longer kept; call iter() again")

    async def reach(self, rank: int, connection: int, place: Place) -> None:
        """A consumer has got to a place."""
        reader = self._reader(rank, connection)
        reader.place = max(reader.place, Place(*place))
        self._tell()

    async def leave(self, rank: int, connection: int) -> None:
        """The consumer needs no more batches."""
        self._left(self._readers[rank], connection)

    def _left(self, reader: _Reader, connection: int, *_: object) -> None:
        if reader.connection == connection and reader.place != GONE:  # otherwise another one has joined in its place
            logger.warning(
                "rayloader: consumer %d of the share %r has left", self._readers.index(reader), self._terms.name
            )
            reader.place = GONE
            self._tell()

    def _reader(self, rank: int, connection: int) -> _Reader:
        reader = self._readers[rank]
        if reader.connection != connection or reader.place == GONE:
            raise ShareError(f"consumer {rank} of this share was closed, or another one has joined with its rank")
        return reader

    # ---- producing

    def _is_wanted(self) -> bool:
        kept = sum(end.number - begin.number for begin, (end, _) in self._window.items())
        return self._front.epoch in self._begun and self._terms.buffer - kept >= self._half

    def _tell(self) -> None:
        """Something has changed: drops what is not needed, and wakes whoever waits."""
        slowest = min(reader.place for reader in self._readers)
        self._window = {begin: bundle for begin, bundle in self._window.items() if bundle[0] > slowest}
        self._begun = {epoch: set_to for epoch, set_to in self._begun.items() if epoch >= slowest.epoch}
        if self._front.epoch < slowest.epoch < GONE.epoch:  # all have broken the epoch off
            self._front = Place(slowest.epoch, 0)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _produce(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._is_wanted():
                await self._changed.wait()
            at = self._front
            work = loop.run_in_executor(self._thread, self._make, at, self._begun[at.epoch])
            while not work.done():
                await asyncio.wait([work], timeout=AT_ONCE_S)
                self._store(at.epoch)
            work.result()

    def _store(self, epoch: int) -> None:
        begin, items = self._front, [*self._fresh]
        del self._fresh[: len(items)]
        if items and begin.epoch == epoch:  # otherwise all have broken it off meanwhile
            end = Place(epoch, begin.number + len(items))
            put = asyncio.get_running_loop().run_in_executor(None, ray.put, (self._noted, begin.number, items))
            self._window[begin] = end, put
            self._front = Place(epoch + 1, 0) if type(items[-1]) is bytes else end
            self._tell()

    # ---- in the thread

    def _make(self, at: Place, set_to: int | None) -> None:
        """Makes the next items, as many as a bundle may have, up to the end of the epoch."""
        if at.epoch != self._epoch:
            self._epoch = at.epoch
            try:
                if set_to is not None:
                    self._loader.set_epoch(set_to)
                self._items = iter(self._loader)
            except Exception as error:  # of the user's objects or the loader: it is all that the epoch has
                self._items = map(_raise, [error])
        self._noted = at.number, self._state()
        item: Any = None
        for _ in range(self._half):
            try:
                item = self._encoded(next(self._items))
            except StopIteration:
                item = self._state()
            except Exception as error:  # as above, and of the user's own pickling
                caught = Caught(error, f"in the share {self._terms.name!r}")
                caught.drop_types(self._encoded)
                item = self._encoded(caught)
            self._fresh.append(item)
            if type(item) is bytes:
                break

    def _state(self) -> bytes:
        """The loader's state; an error in its place is raised in the consumer that asks for it."""
        try:
            return pickle.dumps(self._loader.state_dict())
        except Exception as error:
            return pickle.dumps(StateError(str(error)))

    def _encoded(self, batch: Any) -> tuple[Any, ...]:
        encoded = codec.encode(batch, carry=carried())
        if not self._loader.num_workers:  # the dataset may write to that memory when it is asked for the next batch
            encoded = encoded._replace(buffers=[raw.copied(buffer) for buffer in encoded.buffers])
        return in_message(encoded)


def _raise(error: Exception) -> Any:
    raise error


def _end_process(task: asyncio.Task[None]) -> None:
    task.print_stack()
    os._exit(1)


# ---- the calls


class Bundle(RayAnswer):
    """A bundle that was asked for: it is brought to this node at once, before the user needs it.

    Args:
        ref: of the call of `Producer.read`.
        tell: called when it has come.
    """

    @override
    def _note(self, value: Any) -> None:  # in one of Ray's threads
        if isinstance(value, list):
            super().__init__(value[0], self._tell)
        else:
            super()._note(value)


class Calls:
    """The calls of one process to a producer.

    Args:
        producer: the actor.
        name: of the share.
    """

    bundle = Bundle

    def __init__(self, producer: Any, name: str) -> None:
        self._session, self._pid = session.ensure(), os.getpid()
        self.producer, self.name = producer, name

    def check(self) -> None:
        """Raises RaySessionError if Ray may not be called: this is another process, or session."""
        if os.getpid() != self._pid or session.current() != self._session:
            raise RaySessionError(f"the share {self.name!r} is of another process, or of a Ray that was shut down")

    def begin(self, method: str, *arguments: Any) -> Any:
        """Makes a call; returns the reference to its answer."""
        self.check()
        return getattr(self.producer, method).remote(*arguments)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What the producer answers to a call; raises as `checked` does."""
        return self.checked(wait_for([self.begin(method, *arguments)], _FOR_EVER_S)[0])

    def checked(self, answer: Any) -> Any:
        """An answer, unless it is an error.

        Raises:
            Exception: the call has raised it.
            ShareError: the producer is gone.
        """
        if isinstance(answer, RayTaskError):
            raise (answer.cause if isinstance(answer.cause, Exception) else answer) from None
        if isinstance(answer, Exception):
            raise ShareError(f"the producer of the share {self.name!r} is gone; Ray said: {answer}") from answer
        return answer

    def leave(self, *consumer: int) -> None:
        """A consumer needs nothing more."""
        with contextlib.suppress(RaySessionError):
            self.begin("leave", *consumer)

    def end(self) -> None:
        """Ends the producer, and with it the workers of its loader."""
        with contextlib.suppress(RaySessionError):
            self.check()
            ray.kill(self.producer)


def start(loader: Any, terms: Terms) -> Calls:
    """Starts the producer of a loader, on this node, where it opens what the program has written into memory files.

    Raises:
        ShareError: there is a share with that name, or the loader can't be unpickled there.
        Exception: pickling the loader raises it.
    """
    if find(terms.name) is not None:
        raise ShareError(f"there is a share {terms.name!r} in this Ray already; close it, or choose another name")
    encoded = encode(loader, {"loader": vars(loader)}, "the producer")
    image = Image.write(Contents(encoded))  # lives until the loader is open
    source = Source(session.node_id(), module_folders(), image.address, list(encoded.carried))
    here = NodeAffinitySchedulingStrategy(session.node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "enable_task_events": False, "max_concurrency": _MOST_CALLS}
    actor: Any = ray.remote(Producer).options(name=terms.name, namespace=_NAMESPACE, **options)
    calls = Calls(actor.remote(terms, source, RandomState.capture([])), terms.name)
    calls.ask("start")
    return calls


def find(name: str) -> Calls | None:
    """The producer of that name, if there is one in this Ray, which is joined or started."""
    session.ensure()
    with contextlib.suppress(ValueError):
        return Calls(ray.get_actor(name, _NAMESPACE), name)
    return None
