"""Warns of data that nobody divides: of a stream among its workers, and of a sampler's samples among ranks.

Promise: it warns only where batches have come twice and nothing that rayloader can see divides the data; once in a
process for each class of dataset and kind of sampler. No collective call is made: a rank notes its first batches in the
store of the process group, and waits for nobody.

NOTE [Certain]. Compared are the first two batches, by the digests that recovery uses; of a stream that is wrapped, in a
`ShuffleBuffer` for instance, the first two samples that the wrapper has read. They must differ from each other: data
that is the same all over shows nothing. A stream that has asked which worker reads it (`get_worker_info()`,
`get_shard_info()`) divides its data, even if its parts are copies; so does one that asks in `worker_init_fn`. Of ranks,
the indices must be the same too, drawn by torch's own samplers that know no ranks: parts of a dataset may have the same
indices, and ranks that shuffle by different seeds have others. A framework that divides the data puts a sampler of its
own there, or reads in one rank alone. A random stream, whose workers draw different numbers, is not noticed.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from typing import Any, Protocol

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rayloader._compat import default_store
from rayloader.errors import level_outside
from rayloader.host.shard_info import COMPARED
from rayloader.resume.ranks import is_part
from rayloader.resume.samplers import chain_of
from rayloader.resume.wrapped import innermost
from rayloader.task import Task

_UNDIVIDED = {BatchSampler, SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler}

_warned: set[tuple[str, ...]] = set()  # of these classes


class Watch(Protocol):
    """Looks at the first batches of an epoch."""

    def saw(self, task: Task | None) -> Watch | None:
        """The user has this task's batch; returns who looks at the next one, None if there is nothing more to see."""


def watch_of_workers(loader: Any, num_workers: int) -> Watch | None:
    """What must be looked at in the first epoch of a stream's workers; None: nothing."""
    kind = _name_of(innermost(loader.dataset))
    told = loader._ranks is not None and loader._ranks.num_replicas > 1  # then `Reader.has_read` tells of it
    return None if num_workers < 2 or told or (kind,) in _warned else _OfWorkers(kind, num_workers)


def watch_of_ranks(loader: Any) -> Watch | None:
    """What must be looked at in an epoch of a map-style dataset, where this process is one of several ranks."""
    chain = [*map(type, chain_of(loader._index_sampler))]
    names = _name_of(loader.dataset), *(sampler.__name__ for sampler in chain)
    is_divided = loader._ranks is not None or not _UNDIVIDED.issuperset(chain) or is_part(loader.dataset)
    return None if is_divided or names in _warned else _OfRanks(names, loader.dataset)


def _name_of(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


class _OfWorkers:
    """Compares the workers of a stream with each other."""

    def __init__(self, kind: str, num_workers: int) -> None:
        self._kind, self._num_workers = kind, num_workers
        self._left = COMPARED * num_workers  # batches to look at
        self._digests: dict[int, list[int]] = {}  # of the batches of each worker
        self._begun: dict[int, tuple[int, ...]] = {}  # what is compared of each

    def saw(self, task: Task | None) -> Watch | None:
        if task is None:
            return self
        if task.asked or task.digest is None:
            return None
        own = self._digests.setdefault(task.worker_id, [])
        if len(own) == COMPARED:  # another worker is slower
            return self
        own.append(task.digest)
        self._begun[task.worker_id] = begun = task.read or (*own,)
        same = sorted(worker_id for worker_id, others in self._begun.items() if others == begun)
        if len(begun) == COMPARED and len(same) > 1 and len({*begun}) > 1:
            _warn(
                (self._kind,),
                f"workers {same[0]} and {same[1]} began with the same {'samples' if task.read else 'batches'}, and "
                "the iterable dataset "
                f"{self._kind.rpartition('.')[2]} has not asked which part is whose, so that each of the "
                f"{self._num_workers} workers seems to read all of it; let its __iter__ read the part that "
                "rayloader.get_shard_info() tells, or use num_workers=1",
            )
            return None
        self._left -= 1
        return self if self._left else None


class _OfRanks:
    """Compares this rank with those that have begun before it."""

    def __init__(self, names: tuple[str, ...], dataset: Any) -> None:
        self._names, self._dataset = names, dataset
        self._digests: list[int] = []

    def saw(self, task: Task | None) -> Watch | None:
        if task is None:
            return self
        if task.digest is None or task.task_id != len(self._digests):
            return None
        self._digests.append(task.digest)
        if len(self._digests) < COMPARED:
            return self
        if len({*self._digests}) > 1 and (ranks := self._begun_by(task.indices.checksum)) > 1:
            kind, *samplers = self._names
            _warn(
                self._names,
                f"{ranks} ranks of torch.distributed began with the same batches: {' of '.join(samplers)} gives each "
                f"of them all of {kind.rpartition('.')[2]}; pass num_replicas=torch.distributed.get_world_size() to "
                "divide it, or num_replicas=1, rank=0 if each rank is to read all of it",
            )
        return None

    def _begun_by(self, checksum: int) -> int:
        """How many ranks have begun with these batches, and indices of this checksum."""
        with contextlib.suppress(Exception):  # of the dataset's `len`, or the program has ended its group meanwhile
            begun = repr((self._names, len(self._dataset), self._digests, checksum))
            key, store = f"rayloader/{zlib.crc32(begun.encode()):08x}", default_store()
            if store.add(f"{key}/{dist.get_rank()}", 1) == 1:  # this rank was not counted, for another loader perhaps
                return int(store.add(key, 1))
        return 0


def _warn(names: tuple[str, ...], text: str) -> None:
    _warned.add(names)
    warnings.warn(text, stacklevel=level_outside("rayloader", "torch"))
