"""The rest of an epoch dealt out to another number of ranks.

Promise: every sample of the epoch that no rank had taken goes to one of the new ranks, and no other; but for what
`DistributedSampler` itself repeats, or with `drop_last` leaves out, to give all ranks the same number of samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DistributedSampler


class Stage(NamedTuple):
    """A world in which part of the epoch was taken: how many samples by each of its ranks."""

    taken: list[int]


def rest(sampler: DistributedSampler[Any], stages: list[Stage]) -> list[int]:
    """This rank's samples after these stages, in order."""
    alone: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=False
    )
    alone.set_epoch(sampler.epoch)
    left = list(alone)
    for stage in stages:
        left = _left_over(left, stage.taken, drop_last=sampler.drop_last)
    return _dealt(left, sampler.num_replicas, drop_last=sampler.drop_last)[sampler.rank]


def batches(sampler: DistributedSampler[Any], stages: list[Stage], batch_size: int | None, *, drop_last: bool) -> Any:
    """The same as an iterator of indices, in batches unless `batch_size` is None."""
    left = rest(sampler, stages)
    return iter(left) if batch_size is None else iter(BatchSampler(left, batch_size, drop_last))


def _dealt(samples: list[int], num_replicas: int, *, drop_last: bool) -> list[list[int]]:
    """What each rank gets of an epoch, by DistributedSampler's rule."""
    excess = len(samples) % num_replicas
    if excess and drop_last:
        samples = samples[:-excess]
    elif excess:
        samples = samples + (samples * num_replicas)[: num_replicas - excess]
    return [samples[rank::num_replicas] for rank in range(num_replicas)]


def _left_over(samples: list[int], taken: list[int], *, drop_last: bool) -> list[int]:
    dealt = _dealt(samples, len(taken), drop_last=drop_last)
    gone = {sample for mine, count in zip(dealt, taken, strict=True) for sample in mine[:count]}
    return [sample for sample in samples if sample not in gone]
