"""Deals the rest of an epoch to another number of ranks.

Promise: pure. All items of the epoch that no rank had taken go to one of the new ranks, and no others; except for
items that are repeated, or with `drop_last` left out, to give all ranks the same number. That follows the rule of
torch's DistributedSampler. The items of an epoch are samples, or whole batches if a batch sampler gives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import BatchSampler

_T = TypeVar("_T")
Ranges = list[tuple[int, int]]  # of places in a rank's share: the first, and the one after the last


class Stage(NamedTuple):
    """A set of ranks by which part of the epoch was taken: for each rank, which places of its share."""

    taken: list[Ranges]


def share(order: list[_T], stages: Sequence[Stage], num_replicas: int, rank: int, *, drop_last: bool) -> list[_T]:
    """The items of a rank after these stages, of an epoch in this order."""
    left = list(range(len(order)))  # places: an item may come more than once in an epoch
    for stage in stages:
        left = _left_over(left, stage.taken, drop_last=drop_last)
    return [order[place] for place in dealt(left, num_replicas, drop_last=drop_last)[rank]]


def in_batches(samples: list[Any], batch_size: int | None, *, drop_last: bool) -> Iterator[Any]:
    """The samples, in batches unless `batch_size` is None."""
    return iter(samples) if batch_size is None else iter(BatchSampler(samples, batch_size, drop_last))


def dealt(order: list[_T], num_replicas: int, *, drop_last: bool) -> list[list[_T]]:
    """The items of each rank in an epoch, by DistributedSampler's rule."""
    excess = len(order) % num_replicas
    if excess and drop_last:
        order = order[:-excess]
    elif excess:
        order = order + (order * num_replicas)[: num_replicas - excess]
    return [order[rank::num_replicas] for rank in range(num_replicas)]


def _left_over(places: list[int], taken: list[Ranges], *, drop_last: bool) -> list[int]:
    shares = dealt(places, len(taken), drop_last=drop_last)
    gone = {
        place for mine, ranges in zip(shares, taken, strict=True) for begin, end in ranges for place in mine[begin:end]
    }
    return [place for place in places if place not in gone]
