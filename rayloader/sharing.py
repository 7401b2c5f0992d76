"""`share` and `shared`: one pipeline for many consumers.

Promise: a producer ends with the process that started it, with `close` of its share, and with `rayloader.shutdown()`.
Each batch is its consumer's own, and marked as taken in the very last step of `next`, see NOTE [interrupts]. Ray is
imported when a loader is shared or a share is read, not before, and it is not called once its session is gone (NOTE
[sessions] in session.py), nor in a forked process.

Threads: Ray's note what comes while the user's trains; that does everything else.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from rayloader.errors import ShareError, StateError
from rayloader.host.shard_info import ranks_told
from rayloader.interrupts import TICK_S, Bell
from rayloader.loader import DataLoader
from rayloader.options import check_means, check_name, check_whole
from rayloader.protocol import NONE_YET, Caught
from rayloader.transport.lanes import Recycled, Wire, from_wire, owned

_FORMAT = "rayloader.Consumer"
# A consumer tells the producer what it has taken when it begins a bundle, and with a batch after so many seconds.
TOLD_S = 0.02


def share(
    loader: DataLoader[Any],
    *,
    consumers: int,
    name: str | None = None,
    buffer: int = 32,
    restart_timeout: float = 60.0,
    state: Any = None,
) -> SharedLoader:
    """Moves a loader to a process of its own, the producer, where each batch is produced once for several consumers.

    The batches are those that the loader would give here, if it were iterated from now on. The loader given is not
    affected. Ray is joined or started as by a loader with workers. The share lives until `SharedLoader.close`,
    `rayloader.shutdown()` or the end of this process.

    Args:
        loader: with or without workers. A state that was loaded into it is used.
        consumers: how many read it: each of them, with ranks from 0, reads every batch. Each is waited for from the
            first batch on, until it leaves.
        name: for `shared`, unique in this Ray; by default only the returned object leads to the share.
        buffer: how many batches to keep for consumers that have not taken them yet. The fastest consumer may be at
            most this many ahead of the slowest, over all epochs, and at least half as many.
        restart_timeout: for how many seconds the others wait for a consumer whose process has ended, so that one that
            is started again can join in its place.
        state: of a consumer of an earlier share of this loader: all begin there.

    Raises:
        ShareError: there is a share with that name already, or the producer can't open the loader.
        StateError: the state does not fit the loader.
        ValueError: an argument is out of range.
        TypeError: an argument is of the wrong type.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"share() takes a rayloader.DataLoader, got {type(loader).__qualname__}; create one")
    check_whole("consumers", consumers, 1)
    check_whole("buffer", buffer, 1)
    if loader.device is not None or loader.pin_memory:
        raise ValueError("share() takes a loader without device and pin_memory; move the batches in each consumer")
    if isinstance(loader.dataset, IterableDataset) and ranks_told(loader) is None:
        raise ValueError("share() needs num_replicas and rank in the loader of a stream: the producer is no rank")
    check_name(name := f"unnamed-{uuid.uuid4().hex}" if name is None else name)
    check_means("share()")
    from rayloader.actors import producer

    loader = copy.copy(loader)
    loader._iterator = None  # of persistent workers, which belong to this process
    place, behind = (0, 0), 0
    if state is not None:
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise StateError("this is not a state of a rayloader.Consumer; a loader's own state is for the loader")
        place, behind = (state["epoch"], state["taken"]), state["behind"]
        loader.load_state_dict(state["loader"])
    calls = producer.start(loader, producer.Terms(name, consumers, buffer, restart_timeout, behind, place))
    _owned[owner := SharedLoader(name, consumers, calls.producer)] = calls
    return owner


def shared(name: str, rank: int, *, timeout: float = 60.0) -> Consumer:
    """Connects to a share by its name, from any process of the same Ray.

    Args:
        name: as given to `share`.
        rank: which of its consumers this is, from 0.
        timeout: seconds to wait for a share of that name.

    Raises:
        ShareError: there is none, or this consumer has left.
        ValueError: the share has fewer consumers.
    """
    check_name(name)
    check_means("shared()")
    from rayloader.actors import producer

    until = time.monotonic() + timeout
    while (found := producer.find(name)) is None and time.monotonic() < until:
        time.sleep(0.2)  # there may be one soon
    if found is None:
        raise ShareError(f"there is no share {name!r} in this Ray within {timeout:g} s; see RAY_ADDRESS")
    return Consumer(found, rank)


class SharedLoader(contextlib.AbstractContextManager["SharedLoader"]):
    """A loader that is shared; created by `share`. It may be passed to Ray's tasks and actors.

    Attributes:
        name: by which `shared` finds it.
        consumers: how many it has.
    """

    def __init__(self, name: str, consumers: int, producer: Any) -> None:
        self.name, self.consumers, self._producer = name, consumers, producer

    def consumer(self, rank: int) -> Consumer:
        """Connects to the share as one of its consumers, numbered from 0.

        Raises:
            ShareError: the share has ended, or this consumer has left.
            ValueError: the share has no consumer with this rank.
        """
        from rayloader.actors.producer import Calls

        return Consumer(Calls(self._producer, self.name), rank)

    def __repr__(self) -> str:
        return f"<rayloader.SharedLoader {self.name!r} for {self.consumers} consumers>"

    def close(self) -> None:
        """Ends the share, in the process that created it; elsewhere this has no effect. May be called again."""
        if (calls := _owned.pop(self, None)) is not None:
            calls.end()

    def __exit__(self, *_: object) -> None:
        self.close()


_owned: dict[SharedLoader, Any] = {}  # of this process, with the calls to the producer


def close_all() -> None:
    """Ends the shares that this process has started."""
    for one in list(_owned):
        one.close()


class Consumer(contextlib.AbstractContextManager["Consumer"]):
    """One reader of a shared loader; created by `SharedLoader.consumer` and `shared`.

    It is iterated like a loader: each `iter()` begins its next epoch, even if the last one was broken off. But if no
    batch was taken from the last iterator, the epoch is the same: some frameworks make an iterator only to look at it.
    A new epoch is produced when the first consumer begins it, after the previous one was produced to its end or broken
    off by all. Each batch is this consumer's own, and may be written to.

    Keep the object for all epochs: the others do not wait for it any more, and it can't be joined again, once it was
    closed, its `with` block has ended, or nothing refers to it and its iterator. If its process has ended, a new one
    with the same rank may join in its place. It goes on after the last batch that the old one had taken, in the same
    epoch at its first `iter()`. If the process was killed, the batches that it had taken in its last 20 ms may come
    again.

    Attributes:
        name: of the share.
        rank: of this consumer, from 0.
        consumers: how many the share has.
        epoch: the current epoch of this consumer; after the last batch of an epoch, the next one.
    """

    def __init__(self, calls: Any, rank: int) -> None:
        from rayloader.workers.janitor import janitor  # not at the top: share() must say so where there are no forks

        self._calls, self.name, self.rank = calls, calls.name, rank
        joined = calls.ask("join", rank, [calls.begin("hold")])
        self.consumers, self._length, start, state, place, connection = joined
        self._me = rank, connection
        self._memory, self._bell = Recycled(), Bell()
        janitor.start()
        # The producer itself sees the end of this process.
        weakref.finalize(self, janitor.later, lambda: calls.leave(rank, connection)).atexit = False
        self._set_to: int | None = None  # by `set_epoch`
        self._go_to(place[0], place[1], state if tuple(place) == tuple(start) else None)

    def __repr__(self) -> str:
        return f"<rayloader.Consumer {self.rank} of {self.consumers} of the share {self.name!r}>"

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._length < 0:
            raise TypeError(f"the loader of the share {self.name!r} has no length")
        return int(self._length)

    def __iter__(self) -> Iterator[Any]:
        self._go_to(*((self.epoch + 1, 0) if self._taken > self._first else (self.epoch, self._taken)))
        self._ask(self._taken)
        return _Iterator(self, self._series)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the loader's sampler, batch sampler and dataset, where they have `set_epoch`.

        It must be the same in all consumers: with another number than that of the consumer that began an epoch, the
        epoch is a ValueError. Call it before each `iter()` where you would call `set_epoch` of a DistributedSampler.
        """
        self._set_to = int(epoch)

    def state_dict(self) -> dict[str, Any]:
        """This consumer's position, in some kilobytes of plain types, for `share(..., state=)`.

        Its entry "loader" is the state of the loader there, or a few batches before.

        Raises:
            StateError: the state of a dataset or sampler could not be determined.
        """
        if self._state is None:
            if not self._bundles:
                self._ask(self._taken)
            self._next()
        number, packed = self._state
        if isinstance(loader := pickle.loads(packed), Exception):
            raise loader
        place = {"epoch": self.epoch, "taken": self._taken, "behind": self._taken - number}
        return {"format": _FORMAT, **place, "loader": loader}

    def close(self) -> None:
        """This consumer needs no more batches: the others do not wait for it from now on."""
        self._calls.leave(*self._me)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _go_to(self, epoch: int, taken: int, state: Any = None) -> None:
        """The next `iter()` begins there; the iterator before is of no use any more."""
        self.epoch, self._taken, self._first = epoch, taken, taken
        self._series = object()
        self._bundles: list[Any] = []  # answers: the one that is read, and the next
        self._state = state  # the loader's, as in a bundle

    def _ask(self, number: int) -> None:
        """Asks for the items from a number on."""
        call = self._calls.begin("read", *self._me, (self.epoch, self._taken), number, self._set_to)
        self._bundles.append(self._calls.bundle(call, self._bell.ring))
        self._told, self._told_at = self._taken, time.monotonic()

    def _tell(self, epoch: int, taken: int) -> None:
        self._calls.begin("reach", *self._me, (epoch, taken))
        self._told, self._told_at = taken, time.monotonic()

    def _next(self) -> Any:
        """Waits for the next item, and gives it again until it was taken."""
        while True:
            answer = self._bundles[0]
            while answer.value is NONE_YET:
                if self._told < self._taken:
                    self._tell(self.epoch, self._taken)
                self._calls.check()
                self._bell.wait(TICK_S)
            self._state, first, items = self._calls.checked(answer.value)
            end = first + len(items)
            if len(self._bundles) == 1 and type(items[-1]) is not bytes:
                self._ask(end)
            if self._taken < end:
                return items[self._taken - first]
            del self._bundles[0]


class _Iterator:
    """The rest of one epoch. It keeps its consumer, which does not keep it."""

    def __init__(self, consumer: Consumer, series: object) -> None:
        self._consumer, self._series = consumer, series

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        consumer = self._consumer
        if self._series is None:
            raise StopIteration
        if consumer._series is not self._series:
            raise ShareError("this iterator is of an epoch that its consumer has left: iter() was called since")
        item = consumer._next()
        if type(item) is bytes:
            consumer._tell(consumer.epoch + 1, 0)
            self._series = None
            consumer._go_to(consumer.epoch + 1, 0, (0, item))
            raise StopIteration
        batch = from_wire(owned(Wire(*item), consumer._memory.copy))
        if time.monotonic() > consumer._told_at + TOLD_S:
            consumer._tell(consumer.epoch, consumer._taken + 1)
        consumer._taken += 1  # an interrupt before this line makes the next call give the same batch again
        if isinstance(batch, Caught):
            batch.reraise()
        return batch
