"""The rest of an epoch dealt out to another number of ranks.

Promise: every sample of the epoch that no rank had taken goes to one of the new ranks, and no other; but for what
`DistributedSampler` itself repeats, or with `drop_last` leaves out, to give all ranks the same number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler

Ranges = list[tuple[int, int]]  # of places in a rank's share: the first, and the one after the last


class Stage(NamedTuple):
    """A world in which part of the epoch was taken: which places of its share by each of its ranks."""

    taken: list[Ranges]


def share(
    sampler: DistributedSampler[Any], epoch: int | None, stages: list[Stage], num_replicas: int, rank: int
) -> list[int]:
    """What a rank of a world gets after these stages, in order; `sampler` says how the epoch was shuffled."""
    alone: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=False
    )
    alone.set_epoch(sampler.epoch if epoch is None else epoch)
    left = list(alone)
    for stage in stages:
        left = _left_over(left, stage.taken, drop_last=sampler.drop_last)
    return _dealt(left, num_replicas, drop_last=sampler.drop_last)[rank]


def in_batches(samples: list[int], batch_size: int | None, *, drop_last: bool) -> Iterator[Any]:
    """The samples, in batches unless `batch_size` is None."""
    return iter(samples) if batch_size is None else iter(BatchSampler(samples, batch_size, drop_last))


def _dealt(samples: list[int], num_replicas: int, *, drop_last: bool) -> list[list[int]]:
    """What each rank gets of an epoch, by DistributedSampler's rule."""
    excess = len(samples) % num_replicas
    if excess and drop_last:
        samples = samples[:-excess]
    elif excess:
        samples = samples + (samples * num_replicas)[: num_replicas - excess]
    return [samples[rank::num_replicas] for rank in range(num_replicas)]


def _left_over(samples: list[int], taken: list[Ranges], *, drop_last: bool) -> list[int]:
    dealt = _dealt(samples, len(taken), drop_last=drop_last)
    gone = {
        sample for mine, ranges in zip(dealt, taken, strict=True) for begin, end in ranges for sample in mine[begin:end]
    }
    return [sample for sample in samples if sample not in gone]
