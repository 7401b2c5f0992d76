"""One pipeline for many consumers: `share` a loader once, and read its batches in several processes.

Ray is imported when a loader is shared or a share is read, not with this module.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from rayloader._compat import pinning_of
from rayloader.errors import RaySessionError, ShareError, StateError
from rayloader.gpu.to_device import pinned
from rayloader.host.shard_info import ranks_told
from rayloader.loader import DataLoader
from rayloader.options import check_means, check_name, check_remote_args, is_whole
from rayloader.resume.state import State

if TYPE_CHECKING:
    from rayloader.sharing.link import Inbox, Link

_FORMAT = "rayloader.Consumer"

# A consumer that has ended may be started again, and continue, within so many seconds: a cluster may take that long.
ABSENCE_S = 60.0


def share(
    loader: DataLoader[Any],
    *,
    consumers: int,
    name: str | None = None,
    buffer: int = 8,
    buffer_bytes: int = 256 << 20,
    consumer_timeout: float | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> SharedLoader:
    """Moves a loader to a process of its own, the producer, where each batch is produced once for several consumers.

    The batches are those that the loader would give here, if it were iterated from now on. The loader given is not
    affected. Ray is joined or started as by a loader with workers. The share lives until `SharedLoader.close`,
    `rayloader.shutdown()` or the end of this process.

    Args:
        loader: with or without workers. A state that was loaded into it is used.
        consumers: how many processes read it: each of them, with ranks from 0, reads every batch.
        name: for `shared`, unique in this Ray; by default only the returned object leads to the share.
        buffer: how many batches to keep for consumers that have not taken them yet; the fastest consumer may be this
            many ahead of the slowest, over all epochs.
        buffer_bytes: once the kept batches have this many bytes no more are produced either, if there are at least two.
        consumer_timeout: how many seconds the others may wait for a consumer that does not take its batches, because it
            is slow; then it is dropped. By default they wait for ever, and the log names it. One that has read, and
            whose process has ended, is dropped after a minute, unless it has connected again.
        ray_remote_args: options of the producer's actor. By default it takes no CPU, and runs on this node.

    Raises:
        ShareError: there is a share with that name already.
        ValueError: an argument is out of range.
        TypeError: an argument is of the wrong type.
    """
    if not isinstance(loader, DataLoader):
        kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
        raise TypeError(f"share() takes a rayloader.DataLoader, got {kind}; create one")
    for argument, value in (("consumers", consumers), ("buffer", buffer), ("buffer_bytes", buffer_bytes)):
        if not is_whole(value) or value < 1:
            raise ValueError(f"share() needs {argument} >= 1, a whole number, got {value!r}")
    if loader.device is not None:
        raise ValueError(
            f"share() takes a loader without a device, got device={loader.device!r}: its consumers may use different "
            "ones; leave it out, and move the batches in each consumer"
        )
    if consumer_timeout is not None and not consumer_timeout > 0:
        raise ValueError(f"consumer_timeout must be a number of seconds > 0, or None, got {consumer_timeout!r}")
    if isinstance(loader.dataset, IterableDataset) and ranks_told(loader) is None:
        raise ValueError(
            "share() was given a loader of an iterable dataset that was not told its rank, where torch.distributed has "
            "several, and the producer is none of them; give the loader num_replicas and rank, 1 and 0 where all ranks "
            "are to read the same"
        )
    if name is not None:
        check_name(name)
    check_remote_args(ray_remote_args)
    check_means("share()")
    from rayloader.sharing import link
    from rayloader.sharing.messages import Terms

    origin = loader._state.mark if loader._state is not None else None
    name = name or f"unnamed-{uuid.uuid4().hex}"
    terms = Terms(name, consumers, buffer, buffer_bytes, consumer_timeout, ABSENCE_S, origin)
    return SharedLoader(link.start(loader, terms, dict(ray_remote_args or {})), name, consumers)


def shared(name: str, rank: int, *, timeout: float = 60.0) -> Consumer:
    """Connects to a share by its name, from any process of the same Ray.

    Args:
        name: as given to `share`.
        rank: which of its consumers this is, from 0.
        timeout: seconds to wait for a share of that name.

    Raises:
        ShareError: there is none.
        ConsumerDroppedError: this consumer was dropped.
        ValueError: the share has fewer consumers.
    """
    check_name(name)
    check_means("shared()")
    from rayloader.sharing import link

    return Consumer(link.find(name, timeout), name, rank)


class SharedLoader:
    """A loader that is shared; created by `share`. It may be passed to Ray's tasks and actors.

    Attributes:
        name: by which `shared` finds it.
        consumers: how many it has.
    """

    def __init__(self, producer: Any, name: str, consumers: int) -> None:
        self._producer = producer
        self.name = name
        self.consumers = consumers

    def __repr__(self) -> str:
        return f"rayloader.SharedLoader({self.name!r}, consumers={self.consumers})"

    def consumer(self, rank: int) -> Consumer:
        """Connects to the share as one of its consumers, numbered from 0.

        Raises:
            ShareError: the share has ended.
            ConsumerDroppedError: this consumer was dropped.
            ValueError: the share has no consumer with this rank.
        """
        return Consumer(self._producer, self.name, rank)

    def close(self) -> None:
        """Ends the share, in the process that created it; elsewhere this has no effect. May be called again."""
        if (link := sys.modules.get("rayloader.sharing.link")) is not None:
            link.end(self._producer)

    def __enter__(self) -> SharedLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Consumer:
    """One reader of a shared loader; created by `SharedLoader.consumer` and `shared`.

    It is iterated like a loader: each `iter()` begins its next epoch, even if the last one was broken off. But if no
    batch was taken from the last iterator, the epoch is the same: some frameworks make an iterator only to look at it.
    A new epoch is produced when the first consumer begins it, after the previous one was produced to its end or broken
    off by all. Each batch is this consumer's own, and may be written to. A new connection with the same rank continues
    with the first batch that the consumer has not taken, in the same epoch at the first `iter()`; the old connection
    ends.

    Attributes:
        name: of the share.
        rank: of this consumer, from 0.
        consumers: how many the share has.
        epoch: the current epoch of this consumer; after the last batch of an epoch, the next one.
    """

    def __init__(self, producer: Any, name: str, rank: int) -> None:
        from rayloader.sharing.link import Link

        self._link: Link = Link(producer, name, rank)
        connection = self._link.connection
        self.name, self.rank, self.consumers = name, rank, connection.consumers
        self.epoch, self._taken = connection.epoch, connection.taken
        self._sampler_epoch: int | None = None
        self._inbox: Inbox | None = None  # from the first iterator on
        # Of the iterator of this epoch, if it has begun. It refers to this object, which must end with its last
        # reference, and so may not refer to it.
        self._token: object = None
        self._first = 0  # where that iterator began

    def __repr__(self) -> str:
        return f"rayloader.Consumer({self.name!r}, rank={self.rank})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle a Consumer: its place belongs to one process; there, call rayloader.shared({self.name!r}, "
            f"{self.rank}), or pass on the SharedLoader"
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        length = self._link.connection.length
        if isinstance(length, str):
            raise TypeError(length)
        return length

    def __iter__(self) -> Iterator[Any]:
        if self._token is not None:
            self._go_to(*((self.epoch + 1, 0) if self._taken > self._first else (self.epoch, self._taken)))
        if self._inbox is None:
            from rayloader.sharing.link import Inbox

            self._inbox = Inbox(self._link)
        self._inbox.begin(self.epoch, self._taken, self._sampler_epoch)
        self._token, self._first = object(), self._taken
        iterator = _Iterator(self, self._inbox, self._token)
        self._sampler_epoch = None
        return iterator

    def _go_to(self, epoch: int, taken: int) -> None:
        """The next `iter()` begins there; the iterator before is of no use any more."""
        token, self._token = self._token, None
        self.epoch, self._taken = epoch, taken
        if token is not None and self._inbox is not None:
            self._inbox.rest(wait=True)  # ends what is done ahead

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the loader's sampler, batch sampler and dataset, where they have `set_epoch`.

        It applies to the next `iter()`, and must be the same in all consumers. Call it before each epoch where you
        would call `set_epoch` of a DistributedSampler.
        """
        self._sampler_epoch = int(epoch)

    def state_dict(self) -> dict[str, Any]:
        """This consumer's position, in some kilobytes of plain types.

        It serves `load_state_dict` of the same share, as long as that keeps the batches from there on. Its entry
        "loader" is the state of the loader there, or a few batches before. To start again, load that into the loader,
        share the loader, and load the whole state in each consumer.

        Raises:
            StateError: the state of a dataset or sampler could not be determined.
        """
        epoch, taken, loader, behind = self._link.ask("state", self.epoch, self._taken)
        place = {"share": self._link.connection.share, "epoch": epoch, "taken": taken, "behind": behind}
        return {"format": _FORMAT, **place, "loader": loader}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next `iter()` continue where the state was saved: with the rest of that epoch, or a new one.

        Raises:
            StateError: the share no longer keeps the batches from there on, or the state is of another share,
                and its entry "loader" was not loaded before this one was created.
        """
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            raise StateError("this is not a state of a rayloader.Consumer; a loader's own state is for the loader")
        connection = self._link.connection
        if state_dict["share"] == connection.share:
            place = state_dict["epoch"], state_dict["taken"]
        elif State.load(state_dict["loader"]).mark == connection.origin:
            place = 0, state_dict["behind"]
        else:
            raise StateError(
                "the state is of another share; load its entry 'loader' into the loader before that is shared, then "
                "the whole state in each consumer"
            )
        self._link.ask("seek", *place)
        self._go_to(*place)

    def close(self) -> None:
        """This consumer needs no more batches: the others do not wait for it from now on."""
        if self._inbox is not None:
            self._inbox.close()
        with contextlib.suppress(ShareError, RaySessionError):  # the share has ended already
            self._link.ask("leave")


class _Iterator:
    """The rest of one epoch, from a place on."""

    _inbox: Inbox | None = None  # here too, for `__init__` may raise

    def __init__(self, consumer: Consumer, inbox: Inbox, token: object) -> None:
        self._consumer, self._inbox, self._token = consumer, inbox, token
        self._epoch, self._taken = consumer.epoch, consumer._taken
        self._ended = False
        connection = consumer._link.connection
        pinning: Any = {"pin_memory": connection.pin_memory, "pin_memory_device": connection.pin_memory_device}
        self._pins, self._device = pinning_of(DataLoader((), generator=torch.Generator(), **pinning))

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        consumer, inbox, number = self._consumer, self._inbox, self._taken
        if consumer._token is not self._token or inbox is None:
            raise ShareError(
                f"this iterator is of epoch {self._epoch}, which this consumer has left: iter() or load_state_dict() "
                "was called since"
            )
        pending = inbox.pending  # these: another thread may close the consumer meanwhile
        try:
            kind, payload = inbox.next(number)
        except ValueError:  # of `set_epoch`: it may be called again for this epoch
            consumer._go_to(self._epoch, number)
            raise
        from rayloader.sharing.messages import Kind
        from rayloader.transport.lanes import Wire, from_wire

        if kind is Kind.END:
            self._ended = True
            consumer._go_to(self._epoch + 1, 0)
            raise StopIteration
        error = pickle.loads(payload) if kind is Kind.ERROR else None
        batch = from_wire(Wire(*payload)) if error is None else None
        if self._pins and error is None:
            batch = pinned(batch, self._device)
        inbox.tell(number + 1)
        # These lines mark the batch as taken: after an interrupt before them the next call returns it again.
        del pending[number]
        self._taken = consumer._taken = number + 1
        if error is not None:
            raise error
        return batch

    def __del__(self) -> None:
        if self._inbox is not None and self._consumer._token is self._token:
            self._inbox.rest(wait=False)
