"""Where a consumer's batches come in: what both ways have in common, and the way by Ray calls.

Promise: `next` gives the same batch again until it is removed from `pending`, so an interrupted `next` of the user
loses none. The producer learns from `tell` what the user has taken. Used by the user's thread only.
"""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from typing import Any

from rayloader.sharing.link import Link
from rayloader.sharing.messages import Reply

# How many batches a consumer requests, over those that the user has taken, so that they are on their way while the
# user works.
_CALLS_AHEAD = 3


class Inbox(ABC):
    """The batches of one consumer.

    Args:
        link: to the producer.

    Attributes:
        pending: batches that have come, or are on their way, and that the user has not taken: by number. Remove a batch
            once the user has it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.pending: dict[int, Any] = {}
        _live.add(self)

    @abstractmethod
    def begin(self, epoch: int, taken: int, sampler_epoch: int | None) -> None:
        """The consumer iterates from this place on; the producer may begin the epoch."""

    @abstractmethod
    def next(self, number: int) -> Reply:
        """Waits for the batch of that number, which is the next.

        Raises:
            RayloaderError: the producer refuses, or it or Ray is gone.
            ValueError: it refuses the sampler's epoch.
        """

    @abstractmethod
    def tell(self, taken: int) -> None:
        """Reports how many batches were taken, and requests more. May be repeated."""

    @abstractmethod
    def rest(self, *, wait: bool) -> None:
        """No batch is needed until the next `begin`: ends what is done ahead, and waits for its end if so asked."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is needed; callable more than once."""


class CallInbox(Inbox):
    """By a Ray call for each batch; its memory is Ray's until it is opened."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._begun: Any = None
        self._epoch = 0

    def begin(self, epoch: int, taken: int, sampler_epoch: int | None) -> None:
        """The consumer iterates from this place on; the producer may begin the epoch."""
        self.pending, self._epoch = {}, epoch
        self._begun = self._link.call("begin", epoch, taken, sampler_epoch)

    def next(self, number: int) -> Reply:
        """Waits for the batch of that number, which is the next."""
        if self._begun is not None:
            self._link.result(self._begun)
            self.tell(number)  # not before: the producer's calls overlap, and it must know `sampler_epoch` first
            self._begun = None
        return self._link.result(self.pending[number])

    def tell(self, taken: int) -> None:
        """Reports how many batches were taken, and requests more. May be repeated."""
        for number in range(taken, taken + _CALLS_AHEAD):
            if number not in self.pending:
                self.pending[number] = self._link.call("take", self._epoch, taken, number)

    def rest(self, *, wait: bool) -> None:
        """Nothing is done ahead here; Ray's calls go on."""

    def close(self) -> None:
        """Nothing more is needed; callable more than once."""
        self.pending = {}


def close_all() -> None:
    """Closes all inboxes of this process."""
    for inbox in list(_live):
        inbox.close()


_live: weakref.WeakSet[Inbox] = weakref.WeakSet()
# Runs before Ray's own handler, which was registered before it.
atexit.register(close_all)
