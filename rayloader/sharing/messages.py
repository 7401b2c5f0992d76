"""The messages between the producer of a share, its owner and its consumers; data only."""

from __future__ import annotations

import pickle
import struct
from enum import Enum
from typing import Any, NamedTuple

from rayloader.actors.image import ImageAddress
from rayloader.errors import RayloaderError
from rayloader.random.random_state import RandomState
from rayloader.transport.line import Message, Parcel, packed

# Of producers' actors, independent of the namespaces of the programs that meet in one Ray.
NAMESPACE = "rayloader-shares"
# Before each message of a producer's line: the series that it belongs to, and the number of its batch.
HEAD = struct.Struct("<qq")
# What a consumer is refused with: the errors of a share, and those of arguments.
REFUSALS = (RayloaderError, ValueError)


class Terms(NamedTuple):
    """The arguments of the program that shares a loader."""

    name: str
    consumers: int
    buffer: int  # batches
    buffer_bytes: int
    consumer_timeout: float | None  # seconds
    absence: float  # seconds for which a consumer that has ended may come back
    origin: Any  # mark of the state that was loaded into the loader; None: no state was


class Pipeline(NamedTuple):
    """What the producer opens the loader from, with the program's global generators as they were when it was shared."""

    image: ImageAddress
    carried: list[Any]
    content: list[Any] | None  # Ray's object with the image's bytes, if its files cannot be opened
    node_id: str  # the program's
    sys_path: list[str]  # where it finds modules
    random: RandomState


class Connection(NamedTuple):
    """What a consumer receives when it connects."""

    share: str  # unique
    number: int  # of this connection of the rank: a newer one ends it
    consumers: int
    epoch: int
    taken: int  # batches of that epoch
    length: int | str  # of an epoch; or why there is no length
    pin_memory: bool
    pin_memory_device: str
    origin: Any  # as in `Terms`


class Kind(Enum):
    """What a message of a producer's line holds."""

    BATCH = 0  # a batch: its wire
    ERROR = 1  # the loader's error in place of a batch: pickled
    END = 2  # of the epoch
    REFUSED = 3  # the share's own error


class Wants(NamedTuple):
    """From a consumer, over its line: how far it has read, and what it has room for. Each message replaces the last."""

    series: int  # a new one begins to iterate from a place on: batches of earlier series are not needed
    epoch: int
    taken: int  # batches of that epoch
    first: int  # number of the first batch to send of a new series: those between are at the consumer already
    until: int  # number after the last batch to send for now
    sampler_epoch: int | None  # what `set_epoch` was given, if it was


def packed_content(kind: Kind, payload: Any = None, apart: int | None = None) -> Message:
    """What a message of a producer's line holds; buffers of more than `apart` bytes follow it."""
    return packed((kind.value, payload), apart)


def for_line(series: int, number: int, body: Message) -> Message:
    """A message of a producer's line: a content behind the HEAD."""
    head = HEAD.pack(series, number)
    return head + body if isinstance(body, bytes) else Parcel(head + body.message, body.buffers)


def head_of(message: Message) -> tuple[int, int]:
    """Series and number of a message of a producer's line."""
    series, number = HEAD.unpack_from(message if isinstance(message, bytes) else message.message)
    return series, number


def content_of(message: Message) -> tuple[Kind, Any]:
    """The content of a message of a producer's line."""
    body, buffers = (message, ()) if isinstance(message, bytes) else message
    value, payload = pickle.loads(memoryview(body)[HEAD.size :], buffers=buffers)
    return Kind(value), payload


def nbytes_of(message: Message) -> int:
    """Bytes of a message, with its buffers."""
    if isinstance(message, bytes):
        return len(message)
    return len(message.message) + sum(buffer.nbytes for buffer in message.buffers)
