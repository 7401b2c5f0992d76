"""`share` and `shared`: one pipeline for many consumers.

Promise: a producer ends with the process that started it, with `close` of its share, and with `rayloader.shutdown()`.
Each batch is its consumer's own. `next` marks it as taken in its very last step, and the producer keeps all that
is not: an interrupt loses and repeats none. Ray is imported when a loader is shared or a share is read, not with this
module.

Threads: Ray's put what comes into `Consumer._found` while the user's trains; that does everything else.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from rayloader._compat import pinning_of
from rayloader.errors import RaySessionError, ShareError, StateError
from rayloader.gpu.to_device import pinned
from rayloader.host.shard_info import ranks_told
from rayloader.interrupts import TICK_S, Bell
from rayloader.loader import DataLoader
from rayloader.options import check_means, check_name, check_remote_args, is_whole
from rayloader.resume.state import State
from rayloader.transport.lanes import Recycled, Wire, from_wire, owned
from rayloader.workers.connection import NONE_YET
from rayloader.workers.janitor import janitor

_FORMAT = "rayloader.Consumer"
_LOOK_EVERY_S = 0.2  # for a share that does not exist yet


def share(
    loader: DataLoader[Any],
    *,
    consumers: int,
    name: str | None = None,
    buffer: int = 8,
    ray_remote_args: dict[str, Any] | None = None,
) -> SharedLoader:
    """Moves a loader to a process of its own, the producer, where each batch is produced once for several consumers.

    The batches are those that the loader would give here, if it were iterated from now on. The loader given is not
    affected. Ray is joined or started as by a loader with workers. The share lives until `SharedLoader.close`,
    `rayloader.shutdown()` or the end of this process.

    Args:
        loader: with or without workers. A state that was loaded into it is used.
        consumers: how many read it: each of them, with ranks from 0, reads every batch. Each is waited for from the
            first batch on, until it was closed or its process has ended.
        name: for `shared`, unique in this Ray; by default only the returned object leads to the share.
        buffer: how many batches to keep for consumers that have not taken them yet. The fastest consumer may be this
            many ahead of the slowest, over all epochs, and at least half as many.
        ray_remote_args: options of the producer's actor. By default it takes no CPU, and runs on this node.

    Raises:
        ShareError: there is a share with that name already.
        ValueError: an argument is out of range.
        TypeError: an argument is of the wrong type.
    """
    if not isinstance(loader, DataLoader):
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise TypeError(f"share() takes a rayloader.DataLoader, got {kind}; create one")
    for argument, value in (("consumers", consumers), ("buffer", buffer)):
        if not is_whole(value) or value < 1:
            raise ValueError(f"share() needs {argument} >= 1, a whole number, got {value!r}")
    if loader.device is not None:
        raise ValueError(
            f"share() takes a loader without a device, got device={loader.device!r}; move the batches in each consumer"
        )
    if isinstance(loader.dataset, IterableDataset) and ranks_told(loader) is None:
        raise ValueError(
            "share() was given a loader of an iterable dataset that was not told its rank, where torch.distributed has "
            "several, and the producer is none of them; give the loader num_replicas and rank, 1 and 0 where all ranks "
            "are to read the same"
        )
    name = f"unnamed-{uuid.uuid4().hex}" if name is None else name
    check_name(name)
    check_remote_args(ray_remote_args)
    check_means("share()")
    from rayloader.sharing import calls

    started = calls.start(loader, name, consumers, buffer, ray_remote_args or {})
    _owned[owner := SharedLoader(started.producer, name, consumers)] = started
    return owner


def shared(name: str, rank: int, *, timeout: float = 60.0) -> Consumer:
    """Joins a share by its name, from any process of the same Ray.

    Args:
        name: as given to `share`.
        rank: which of its consumers this is, from 0.
        timeout: seconds to wait for a share of that name.

    Raises:
        ShareError: there is none, or this consumer has joined before.
        ValueError: the share has fewer consumers.
    """
    check_name(name)
    check_means("shared()")
    from rayloader.sharing import calls

    until = time.monotonic() + timeout
    while (found := calls.find(name)) is None:
        if time.monotonic() >= until:
            raise ShareError(
                f"there is no share {name!r} in this Ray within {timeout:g} s; some process of the same Ray must call "
                f"rayloader.share(loader, consumers=..., name={name!r}) and keep running while it is read. Programs "
                "that do not start each other meet in one Ray by RAY_ADDRESS"
            )
        time.sleep(_LOOK_EVERY_S)
    return Consumer(found, rank)


class SharedLoader:
    """A loader that is shared; created by `share`. It may be passed to Ray's tasks and actors."""

    def __init__(self, producer: Any, name: str, consumers: int) -> None:
        self._producer = producer
        self.name = name
        self.consumers = consumers

    def __repr__(self) -> str:
        return f"rayloader.SharedLoader({self.name!r}, consumers={self.consumers})"

    def consumer(self, rank: int) -> Consumer:
        """Joins the share as one of its consumers, numbered from 0.

        Raises:
            ShareError: the share has ended, or this consumer has joined before.
            ValueError: the share has no consumer with this rank.
        """
        from rayloader.sharing.calls import Calls

        return Consumer(Calls(self._producer, self.name), rank)

    def close(self) -> None:
        """Ends the share, in the process that created it; elsewhere this has no effect. May be called again."""
        if (calls := _owned.pop(self, None)) is not None:
            calls.end()

    def __enter__(self) -> SharedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_owned: dict[SharedLoader, Any] = {}  # of this process, with the calls to the producer


def close_all() -> None:
    """Ends the shares that this process has started."""
    for one in list(_owned):
        with contextlib.suppress(Exception):  # one that cannot be ended must not keep the others alive
            one.close()


class Consumer:
    """One reader of a shared loader; created by `SharedLoader.consumer` and `shared`.

    It is iterated like a loader: each `iter()` begins its next epoch, even if the last one was broken off. But if no
    batch was taken from the last iterator, the epoch is the same: some frameworks make an iterator only to look at it.
    A new epoch is produced when the first consumer begins it, after the previous one was produced to its end or broken
    off by all. Each batch is this consumer's own, and may be written to.

    Keep the object for all epochs: the others do not wait for it any more, and it can't be joined again, once it was
    closed, nothing refers to it, or its process has ended.

    Attributes:
        name: of the share.
        rank: of this consumer, from 0.
        consumers: how many the share has.
        epoch: the current epoch of this consumer; after the last batch of an epoch, the next one.
    """

    _state: Any
    _state_at: int

    def __init__(self, calls: Any, rank: int) -> None:
        self._calls = calls
        self._promise = calls.begin("hold", rank)
        self._facts: dict[str, Any] = calls.ask("join", rank, [self._promise])
        self.name, self.rank, self.consumers = calls.name, rank, self._facts["consumers"]
        self._memory, self._bell = Recycled(), Bell()
        janitor.start()
        ended = functools.partial(_end, calls, rank, self._memory)
        weakref.finalize(self, janitor.later, ended).atexit = False  # the producer sees the end of a process
        self._sampler_epoch: int | None = None
        self._begun_with: int | None = None  # what that was for the current iterator
        self._series = 0  # counts iterators
        self._go_to(0, 0, self._facts["state"])

    def __repr__(self) -> str:
        return f"rayloader.Consumer({self.name!r}, rank={self.rank})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle a Consumer: its place belongs to one process; there, call rayloader.shared({self.name!r}, "
            f"{self.rank}), or pass on the SharedLoader"
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        if isinstance(length := self._facts["length"], str):
            raise TypeError(length)
        return int(length)

    def __iter__(self) -> Iterator[Any]:
        if self._taken > self._first:
            self._go_to(self.epoch + 1, 0, None)
        self._series += 1
        self._begun_with, self._sampler_epoch = self._sampler_epoch, None
        self._ask()
        return _Iterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the loader's sampler, batch sampler and dataset, where they have `set_epoch`.

        It applies to the next `iter()`, and must be the same in all consumers. Call it before each epoch where you
        would call `set_epoch` of a DistributedSampler.
        """
        self._sampler_epoch = int(epoch)

    def state_dict(self) -> dict[str, Any]:
        """This consumer's position, in some kilobytes of plain types.

        Its entry "loader" is the state of the loader there, or a few batches before. To start again, load that into
        the loader, share the loader, and load the whole state in each consumer.

        Raises:
            StateError: the state of a dataset or sampler could not be determined.
        """
        if self._state is None:  # of an epoch that was begun after one that was broken off
            self._state = self._next().state
        if isinstance(self._state, Exception):
            raise self._state
        return {"format": _FORMAT, "loader": self._state, "behind": self._taken - self._state_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the first `iter()` continue where the state was saved: with the rest of that epoch, or a new one.

        Raises:
            StateError: its entry "loader" was not loaded before the loader was shared, or this consumer has begun.
        """
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            raise StateError("this is not a state of a rayloader.Consumer; a loader's own state is for the loader")
        loader, first = state_dict["loader"], self._facts["state"]
        if (self.epoch, self._taken) != (0, 0) or State.load(loader).mark != State.load(first).mark:
            raise StateError(
                "the state is not of where this share begins; load its entry 'loader' into the loader before that is "
                "shared, then the whole state in each consumer, before it takes a batch"
            )
        self._go_to(0, state_dict["behind"], loader)

    def close(self) -> None:
        """This consumer needs no more batches: the others do not wait for it from now on."""
        with contextlib.suppress(ShareError, RaySessionError):  # the share has ended already
            self._calls.ask("leave", self.rank, "it was closed")

    def _go_to(self, epoch: int, taken: int, state: Any) -> None:
        """The next iterator begins there; the one before is of no use any more.

        Args:
            epoch: of the place.
            taken: items of that epoch before it.
            state: the loader's at the start of what the share gives of that epoch; None if it is not known yet.
        """
        self._series += 1
        self.epoch, self._taken, self._first = epoch, taken, taken
        self._state = state
        self._state_at = 0  # the newest that is not after the place; the number of its item
        self._found: dict[int, Any] = {}  # items that were not taken, by number; see `calls.Read`

    def _ask(self) -> None:
        """Asks for more than has come; an earlier call brings nothing any more, unless it is answered."""
        from rayloader.sharing.calls import Read

        place = self.epoch, self._taken
        self._read = Read(self._calls, self.rank, place, self._found, self._bell, self._begun_with)

    def _next(self) -> Any:
        """Waits for the next item; gives it again until it was taken."""
        number, found = self._taken, self._found
        while True:
            for taken in [other for other in list(found) if other < number]:
                del found[taken]
            self._calls.check()
            self._calls.checked(self._read.answer)
            # A call that waits may have told of too few that were taken, and the producer wait for more.
            is_over = self._read.answer is not NONE_YET or (not found and self._read.number < number)
            if is_over and 2 * len(found) <= self._facts["buffer"]:
                self._ask()
            if found.get(number, NONE_YET) is not NONE_YET:
                return self._calls.checked(found[number])
            self._bell.wait(TICK_S)


class _Iterator:
    """The rest of one epoch. It keeps its consumer, which does not keep it."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer, self._series = consumer, consumer._series
        pinning: Any = consumer._facts["pinning"]
        self._pins, self._device = pinning_of(DataLoader((), generator=torch.Generator(), **pinning))

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        consumer = self._consumer
        if self._series < 0:
            raise StopIteration
        if consumer._series != self._series:
            raise ShareError("this iterator is of an epoch that its consumer has left: iter() was called since")
        number, (kind, payload, state) = consumer._taken, consumer._next()
        if kind == "end":
            self._series = -1
            consumer._go_to(consumer.epoch + 1, 0, state)
            consumer._calls.begin("reach", consumer.rank, (consumer.epoch, 0))
            raise StopIteration
        batch = payload if kind == "stored" else pickle.loads(payload)
        if kind != "error":
            batch = from_wire(owned(Wire(*batch), consumer._memory.copy))
            batch = pinned(batch, self._device) if self._pins else batch
        if state is not None:
            consumer._state, consumer._state_at = state, number
        # An interrupt before this line makes the next call give the same batch again; there is none after it.
        consumer._taken = number + 1
        if kind == "error":
            raise batch
        return batch


def _end(calls: Any, rank: int, memory: Recycled) -> None:
    """What is left to do when nothing refers to a consumer any more; in the janitor's thread."""
    if calls.is_live:
        calls.begin("leave", rank, "it was closed, because nothing referred to its Consumer any more")
    memory.close()
