"""What the producer of a share, its owner and its consumers say to each other; data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from rayloader.replica.opening import ImageAddress
from rayloader.state.process_state import ProcessState
from rayloader.state.random_state import RandomState

# Of the actors that are producers, whatever the namespaces of the programs that meet in one Ray.
NAMESPACE = "rayloader-shares"


@dataclass(frozen=True, slots=True)
class Terms:
    """What the program that shares a loader has said."""

    name: str
    consumers: int
    buffer: int  # batches
    buffer_bytes: int
    consumer_timeout: float | None  # seconds
    origin: Any  # seal of the state that was loaded into the loader; None: none was


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the producer opens the loader from, in the program's state when it was shared."""

    image: ImageAddress
    carried: list[Any]
    contents: list[Any] | None  # Ray's object with the image's bytes, where its files cannot be opened
    process: ProcessState
    random: RandomState


class Kind(Enum):
    """Of a reply."""

    INLINE = 0  # a batch: its wire, pickled
    STORED = 1  # a batch: Ray's object, in a list
    ERROR = 2  # what the loader raised in place of a batch: pickled
    END = 3  # of the epoch
    REFUSED = 4  # the share's own error
    DONE = 5  # what was asked for otherwise


class Reply(NamedTuple):
    """To a consumer.

    Attributes:
        kind: what `payload` is.
        payload: by kind.
        gone: consumers that the others do not wait for any more, and why.
    """

    kind: Kind
    payload: Any = None
    gone: dict[int, str] = {}  # noqa: RUF012  # never written to


class Connection(NamedTuple):
    """What a consumer is told when it connects."""

    share: str  # unique
    number: int  # of this connection of the rank: a newer one ends it
    consumers: int
    epoch: int
    taken: int  # batches of that epoch
    length: int | str  # of an epoch; or why it has none
    pin_memory: bool
    pin_memory_device: str
    origin: Any  # as in `Terms`
