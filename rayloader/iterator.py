"""What `iter(loader)` returns.

Promise: an `EpochIterator` owns a crew of actors and one `Epoch` at a time. Both end with the last batch, with the
loss of a worker, or with the iterator itself: by its last reference (the pin thread holds the epoch, never the
iterator), or at interpreter exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from rayloader import session
from rayloader.collate import changed_collate_fn_map
from rayloader.crew import Crew
from rayloader.epoch import Epoch, describe
from rayloader.errors import WorkerDiedError, add_note
from rayloader.pace import MAX_PLACES, Pace
from rayloader.pool import Pool, exit_begins, get_pool
from rayloader.prefetch import AutomaticPrefetch, DrawAhead, may_draw_ahead
from rayloader.process_state import ProcessState
from rayloader.schedule import Schedule
from rayloader.transport import codec, unpicklable
from rayloader.transport.mapped import Mappings
from rayloader.transport.memory import no_collection
from rayloader.worker import CARRY, Replica, Setup, Source


class EpochIterator(_BaseDataLoaderIter):
    """Iterates over a loader's batches, as torch's iterators do.

    There is one for each `iter()`, or one for all with persistent workers. It is not to be pickled, and of no use in a
    forked child.
    """

    def __init__(self, loader: Any) -> None:
        self._pid = os.getpid()
        self._crew: Crew | None = None
        self._epoch: Epoch | None = None
        super().__init__(loader)
        self._prefetch_factor: int = loader.prefetch_factor
        self._prefetch_bytes: int = loader.prefetch_bytes
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for EpochIterator, got "
                f"{self._prefetch_factor}; use num_workers=0 to load in-process"
            )
        self._in_order: bool = loader.in_order
        self._seeding: str = loader.seeding
        self._dynamic: bool = loader.scheduling == "dynamic"
        self._epochs = 0  # begun
        self._fresh_processes: bool = loader.fresh_processes
        self._arenas: bool = loader.arenas
        self._remote_args: dict[str, Any] = dict(loader.ray_remote_args or {})
        self._worker_init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            self._worker_init_fn = functools.partial(
                _sharding_worker_init_fn, self._worker_init_fn, self._world_size, self._rank
            )
        _live_iterators.add(self)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: TorchDataLoader[Any], first_iter: bool = False) -> None:
        """Begins an epoch. Persistent workers first finish what was submitted to them before, as torch's do."""
        resuming = self._crew is not None and self._crew.usable
        by_worker = self._seeding == "worker"  # then what a worker has built shows in what it builds next
        if self._epoch is not None:
            self._epoch.close(resuming=resuming and by_worker)
        # Without order, what a worker gets depends on when it is given it; and how far a stream was read ahead shows
        # where persistent workers go on. In both cases no deeper than torch.
        elastic = (
            isinstance(self._prefetch_factor, AutomaticPrefetch)
            and (self._in_order or self._dynamic)
            and not (self._persistent_workers and self._dataset_kind == _DatasetKind.Iterable)
            and may_draw_ahead(self._index_sampler)
        )
        try:
            if resuming:
                assert self._crew is not None
                assert self._epoch is not None
                super()._reset(loader, first_iter)
                for worker_id, actor in enumerate(self._crew.actors):
                    if not by_worker:
                        actor.drop(from_task=0)
                    actor.lane.abandon_unanswered()
                    undo_from = self._epoch.dropped.get(worker_id) if by_worker else 0
                    actor.resume(self._epochs, self._shared_seed, undo_from)
            else:
                self._crew = self._start_crew(loader, max_undone=MAX_PLACES if elastic and by_worker else 0)
                super()._reset(loader, first_iter)
            self._epochs += 1
            self._epoch = Epoch(
                self._crew,
                Schedule(
                    self._num_workers,
                    self._prefetch_factor,
                    in_order=self._in_order,
                    elastic=elastic,
                    dynamic=self._dynamic,
                ),
                DrawAhead(self._index_sampler, self._sampler_iter) if elastic else self._sampler_iter,
                paces=self._paces_of(loader, elastic=elastic),
                timeout=self._timeout,
                arenas=self._arenas,
                pin=functools.partial(pin_memory, device=self._pin_memory_device) if self._pin_memory else None,
                device_index=torch.accelerator.current_device_index() if self._pin_memory else None,
            )
            self._epoch.open()
        except BaseException:  # the sampler's or pickling's error, Ctrl-C: passed on
            if first_iter or not self._persistent_workers:
                self._close()  # no crew without an epoch that watches it
            elif self._epoch is not None:
                self._epoch.close()  # the workers keep their datasets for the next iter()
            raise

    def _paces_of(self, loader: TorchDataLoader[Any], *, elastic: bool) -> list[Pace]:
        """One a worker; where the depth is automatic they go on from the loader's last epoch."""
        if not elastic:
            max_tasks = max(1, self._prefetch_factor // 2) if self._in_order or self._dynamic else 1
            return [Pace(math.inf, max_tasks) for _ in range(self._num_workers)]
        new = [Pace(self._prefetch_bytes / self._num_workers, dynamic=self._dynamic) for _ in range(self._num_workers)]
        paces: list[Pace] = get_pool().remembered(loader).setdefault("paces", new)
        if [(p.worker_bytes, p.dynamic) for p in paces] != [(p.worker_bytes, p.dynamic) for p in new]:
            return new
        for pace in paces:
            pace.begin()
        return paces

    def _start_crew(self, loader: TorchDataLoader[Any], max_undone: int) -> Crew:
        pool = get_pool()
        crew = pool.acquire(loader, self._num_workers, self._remote_args, fresh=self._fresh_processes)
        try:
            sources = self._ship_replica(loader, pool, crew)
            process = ProcessState.capture(session.node_id())
            for worker_id, actor in enumerate(crew.actors):
                setup = Setup(
                    worker_id=worker_id,
                    num_workers=self._num_workers,
                    base_seed=int(self._base_seed),
                    seed_batches=self._seeding == "batch",
                    shared_seed=self._shared_seed,
                    dataset_kind=self._dataset_kind,
                    auto_collation=self._auto_collation,
                    drop_last=self._drop_last,
                    max_undone=max_undone if self._persistent_workers else 0,
                    process=process,
                    page=actor.page.address if actor.page is not None else None,
                )
                actor.start(setup, sources[worker_id])
        except BaseException:  # the actors were borrowed: they go back whatever happened
            crew.release(busy=True)
            raise
        return crew

    def _ship_replica(self, loader: TorchDataLoader[Any], pool: Pool, crew: Crew) -> list[Source]:
        with no_collection():
            mappings = Mappings()
            encoded = self._encode_replica(mappings)
            image = pool.image(loader, encoded, mappings)
        return crew.ship(image, encoded.carried)

    def _encode_replica(self, mappings: Mappings) -> codec.Encoded:
        replica = Replica(self._dataset, self._collate_fn, self._worker_init_fn, changed_collate_fn_map())
        try:
            return codec.encode(replica, carry=CARRY, mapped=mappings)
        except Exception as error:  # the user's objects may raise anything: name the culprit and pass it on
            for name in ("dataset", "collate_fn", "worker_init_fn", "collate_fn_map"):
                if (explanation := unpicklable.explain(getattr(replica, name), name)) is not None:
                    add_note(error, f"It cannot be sent to the workers: {explanation}")
            raise

    def __next__(self) -> Any:
        if torch._C._autograd._profiler_enabled() or self._IterableDataset_len_called is not None:
            return super().__next__()
        data = self._next_data()  # spares what torch does for its profiler, as much as a small batch's whole way here
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if os.getpid() != self._pid:
            assert self._crew is not None
            self._crew.check_session()  # says why this process cannot go on
        if self._epoch is None:
            raise StopIteration
        try:
            delivery = self._epoch.next()
        except WorkerDiedError:
            self._release()
            raise
        if delivery is None:
            if not self._persistent_workers:
                self._release()
            raise StopIteration
        if isinstance(delivery.data, ExceptionWrapper):
            try:
                delivery.data.reraise()
            except BaseException as error:  # the user's exception, whatever it is
                assert self._crew is not None
                add_note(error, describe(delivery.task, self._crew))
                raise
        return delivery.data

    def _release(self) -> None:
        """Gives the crew back: idle after the last batch, otherwise perhaps at work."""
        if self._crew is None:
            return
        busy = self._epoch is None or not self._epoch.finished
        lost = [] if self._epoch is None or self._epoch.failure is None else [self._epoch.failure.worker_id]
        try:
            if self._epoch is not None:
                self._epoch.close()
        finally:
            self._crew.release(busy=busy, lost=range(self._num_workers) if self._fresh_processes else lost)

    def _close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has neither our locks in order nor our threads
            self._release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # by then threads are frozen, globals may be gone, and `_at_exit` has done it
            self._close()


_live_iterators: weakref.WeakSet[EpochIterator] = weakref.WeakSet()


def close_all() -> None:
    """Ends what every live iterator has under way; they raise from then on."""
    for iterator in list(_live_iterators):
        with contextlib.suppress(Exception):  # one that cannot be closed must not keep the others open
            iterator._close()


def _at_exit() -> None:
    exit_begins()
    close_all()


# Runs before the pool's handler, which was registered before it: threads end while there is still something to talk to.
atexit.register(_at_exit)
