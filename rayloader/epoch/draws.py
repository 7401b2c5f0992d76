"""The indices of one epoch: drawn from the sampler when torch's loader would.

Promise: only the user's thread draws, because sampler and generator are the user's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rayloader.observe.recorder import Tally
from rayloader.protocol import carried
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.position import Position


class Draws:
    """The draws of one epoch.

    Args:
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        position: the user's position in the stream; it is told of each draw.
        tally: counts the time.

    Attributes:
        count: draws so far, of the epoch: the number of the next task.
    """

    def __init__(self, sampler_iter: Iterator[Any], position: Position, tally: Tally) -> None:
        self._sampler_iter = sampler_iter
        self._position = position
        self._tally = tally
        self.count = position.next_task
        self._checksum = position.checksum

    def begin(self) -> None:
        """The sampler's iterator is about to be read."""
        self._position.sampler_begins(self._sampler_iter)

    def next(self) -> Drawn | None:
        """The next indices, None if the user has that batch. Raises the sampler's errors; StopIteration at its end."""
        began = time.perf_counter()
        try:
            if self.count >= self._position.skips.end:
                raise StopIteration
            indices = next(self._sampler_iter)
        except StopIteration:
            self._position.sampler_ended(self.count)
            raise
        self._tally.drawing += time.perf_counter() - began
        result = drawn(indices, self._checksum, carried())
        self._checksum = result.checksum
        self.count += 1
        had = self._position.drawn(self.count - 1, self._sampler_iter, indices, self._checksum)
        return None if had else result
