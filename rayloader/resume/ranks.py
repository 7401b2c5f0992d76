"""Loaders of several ranks: each rank's part of a sampler's items, and of the rest of an epoch that others began.

Promise: independent of Ray and of workers. If the ranks of a job create their loaders alike, except for `rank`, and set
the same epoch, they draw the same order, and each gets its own part of it: disjoint parts of equal size, except for
items that are repeated to make them equal. A part of something is not divided again.

When an epoch goes on with another number of ranks, all its items that no rank had taken go to one of the new ranks, and
no others, by the rule of torch's DistributedSampler. Items are samples, or whole batches if a batch sampler gives them.

NOTE [One order]: if ranks draw different orders, their parts overlap, and nothing shows it. So an order does not
depend on the global random generators, which differ from rank to rank: while it is drawn they are seeded by seed and
epoch, as DistributedSampler seeds its own, and afterwards they are restored. A generator that a sampler holds is the
program's: it has to be in the same state in all ranks. The list of all ranks' states shows whether it was: if not, it
cannot be loaded with another number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from rayloader.options import check_whole
from rayloader.random.generators import RandomState
from rayloader.resume.samplers import (
    QUIET_SAMPLERS,
    SHARDS,
    Planned,
    Samplers,
    Stage,
    chain_of,
    part_of,
    tell_epoch,
)

_T = TypeVar("_T")

# Attributes by which samplers and datasets show that they are parts: torch's and those modelled on it; Accelerate's;
# Megatron's and others.
_NUMBERS = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


class Shard(DistributedSampler):  # type: ignore[type-arg]  # whose parameters are torch's affair
    """A rank's part of a sampler's items, or of the batches of a batch sampler.

    It is one of torch's DistributedSamplers, so that frameworks that look for one leave it alone, and set its
    epoch. The differences: `shuffle` and `dataset` are the sampler's own business, and the order of an epoch is drawn
    by the first `next()`. It is drawn as a whole, so the sampler must end.

    Args:
        sampler: the whole one; it has a length.
        num_replicas: how many parts there are.
        rank: which of them this is.
        seed: of the global generators while the sampler draws, together with the epoch; see NOTE [One order].
        drop_last: leave out items that do not fill all parts, rather than repeat the first ones.
    """

    def __init__(self, sampler: Any, num_replicas: int, rank: int, *, seed: int = 0, drop_last: bool = False) -> None:
        try:
            len(sampler)
        except (TypeError, NotImplementedError):
            raise TypeError(
                f"with num_replicas a sampler must have a length, and {type(sampler).__name__} has none: the whole "
                "order of an epoch is drawn at once, to give all ranks the same number of items. Give it __len__(); or "
                "let an endless sampler yield only this rank's items, and leave num_replicas and rank out"
            ) from None
        self.sampler = sampler
        self.num_replicas, self.rank = num_replicas, rank
        self.seed, self.drop_last = seed, drop_last
        self.epoch = 0
        self.is_random = False  # whether the last order was drawn from the global generators

    def __iter__(self) -> Iterator[Any]:
        yield from dealt(self.order(), self.num_replicas, drop_last=self.drop_last)[self.rank]

    def __len__(self) -> int:
        if isinstance(self.sampler, Planned):
            return len(self.order()) // self.num_replicas
        rest = 0 if self.drop_last else self.num_replicas - 1
        return (len(self.sampler) + rest) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, as torch's does, also of samplers inside that have `set_epoch`."""
        self.epoch = epoch
        tell_epoch(chain_of(self.sampler), epoch)

    def order(self, num_replicas: int | None = None) -> Sequence[Any]:
        """The whole sampler's items in this epoch, as dealt out to that number of ranks; None: to its own."""
        if isinstance(self.sampler, Planned):
            self.is_random = True
            return self.sampler.order_for(num_replicas or self.num_replicas)
        with _seeded(self.seed + self.epoch):
            before = RandomState.capture([])
            length = len(self.sampler)
            given = [_kept(item) for item in itertools.islice(self.sampler, length + 1)]
            changes = RandomState.capture([]).since(before)
        self.is_random = any(part is not None for part in changes)
        if len(given) > length:
            raise ValueError(
                f"the sampler {type(self.sampler).__name__} gives more than the {length} that its len() says: with "
                "num_replicas its length must be right, because an endless sampler would be drawn for ever. Correct "
                "__len__(); or let the sampler yield only this rank's items, and leave num_replicas and rank out"
            )
        return given


SHARDS.add(Shard)
QUIET_SAMPLERS.add(Shard)


class Ranks(NamedTuple):
    """Which part of the data belongs to a loader."""

    num_replicas: int
    rank: int
    seed: int


def ranks_of(num_replicas: int | None, rank: int | None, seed: int) -> Ranks | None:
    """Interprets these arguments of a loader; None: it has all of the data.

    Raises:
        ValueError: one is out of range, or missing and not known to torch.distributed.
    """
    seed = check_whole("seed", seed, 0)
    if num_replicas is None and rank is None:
        if seed:
            raise ValueError(
                f"seed={seed} is the seed of the order that several ranks share, and has no effect without "
                "num_replicas and rank; use generator=torch.Generator().manual_seed(...), or leave it out"
            )
        return None
    if (num_replicas is None or rank is None) and not (dist.is_available() and dist.is_initialized()):
        given, missing = ("rank", "num_replicas") if num_replicas is None else ("num_replicas", "rank")
        raise ValueError(
            f"{given} was given without {missing}, which torch.distributed tells only after init_process_group(); pass "
            f"{missing} too"
        )
    rank = check_whole("rank", dist.get_rank() if rank is None else rank, 0)
    num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
    return Ranks(check_whole("num_replicas", num_replicas, rank + 1), rank, seed)


def of_rank(
    dataset: Any, shuffle: bool | None, sampler: Any, batch_sampler: Any, drop_last: bool, *, ranks: Ranks, own: Any
) -> tuple[bool | None, Any, Any]:
    """The arguments `shuffle`, `sampler` and `batch_sampler` of a loader for the rank's part, from those for all.

    An iterable dataset chooses its part itself, see `get_shard_info`.

    Args:
        dataset: of the loader.
        shuffle: argument of the loader.
        sampler: argument of the loader.
        batch_sampler: argument of the loader.
        drop_last: argument of the loader.
        ranks: whose part.
        own: the index sampler of the loader that is being rebuilt here, if so: the parts in it are ours.

    Raises:
        ValueError: it is a part already.
    """
    order = shuffle, sampler, batch_sampler
    parts = [one for one in chain_of(sampler if batch_sampler is None else batch_sampler) if is_part(one)]
    if parts and all(any(part is known for known in chain_of(own)) for part in parts):
        return order
    is_iterable = isinstance(dataset, IterableDataset)
    if is_iterable and is_part(dataset):
        parts.append(dataset)
    num_replicas, rank, seed = ranks
    if parts and num_replicas > 1:
        _refuse(parts[0])
    if is_iterable or parts:
        return order
    if batch_sampler is not None:
        drop_last = bool(getattr(batch_sampler, "drop_last", False))
        return shuffle, sampler, Shard(batch_sampler, num_replicas, rank, seed=seed, drop_last=drop_last)
    if sampler is not None:
        return shuffle, Shard(sampler, num_replicas, rank, seed=seed, drop_last=drop_last), None
    return None, DistributedSampler(dataset, num_replicas, rank, bool(shuffle), seed, drop_last), None


def check_once(index_sampler: Any) -> None:
    """Raises ValueError if a sampler is a part of a part."""
    parts = [sampler for sampler in chain_of(index_sampler) if is_part(sampler)]
    if len(parts) > 1:
        _refuse(parts[0])


def _refuse(part: Any) -> NoReturn:
    raise ValueError(
        f"the data would be divided among the ranks twice, by {type(part).__name__} and by num_replicas and rank, and "
        "most of it would never be read: leave num_replicas and rank out, or pass a sampler, or dataset, that gives "
        "everything. A framework that distributes the data itself (Accelerate; Lightning, unless "
        "use_distributed_sampler=False) needs a loader without num_replicas and rank"
    )


def is_part(obj: Any) -> bool:
    """Whether a sampler, or a dataset, gives only one rank's part of something, as far as its attributes show."""
    return isinstance(obj, DistributedSampler) or any(
        all(isinstance(getattr(obj, name, None), int) for name in names) for names in _NUMBERS
    )


class SameOrder:
    """Notices that a program repeats a random order because it does not set the epoch."""

    def __init__(self) -> None:
        self._begun: int | None = None  # epoch; None: unknown, or none has begun
        self._warned = False

    def begins(self, index_sampler: Any, *, finished: bool) -> None:
        """A loader with ranks begins to iterate; `finished`: whether the previous epoch was taken to its end."""
        part = part_of(index_sampler)
        if part is None:
            return
        is_random = part.is_random if isinstance(part, Shard) else part.shuffle
        if finished and is_random and part.epoch == self._begun and not self._warned:
            self._warned = True
            warnings.warn(
                f"this epoch has the same random order as the one before, because its number is still {part.epoch}; "
                "call set_epoch(epoch) of the loader before each epoch, in all ranks",
                stacklevel=3,
            )
        self._begun = part.epoch


def order_of(part: DistributedSampler[Any], num_replicas: int | None = None) -> Sequence[Any]:
    """All items of the ranks in this epoch, in order, before any are repeated or left out.

    Args:
        part: of one rank.
        num_replicas: how many ranks began the epoch; None: as many as `part` has.
    """
    if isinstance(part, Shard):
        return part.order(num_replicas)
    alone: DistributedSampler[Any] = DistributedSampler(part.dataset, 1, 0, part.shuffle, part.seed)
    alone.set_epoch(part.epoch)
    return list(alone)


def _kept(item: Any) -> Any:
    """An item that does not change: a sampler may reuse its list for the next batch."""
    if type(item) is int:
        return item
    if type(item) is list and {*map(type, item)} <= {int}:  # takes a tenth of the time of deepcopy
        return item.copy()
    return copy.deepcopy(item)


def _seeded(seed: int) -> contextlib.ExitStack:
    """Temporarily seeds the global generators; not CUDA's, which no sampler uses."""
    undo = contextlib.ExitStack()  # not `contextmanager`, for the reason given in epoch/local.py
    undo.callback(RandomState.capture([]).restore, [])
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    return undo


def share(order: Sequence[_T], stages: Sequence[Stage], num_replicas: int, rank: int, *, drop_last: bool) -> list[_T]:
    """The items of a rank after these stages, of an epoch in this order."""
    left = list(range(len(order)))  # places: an item may come more than once in an epoch
    for stage in stages:
        left = _left_over(left, stage, drop_last=drop_last)
    return [order[place] for place in dealt(left, num_replicas, drop_last=drop_last)[rank]]


def in_batches(samples: list[Any], batch_size: int | None, *, drop_last: bool) -> Iterator[Any]:
    """The samples, in batches unless `batch_size` is None."""
    return iter(samples) if batch_size is None else iter(BatchSampler(samples, batch_size, drop_last))


def dealt(order: Sequence[_T], num_replicas: int, *, drop_last: bool) -> list[Sequence[_T]]:
    """The items of each rank in an epoch, by DistributedSampler's rule."""
    excess = len(order) % num_replicas
    if excess and drop_last:
        order = order[:-excess]
    elif excess:
        order = [*order, *([*order] * num_replicas)[: num_replicas - excess]]
    return [order[rank::num_replicas] for rank in range(num_replicas)]


def _left_over(places: list[int], taken: Stage, *, drop_last: bool) -> list[int]:
    shares = dealt(places, len(taken), drop_last=drop_last)
    gone = {
        place for mine, ranges in zip(shares, taken, strict=True) for begin, end in ranges for place in mine[begin:end]
    }
    return [place for place in places if place not in gone]


def iterator_of(samplers: Samplers, stages: Sequence[Stage]) -> Any:
    """The index sampler's iterator; after stages, over what is left for this rank."""
    if not stages:
        return iter(samplers.index_sampler)
    part = samplers.part
    assert part is not None
    order = order_of(part, len(stages[0]))
    mine = share(order, stages, part.num_replicas, part.rank, drop_last=part.drop_last)
    return in_batches(mine, samplers.batch_size, drop_last=samplers.drop_last)
