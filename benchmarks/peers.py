"""The implementations that are compared.

Promise: `make` gives an iterable for a case; each `iter()` of it is one epoch of the case's batches. Each
implementation is imported only in the process that runs it. What cannot run a case raises `Unavailable` with the
reason. What an adapter changes beyond the import stands in `NOTES`.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data.dataloader import _DatasetKind

from cases import Case, Stored

NOTES = {
    "torch": "torch's DataLoader, fork",
    "torch-spawn": "torch's DataLoader, spawn",
    "torchdata": "torchdata's StatefulDataLoader, fork",
    "spdl": "SPDL's get_pytorch_dataloader, worker processes, in order",
    "grain": "Grain's mp_prefetch: worker processes, one thread each; batches are NumPy arrays in shared memory",
    "ray-data": "Ray Data's iter_torch_batches over the same arrays, stored already: a batch is a slice, nothing is "
    "fetched by the sample or collated",
    "rayloader": "rayloader.DataLoader, workers are Ray actors",
    "rayloader-fork": "rayloader.DataLoader, workers are forks",
    "floor": "as many processes at once as there are workers, each of which fetches and collates its share into four "
    "buffers in turn and delivers to nobody",
}
RAY_ALLOWED = {"rayloader", "ray-data"}
REQUIRED = {"torch", "torch-spawn", "rayloader", "rayloader-fork", "floor"}  # the others may be absent, or fail


class Unavailable(Exception):
    """This implementation cannot run this case."""


@dataclass(frozen=True)
class Job:
    """What a loader is made of; `extra` holds more of torch's arguments."""

    case: Case
    dataset: Any
    batches: int
    workers: int
    extra: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a loader that takes torch's."""
        return {
            "dataset": self.dataset,
            "batch_size": self.case.batch_size,
            "num_workers": self.workers,
            "collate_fn": self.case.collate_fn,
            **self.case.arguments,
            **self.extra,
        }

    @property
    def is_stream(self) -> bool:
        """Whether the dataset is an iterable one."""
        return isinstance(self.dataset, IterableDataset)

    def index_lists(self) -> list[list[int]]:
        """The indices of each batch."""
        size = self.case.batch_size
        return [list(range(first, first + size)) for first in range(0, self.batches * size, size)]

    def only_map_style(self, name: str) -> None:
        """Refuses streams and arguments beyond torch's basic ones."""
        if self.is_stream:
            raise Unavailable(f"{name} takes no iterable dataset")
        if more := {**self.case.arguments, **self.extra}:
            raise Unavailable(f"{name} has no {', '.join(more)}")


def make(name: str, case: Case, batches: int, workers: int, **extra: Any) -> Any:
    """The loader of an implementation for a case; of the floor, which is none, a `Floor`."""
    return make_for(name, case, case.dataset(batches), batches, workers, **extra)


def make_for(name: str, case: Case, dataset: Any, batches: int, workers: int, **extra: Any) -> Any:
    """The same for a dataset that exists."""
    return MAKERS[name](Job(case, dataset, batches, workers, extra))


def _torch(job: Job, start: str = "fork") -> Iterable[Any]:
    return DataLoader(**job.arguments, multiprocessing_context=start if job.workers else None)


def _torchdata(job: Job) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(**job.arguments, multiprocessing_context="fork" if job.workers else None)


def _rayloader(job: Job, workers: str = "ray") -> Iterable[Any]:
    from rayloader import DataLoader as RayDataLoader

    return RayDataLoader(**{"workers": workers, **job.arguments, **job.case.rayloader})


def _spdl(job: Job) -> Iterable[Any]:
    from spdl.dataloader import get_pytorch_dataloader

    job.only_map_style("get_pytorch_dataloader")
    return get_pytorch_dataloader(**job.arguments, in_order=True)


def _to_numpy(collate_fn: Callable[[list[Any]], Any], samples: Iterable[Any]) -> Any:
    """A batch as NumPy arrays over the same memory: only these travel through Grain's shared memory."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.numpy, collate_fn(list(samples)))


def _grain(job: Job) -> Iterable[Any]:
    import grain

    job.only_map_style("Grain")
    samples = grain.MapDataset.source(job.dataset)
    batches = samples.batch(
        job.case.batch_size, batch_fn=functools.partial(_to_numpy, job.case.collate_fn or default_collate)
    )
    options = grain.MultiprocessingOptions(num_workers=job.workers, per_worker_buffer_size=2)
    # By default each worker would read 500 batches ahead, on 16 threads: all of an epoch before its first batch.
    return batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)).mp_prefetch(options)


def _ray_data(job: Job) -> Iterable[Any]:
    import ray.data

    job.only_map_style("Ray Data")
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=job.workers, log_to_driver=False, include_dashboard=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
    length = job.batches * job.case.batch_size
    if isinstance(job.dataset, Stored):
        # The pool's block is named as often as an epoch goes through it: one copy in the store.
        pool = job.dataset.samples.whole.numpy()
        if length % len(pool):
            raise Unavailable(f"an epoch of {length} samples is no multiple of the {len(pool)} that exist")
        (images,) = ray.data.from_numpy(pool).to_arrow_refs()
        block = ray.put(ray.get(images).append_column("label", [[index % 10 for index in range(len(pool))]]))
        data = ray.data.from_arrow_refs([block] * (length // len(pool)))
    else:
        # With map tasks: whole blocks would be done before the first batch, at which the clock starts.
        raise Unavailable("only compared where the samples are arrays that exist")
    return _RayDataBatches(data, job.case.batch_size)


@dataclass(frozen=True)
class _RayDataBatches:
    data: Any
    batch_size: int

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data.iter_torch_batches(batch_size=self.batch_size))


BUFFERS = 4  # that a worker of the floor fills in turn: a trainer holds the batch before while the next is built


class _IntoReusedMemory:
    """torch's collate, with tensors stacked into the memory of the batch before the last ones."""

    def __init__(self) -> None:
        self.batches: list[list[torch.Tensor]] = [[] for _ in range(BUFFERS)]
        self.map = {**default_collate_fn_map, torch.Tensor: self._stack}
        self.number = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.stacks = self.batches[self.number % BUFFERS]
        self.number += 1
        self.position = 0
        return collate(samples, collate_fn_map=self.map)

    def _stack(self, tensors: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        if self.position == len(self.stacks):
            self.stacks.append(torch.stack(tensors))
        self.position += 1
        return torch.stack(tensors, out=self.stacks[self.position - 1])


class Floor:
    """The least that workers have to do. A case's own collate runs as it is, its heap kept for reuse (`FLOOR_ENV`)."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.collate_fn = job.case.collate_fn or _IntoReusedMemory()

    def seconds(self) -> float:
        """Seconds that the workers take for the case's epochs, all at once, after each one's first batches."""
        context = multiprocessing.get_context("fork")
        ready = context.Barrier(self.job.workers + 1)
        shares = [context.Process(target=self._work, args=(worker_id, ready)) for worker_id in range(self.job.workers)]
        for share in shares:
            share.start()
        ready.wait(START_LIMIT_S)
        begin = time.perf_counter()
        ready.wait(EPOCH_LIMIT_S)
        seconds = time.perf_counter() - begin
        for share in shares:
            share.join()
            if share.exitcode:
                raise RuntimeError(f"a process of the floor ended with status {share.exitcode}")
        return seconds

    def _work(self, worker_id: int, ready: Any) -> None:
        """In a process of its own: this worker's share, between two meetings with the others."""
        torch.set_num_threads(1)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker_id, num_workers=self.job.workers, seed=worker_id, dataset=self.job.dataset
        )
        # Else a collate of the case's own that calls torch's would get fresh shared memory for each batch.
        default_collate_fn_map[torch.Tensor] = lambda tensors, *, collate_fn_map=None: torch.stack(tensors)
        lists = self.job.index_lists()[worker_id :: self.job.workers]
        warm_up = _fetcher(self.job, self.collate_fn)
        for indices in lists[:BUFFERS]:
            warm_up.fetch(indices)
        ready.wait(START_LIMIT_S)
        for _ in range(self.job.case.epochs):
            fetcher = _fetcher(self.job, self.collate_fn)
            for indices in lists:
                fetcher.fetch(indices)
        ready.wait(EPOCH_LIMIT_S)


START_LIMIT_S, EPOCH_LIMIT_S = 60.0, 600.0
FLOOR_ENV = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def _fetcher(job: Job, collate_fn: Callable[[list[Any]], Any]) -> Any:
    """The way that torch has from a list of indices to a batch."""
    kind = _DatasetKind.Iterable if job.is_stream else _DatasetKind.Map
    return _DatasetKind.create_fetcher(kind, job.dataset, True, collate_fn, False)


MAKERS: dict[str, Callable[[Job], Any]] = {
    "torch": _torch,
    "torch-spawn": functools.partial(_torch, start="spawn"),
    "torchdata": _torchdata,
    "spdl": _spdl,
    "grain": _grain,
    "ray-data": _ray_data,
    "rayloader": _rayloader,
    "rayloader-fork": functools.partial(_rayloader, workers="fork"),
    "floor": Floor,
}
