"""The messages between the producer of a share, its owner and its consumers; data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from rayloader.replica.opening import ImageAddress
from rayloader.state.process_state import ProcessState
from rayloader.state.random_state import RandomState

# Of producers' actors, independent of the namespaces of the programs that meet in one Ray.
NAMESPACE = "rayloader-shares"


@dataclass(frozen=True, slots=True)
class Terms:
    """The arguments of the program that shares a loader."""

    name: str
    consumers: int
    buffer: int  # batches
    buffer_bytes: int
    consumer_timeout: float | None  # seconds
    origin: Any  # seal of the state that was loaded into the loader; None: no state was


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the producer opens the loader from, in the program's state when it was shared."""

    image: ImageAddress
    carried: list[Any]
    contents: list[Any] | None  # Ray's object with the image's bytes, if its files cannot be opened
    process: ProcessState
    random: RandomState


class Kind(Enum):
    """The kind of a reply."""

    INLINE = 0  # a batch: its wire, pickled
    STORED = 1  # a batch: Ray's object, in a list
    ERROR = 2  # the loader's error in place of a batch: pickled
    END = 3  # of the epoch
    REFUSED = 4  # the share's own error
    DONE = 5  # any other request


class Reply(NamedTuple):
    """A reply to a consumer.

    Attributes:
        kind: what `payload` is.
        payload: depends on `kind`.
        gone: consumers that the others no longer wait for, and why.
    """

    kind: Kind
    payload: Any = None
    gone: dict[int, str] = {}  # noqa: RUF012  # never written to


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
