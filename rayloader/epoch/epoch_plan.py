"""How an epoch begins: which workers it has, where it starts, and how deep it may prefetch.

Promise: pure; decides, and has no effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rayloader.epoch.pace import MAX_DEPTH
from rayloader.options import Options


class Begin(Enum):
    """Where an epoch begins."""

    FRESH = "fresh"  # the first epoch of its workers
    NEXT = "next"  # the same workers have had an epoch, in this run or in the one that saved the state
    RESUMED = "resumed"  # the rest of an epoch in which a state was saved


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """What an iterator must do to begin an epoch.

    Attributes:
        begin: where.
        starts_workers: no workers are left that could continue.
        elastic: the depth is automatic, and indices may be drawn earlier than torch would draw them.
        goes_on: the sampler's iterator is not at its start: it has yielded what another run's had yielded.
        carries_over: what a worker has built may affect what it builds in the next epoch (through its random streams,
            or a generator of the dataset's), and torch's worker would have built the same. Dynamic scheduling gives no
            such guarantee: which worker builds what depends on which was idle.
    """

    begin: Begin
    starts_workers: bool
    elastic: bool
    goes_on: bool
    carries_over: bool

    @property
    def max_undone(self) -> int:
        """How many tasks persistent workers may have to undo because torch's would not have been given them."""
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
        lives: workers of a previous epoch can continue.
        saved: the iterator is created from a state that has a position.
        finished: the last epoch of these workers, or that of the state, was finished.
        redealt: other ranks have begun the epoch.
        persistent: workers keep their dataset objects.
        iterable: the dataset is a stream.
        may_draw_ahead: whether the sampler may be read early; its argument is whether its iterator is not at its start.
    """
    resumed = saved and not finished
    goes_on = redealt or resumed
    # Without order, a worker's batches depend on when it is given them; and how far a stream was read ahead shows when
    # persistent workers continue. In both cases the depth is torch's.
    elastic = (
        options.automatic_depth
        and (options.in_order or options.dynamic)
        and not (persistent and iterable)
        and may_draw_ahead(goes_on)
    )
    begin = Begin.RESUMED if resumed else Begin.NEXT if lives or finished else Begin.FRESH
    return EpochPlan(begin, not lives, elastic, goes_on, carries_over=not options.dynamic)
