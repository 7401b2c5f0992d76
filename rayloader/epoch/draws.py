"""The indices of one epoch: drawn from the sampler when torch's loader would, or earlier where nobody can notice.

Promise: only the user's thread draws, because sampler and generator are the user's. The position always knows how
often torch's loader would have drawn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rayloader.epoch.draw_ahead import DrawAhead
from rayloader.errors import RayloaderError
from rayloader.observe.recorder import Tally
from rayloader.protocol import CARRY
from rayloader.resume.draws import Drawn, drawn
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
        self._ahead = sampler_iter if isinstance(sampler_iter, DrawAhead) else None
        self._position = position
        self._tally = tally
        self.count = position.next_task
        self._checksum = position.checksum

    def begin(self) -> None:
        """The sampler's iterator is about to be read."""
        self._position.sampler_begins(self._sampler_iter)

    @property
    def may_draw(self) -> bool:
        """Whether the next draw is due, or may be made early."""
        return self._ahead is None or self._ahead.may_draw

    def next(self) -> Drawn:
        """The next indices. Raises what the sampler raises; StopIteration at its end."""
        began = time.perf_counter()
        try:
            indices = next(self._sampler_iter)
        except StopIteration:
            self._position.sampler_ended(self.count)
            raise
        self._tally.drawing += time.perf_counter() - began
        result = drawn(indices, self._checksum, CARRY)
        self._checksum = result.checksum
        self.count += 1
        self._position.drawn(self.count - 1, self._sampler_iter, indices, self._checksum)
        return result

    def reach(self, torch_draws: int) -> None:
        """Checks draws that were made early, at the moment at which torch's loader would have made them.

        Raises:
            RayloaderError: that would draw something else now.
        """
        if self._ahead is None:
            return
        if not self._ahead.reach(torch_draws):
            raise RayloaderError(
                "the sampler was changed during the epoch (batch_size of a BatchSampler, or indices of a "
                "SubsetRandomSampler), after batches had been drawn from it ahead of time; change it between two "
                "epochs, or pass prefetch_factor=2, with which batches are drawn when torch's loader draws them"
            )
        self._position.drawn_by_torch = torch_draws
