"""What `iter(loader)` returns.

Promise: an `EpochIterator` owns a crew of actors and one `Epoch` at a time. Both end with the last batch, with the
loss of a worker, or with the iterator itself: by its last reference (the pin thread holds the epoch, never the
iterator), or at interpreter exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from rayloader import session
from rayloader.collate import changed_collate_fn_map
from rayloader.crew import Crew
from rayloader.epoch import Epoch, describe
from rayloader.errors import WorkerDiedError, add_note
from rayloader.pool import Pool, exit_begins, get_pool
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
        if self._prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for EpochIterator, got "
                f"{self._prefetch_factor}; use num_workers=0 to load in-process"
            )
        self._in_order: bool = loader.in_order
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
        if self._epoch is not None:
            self._epoch.close()
        try:
            if self._crew is not None and self._crew.usable:
                super()._reset(loader, first_iter)
                for actor in self._crew.actors:
                    actor.lane.abandon_unanswered()
                    actor.resume(self._shared_seed)
            else:
                self._crew = self._start_crew(loader)
                super()._reset(loader, first_iter)
            self._epoch = Epoch(
                self._crew,
                Schedule(self._num_workers, self._prefetch_factor, in_order=self._in_order),
                self._sampler_iter,
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

    def _start_crew(self, loader: TorchDataLoader[Any]) -> Crew:
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
                    shared_seed=self._shared_seed,
                    dataset_kind=self._dataset_kind,
                    auto_collation=self._auto_collation,
                    drop_last=self._drop_last,
                    process=process,
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
