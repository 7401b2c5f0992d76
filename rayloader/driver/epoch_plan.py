"""How an epoch begins: which workers it has, where it starts, and how deep it may prefetch.

Promise: pure; decides, and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rayloader.driver.pace import MAX_DEPTH
from rayloader.options import Options


class Begin(Enum):
    """Where an epoch begins."""

    FRESH = "fresh"  # the first epoch of its workers
    NEXT = "next"  # the same workers have had an epoch, in this run or in the one that the state is of
    RESUMED = "resumed"  # the rest of an epoch that a state was saved in


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What an iterator does to begin an epoch.

    Attributes:
        begin: where.
        starts_workers: there are none that could go on.
        elastic: the depth is automatic, and indices may be drawn earlier than torch would draw them.
        goes_on: the sampler's iterator is not at its start: it has given what another run's was given.
        carries_over: what a worker has built may show in what it builds in the next epoch (by its random streams, or
            by a generator of the dataset's), and torch's worker would have built the same. Dynamic scheduling promises
            nothing of that: who builds what depends on who was idle.
    """

    begin: Begin
    starts_workers: bool
    elastic: bool
    goes_on: bool
    carries_over: bool

    @property
    def max_undone(self) -> int:
        """How many tasks persistent workers may have to undo that torch's would not have been given."""
        return MAX_DEPTH if self.elastic and self.carries_over else 0


def plan_epoch(
    options: Options,
    *,
    lives: bool,
    saved: bool,
    finished: bool,
    redealt: bool,
    persistent: bool,
    iterable: bool,
    may_draw_ahead: Callable[[bool], bool],
) -> EpochPlan:
    """The plan of an epoch.

    Args:
        options: of the loader.
        lives: workers of an epoch before can go on.
        saved: the iterator was made of a state that has a position.
        finished: the last epoch of these workers, or the one of the state, was taken to its end.
        redealt: other ranks have begun the epoch.
        persistent: workers keep their dataset objects.
        iterable: the dataset is a stream.
        may_draw_ahead: whether the sampler may be asked early; told whether its iterator is not at its start.
    """
    resumed = saved and not finished
    goes_on = redealt or resumed
    # Without order, what a worker gets depends on when it is given it; and how far a stream was read ahead shows where
    # persistent workers go on. In both cases no deeper than torch.
    elastic = (
        options.automatic_depth
        and (options.in_order or options.dynamic)
        and not (persistent and iterable)
        and may_draw_ahead(goes_on)
    )
    begin = Begin.RESUMED if resumed else Begin.NEXT if lives or finished else Begin.FRESH
    return EpochPlan(begin, not lives, elastic, goes_on, carries_over=not options.dynamic)
