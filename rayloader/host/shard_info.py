"""Which part of an iterable dataset belongs to this worker of this rank: `rayloader.get_shard_info`.

Promise: independent of Ray. The answer for a rank and worker id is always the same, in whatever process the
worker runs, and after a resumption. If it could be wrong without notice, an error is raised.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterDataPipe, get_worker_info

from rayloader._compat import torch_worker
from rayloader.errors import RayloaderError
from rayloader.resume.digest import digest
from rayloader.resume.samplers import trains_in_a_group

# What is compared of each worker, to tell whether several read the same: batches, or samples of a wrapped stream.
COMPARED = 2

logger = logging.getLogger("rayloader")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of the data is this worker's; see `get_shard_info`."""

    index: int  #: of the part, from 0: `rank * num_workers + worker_id`.
    count: int  #: how many parts there are: `num_replicas * num_workers`.
    rank: int  #: of this process among those that train together.
    num_replicas: int  #: how many ranks there are.
    worker_id: int  #: of this worker among those of its loader; 0 without workers.
    num_workers: int  #: how many workers the loader has; 1 without workers.


def get_shard_info() -> ShardInfo:
    """Which part of the data this worker must read: one of `num_replicas * num_workers`.

    It extends torch's `get_worker_info()` to several ranks, and is meant for the `__iter__` of iterable
    datasets::

        def __iter__(self):
            shard = rayloader.get_shard_info()
            yield from itertools.islice(self.records(), shard.index, None, shard.count)

    Rank and number of ranks are the loader's `rank` and `num_replicas`. If it has none they are 0 and 1, unless
    torch.distributed has several ranks. In a loop over a loader without workers, and outside of any loader, the reader
    is worker 0 of 1.

    Raises:
        RayloaderError: torch.distributed has several ranks, and the loader was not given its rank; or this is
            a worker of torch's own loader. All ranks would read the same.
    """
    worker = get_worker_info()
    if worker is None:
        return (_local if _local is not None else Reader(_ranks_of(None))).info()
    if _working is None or _working[0] is not worker:
        raise RayloaderError(
            "get_shard_info() does not know the rank of a worker of torch's own DataLoader; read the dataset with "
            "rayloader.DataLoader, and call rayloader.patch() where a framework creates the loaders"
        )
    return _working[1].info()


class Reader:
    """The reader of a dataset.

    Args:
        ranks: its rank, and the number of ranks; None: the loader was not told, and there are several.
        worker_id: its number among the workers.
        num_workers: how many workers there are.

    Attributes:
        asked: whether the dataset has asked for its part.
        was_asked_for: whether it has asked for that, or for something else about its worker.
        read: digests of the first samples that one of rayloader's wrappers has read from its stream.
    """

    def __init__(self, ranks: tuple[int, int] | None, worker_id: int = 0, num_workers: int = 1) -> None:
        self._ranks, self._worker_id, self._num_workers = ranks, worker_id, num_workers
        self.asked = self.was_asked_for = False
        self.read: tuple[int, ...] = ()

    def info(self) -> ShardInfo:
        """The part that the dataset must read."""
        if self._ranks is None:
            raise RayloaderError(
                "get_shard_info() was called where torch.distributed has several ranks, and the loader was not told "
                "which of them it is, so that all would read the same; pass num_replicas=dist.get_world_size() to the "
                "DataLoader, or num_replicas=1, rank=0 if something else divides the data among the ranks. A loader "
                "that was told, and that a framework has rebuilt, needs rayloader.patch() at the start of the program"
            )
        self.asked = self.was_asked_for = True
        rank, num_replicas = self._ranks
        index = rank * self._num_workers + self._worker_id
        count = num_replicas * self._num_workers
        return ShardInfo(index, count, rank, num_replicas, self._worker_id, self._num_workers)

    def worker_info(self, seed: int, dataset: Any) -> Any:
        """What `get_worker_info()` is to return."""
        info = _WorkerInfo(id=self._worker_id, num_workers=self._num_workers, seed=seed, dataset=dataset)
        object.__setattr__(info, "_reader", self)  # torch's class allows no attributes
        return info

    def attach(self, worker_info: Any) -> None:
        """Makes this the reader as long as `get_worker_info()` returns `worker_info`."""
        global _working
        _working = worker_info, self

    def note(self, sample: Any) -> Reader | None:
        """Notes a sample that a wrapper has read from its stream; returns who is told the next one, None: nobody."""
        if len(self.read) < COMPARED:
            self.read += (digest(sample),)
        return self if len(self.read) < COMPARED else None

    def has_read(self, dataset: Any) -> None:
        """After reading: warns, in one worker and once, if it did not ask and all ranks seem to read the same."""
        several = self._ranks is not None and self._ranks[1] > 1
        if not several or self.asked or self._worker_id or isinstance(dataset, IterDataPipe):
            return
        if type(dataset).__qualname__ not in _warned_of:
            _warned_of.add(type(dataset).__qualname__)
            logger.warning(
                "rayloader: the loader has num_replicas, and its iterable dataset %s did not ask for its part by "
                "get_shard_info(), so that all ranks read the same; let its __iter__ read the part that "
                "get_shard_info() returns, or leave num_replicas and rank out if it knows its part otherwise",
                type(dataset).__name__,
            )

    def reads(self) -> contextlib.ExitStack:
        """Makes this the reader for a while, in a process without workers."""
        undo = contextlib.ExitStack()  # not `contextmanager`, for the reason given in epoch/local.py
        undo.callback(_set_local, _local)
        _set_local(self if _local is None else _local)  # a loader in a dataset reads for the reader of that dataset
        return undo


class _WorkerInfo(torch_worker.WorkerInfo):
    """torch's, which notices that it is read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            reader = object.__getattribute__(self, "__dict__").get("_reader")
            if reader is not None:
                reader.was_asked_for = True
        return super().__getattribute__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in ("id", "num_workers", "seed", "dataset")}
        return functools.partial(torch_worker.WorkerInfo, **fields), ()


_warned_of: set[str] = set()  # kinds of datasets
_local: Reader | None = None
_working: tuple[Any, Reader] | None = None


def _set_local(reader: Reader | None) -> None:
    global _local
    _local = reader


def nobody_reads() -> None:
    """Clears the reader, when the worker process drops its workers and their datasets."""
    global _working
    _working = None


def ranks_told(loader: Any) -> tuple[int, int] | None:
    """The rank of a loader, and the number of ranks; None if it was not told, and there are several."""
    return _ranks_of(None if loader._ranks is None else (loader._ranks.rank, loader._ranks.num_replicas))


def _ranks_of(given: tuple[int, int] | None) -> tuple[int, int] | None:
    if given is not None:
        return given
    return None if trains_in_a_group() else (0, 1)
