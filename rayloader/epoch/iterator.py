"""What `iter(loader)` returns.

Promise: an `EpochIterator` owns a fleet of workers and one `Engine` at a time. Both end with the last batch, with the
loss of a worker, or with the iterator itself: by its last reference (its thread holds parts of the epoch, never the
iterator), or at interpreter exit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, MapDataPipe

from rayloader._compat import (
    BaseIterator,
    DatasetKind,
    ExceptionWrapper,
    default_collate_fn_map,
    profiler_enabled,
    sharding_worker_init_fn,
)
from rayloader.epoch.ahead import Delivery
from rayloader.epoch.engine import Engine
from rayloader.epoch.hosts import fleet_for, images
from rayloader.epoch.schedule import Schedule
from rayloader.errors import (
    OfOneProcess,
    RayloaderError,
    SkipLimitError,
    WorkerDiedError,
    add_note,
    shorten,
    warning_at_the_users_line,
)
from rayloader.host.shard_info import ranks_told
from rayloader.options import Options, target_of
from rayloader.protocol import Replica, Setup
from rayloader.resume.journal import Resumed
from rayloader.resume.position import new_position
from rayloader.resume.samplers import Resuming, trains_in_a_group
from rayloader.task import NothingSkipped, Task
from rayloader.workers.fleet import Fleet
from rayloader.workers.janitor import ends_with_program, janitor

if TYPE_CHECKING:
    from rayloader.resume.state import State

logger = logging.getLogger("rayloader")


def _delivery_of(target: Any, ahead: int, pins_for: str | None) -> Delivery:
    """What is done to the batches of an epoch."""
    if target is None and pins_for is None:
        return Delivery()
    from rayloader.gpu.to_device import delivery_of

    return delivery_of(target, ahead, pins_for)


class EpochIterator(OfOneProcess, BaseIterator):
    """Iterates over a loader's batches, as torch's iterators do.

    There is one for each `iter()`, or one for all with persistent workers. It cannot be pickled, or used in a forked
    child.
    """

    _fleet: Fleet | None = None  # here, because `__del__` may run after an interrupt in `__init__`'s first line
    _engine: Engine | None = None
    _adopted: Any = None  # see `adopted.py`: stands for a loader of another class, which is what torch's code passes
    _watch: Any = None  # of what its first batches show, see `undivided.py`
    _workers = ()  # libraries that keep an iterator ask for torch's processes, and end it by `_shutdown_workers()`

    def __init__(self, loader: Any, num_workers: int, state: State | None, skips: NothingSkipped | None = None) -> None:
        self._pid = os.getpid()
        self._skips = skips  # what it skips in place of the loader's `skip_steps`
        self._options = Options.of(loader)  # before torch draws anything
        self._target = target_of(self._options.device)
        self._task: Task | None = None  # whose batch `_next_data` has just returned
        self._user_error: BaseException | None = None  # from a worker, while `__next__` raises it
        saved, self.num_workers = None, num_workers  # torch's number: the batches depend on it
        if state is not None:
            from rayloader.resume.checkpoint import continuation

            saved, self.num_workers = continuation(loader, state, num_workers)
        # torch warns where it cannot pin; other warnings in there are of the program's own code.
        with warning_at_the_users_line() if loader.pin_memory else contextlib.nullcontext():
            super().__init__(loader if saved is None else Resuming(loader))  # type: ignore[arg-type]
        self._index_sampler = loader._index_sampler
        if self.num_workers > num_workers:
            logger.warning(
                "rayloader: the rest of this epoch has %d workers, each with a process of its own, instead of "
                'num_workers=%d: so many began it, each with a random stream of its own; with seeding="batch", and a '
                "map-style dataset, any number can continue an epoch",
                self.num_workers,
                num_workers,
            )
        self._num_workers = self.num_workers
        self._worker_init_fn = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe) and loader._ranks is not None:
            self._world_size, self._rank, _ = loader._ranks  # otherwise those of torch.distributed
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            self._worker_init_fn = functools.partial(
                sharding_worker_init_fn, self._worker_init_fn, self._world_size, self._rank
            )
        self._iterable = self._dataset_kind == DatasetKind.Iterable
        self.position = new_position(loader, state, int(self._base_seed), self.num_workers)
        self._redeal = state.redeal if state is not None else None
        self._saved: Any = None  # the sampler's iterator of an epoch that is to be continued
        if saved is not None:
            from rayloader.resume.saved import move_to

            self._saved = move_to(self.position, saved)
            begin = self.position.begin
            self._base_seed, self._shared_seed = begin.base_seed, begin.shared_seed
        _live_iterators.add(self)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begins an epoch. Persistent workers first finish the tasks submitted to them before, as torch's do."""
        loader = loader if self._adopted is None else self._adopted
        if not first_iter:  # the program may have set another one, or another may be the current one
            self._target = target_of(loader.device)
        pins_for = (self._pin_memory_device or "cuda") if self._pin_memory else None  # torch 2.6 names no CUDA
        self._delivery = _delivery_of(self._target, self._options.prefetch_to_device, pins_for)
        lives = self._end_epoch(first_iter)
        try:
            if not lives:
                self._fleet = self._start_fleet(loader)
            saved, self._saved = self._saved, None
            if saved is not None and not self.position.finished:  # the rest of the epoch in which a state was saved
                self._sampler_iter, self._num_yielded = saved, self.position.delivered
                self.position.read_skips(loader, self._skips)
            else:
                self._begin_epoch(loader, first_iter, lives)
            self._engine = self._new_engine(loader)
            self._engine.open(fresh=not lives)
            loader._dataset_epoch = None  # the workers have it now
        except BaseException as error:  # the sampler's or pickling's error, Ctrl-C: passed on
            if first_iter or not self._persistent_workers or not isinstance(error, Exception):
                self._close()  # no fleet without an engine that watches it; after an interrupt its state is unknown
            elif self._engine is not None:
                self._engine.close()  # the workers keep their datasets for the next iter()
            raise

    def _watch_of(self, loader: Any) -> Any:
        """What must be looked at where several workers read a stream, or several ranks something else."""
        if not (self._num_workers > 1 if self._iterable else trains_in_a_group()):
            return None
        from rayloader.epoch.undivided import watch_of_ranks, watch_of_workers

        return watch_of_workers(loader, self._num_workers) if self._iterable else watch_of_ranks(loader)

    def _end_epoch(self, first_iter: bool) -> bool:
        """Ends the previous epoch, if there was one; returns whether its workers live, and can continue."""
        if self._engine is not None and self._engine.broken:
            logger.warning("rayloader: an epoch was interrupted; iter() starts fresh workers")
            self._release()
        lives = self._fleet is not None and self._fleet.usable
        if not lives and not first_iter:
            self.position.restarts()
        if self._engine is not None:
            self._engine.close(resuming=lives)
        return lives

    def _begin_epoch(self, loader: Any, first_iter: bool, lives: bool) -> None:
        """Begins a new epoch, drawn by a new iterator of the sampler."""
        # The same workers have had an epoch, in this run or in the one that saved the state.
        follows = lives or self.position.finished
        # torch's argument may be any object that is true or false.
        self.position.begins(bool(self._persistent_workers) and follows)
        self.position.read_skips(loader, self._skips)
        super()._reset(loader, first_iter)
        redeal, self._redeal = self._redeal, None
        if redeal is not None:
            self._sampler_iter = self.position.redeals(redeal)
        if follows:
            self._resume_workers(lives, loader._dataset_epoch)
        elif self._skips is None:
            self._watch = self._watch_of(loader)

    def _new_engine(self, loader: Any) -> Engine:
        assert self._fleet is not None
        position, options = self.position, self._options
        self._tally = loader._recorder.begins(self, self._num_workers, options.prefetch_factor, position.epoch_of_run)
        schedule = Schedule(
            self._num_workers,
            options.prefetch_factor,
            in_order=options.in_order,
            dynamic=options.dynamic,
            max_restarts=options.max_worker_restarts,
            first_task_id=position.next_task,
            first_worker_id=position.next_worker,
            only_worker_id=position.skips.only_worker,
        )
        return Engine(
            self._fleet,
            schedule,
            self._sampler_iter,
            options,
            position=position,
            delivery=self._delivery,
            tally=self._tally,
        )

    def _resume_workers(self, lives: bool, dataset_epoch: int | None) -> None:
        """Tells workers from a previous epoch that another begins; those just started read it in their journals."""
        assert self._fleet is not None
        self.position.is_seeded(int(self._base_seed), self._shared_seed)
        resumed = Resumed(self.position.begin.epoch, self._shared_seed, dataset_epoch)
        for worker in self._fleet.workers:
            worker.journal.begins(resumed)
            if lives and not worker.away:
                worker.host.lane.abandon()
                worker.resume(resumed)

    def _start_fleet(self, loader: Any) -> Fleet:
        fleet = fleet_for(
            loader,
            Replica(self._dataset, self._collate_fn, self._worker_init_fn, dict(default_collate_fn_map)),
            self._options,
            num_workers=self._num_workers,
            accelerator=self._delivery.accelerator,
        )
        try:
            setups = [
                Setup(
                    worker_id=worker_id,
                    num_workers=self._num_workers,
                    base_seed=int(self._base_seed),
                    seed_batches=self._options.seeds_batches,
                    shared_seed=self._shared_seed,
                    dataset_kind=self._dataset_kind,
                    auto_collation=self._auto_collation,
                    batch_size=getattr(loader.batch_sampler, "batch_size", None),  # as it is now
                    drop_last=self._drop_last,
                    skip_errors=self._options.skips_errors,
                    ranks=ranks_told(loader),
                    persistent=self._persistent_workers,
                    dataset_epoch=loader._dataset_epoch,
                )
                for worker_id in range(self._num_workers)
            ]
            self.position.is_seeded(int(self._base_seed), self._shared_seed)
            fleet.begin(setups, self.position.journals)
        except BaseException:  # the processes were borrowed: they go back in any case
            fleet.release(busy=True)
            raise
        return fleet

    def __next__(self) -> Any:
        asked = perf_counter()
        if self._watch is not None:
            watch, self._watch = self._watch, None  # its warning may be raised
            self._watch = watch.saw(self.position.handed)
        try:
            if profiler_enabled() or self._IterableDataset_len_called is not None:
                data = super().__next__()
            else:  # spares torch's work for its profiler, which takes as long as a small batch's whole way here
                data = self._next_data()
                self._num_yielded += 1
            task = self._task
            assert task is not None
            if not task.recorded:
                task.recorded = True  # first: after an interrupt it is not counted again
                self._tally.gave(asked, task.task_id, task.samples, task.nbytes)
        except BaseException as error:
            self._watch = None  # an error has come in a batch's place
            self._tally.raised(asked)
            is_users, self._user_error = self._user_error is error, None
            if self._engine is not None and not is_users and not isinstance(error, (RayloaderError, StopIteration)):
                self._engine.was_interrupted = True
            del self  # a notebook keeps the traceback, which must not keep the workers
            shorten(error, is_users or isinstance(error, (RayloaderError, KeyboardInterrupt)))
            raise
        self._task = task.data = None
        self.position.handed = task  # and nothing may be called after it: see NOTE [interrupts] in interrupts.py
        return data

    def _next_data(self) -> Any:
        if os.getpid() != self._pid:
            assert self._fleet is not None
            self._fleet.check_session()  # says why this process cannot continue
        if self._engine is None:
            raise StopIteration
        try:
            task = self._engine.next()
        except (WorkerDiedError, SkipLimitError):
            self._release()
            raise
        if task is None:
            self._tally.ended()
            self.position.ends()
            if not self._persistent_workers:
                self._release()
            raise StopIteration
        data = self._delivery.handed_over(task.data)
        if isinstance(data, ExceptionWrapper):
            try:
                data.reraise()
            except (KeyboardInterrupt, SystemExit):  # no worker sends these: an interrupt has come in between
                raise
            except BaseException as error:  # the user's exception, of any type
                assert self._engine is not None
                add_note(error, self._engine.describe(task, getattr(data, "sample", "")))
                self.position.handed = task
                task.data = None
                self._user_error = error
                # Drops torch's frame: its local variable refers to the error, which would form a cycle that keeps the
                # iterator.
                del self  # which this frame leads to
                raise BaseException.with_traceback(error, None) from None
        self._task = task
        if not self._persistent_workers and self._engine is not None and self._engine.over:
            self._release()  # now: a program that counts batches does not ask for another one, and keeps the iterator
        return data

    def _release(self) -> None:
        """Gives the fleet back."""
        if self._fleet is not None:
            _end(self._fleet, self._engine, reuse=not self._options.fresh_processes)

    @property
    def last_task(self) -> Task:
        """Whose batch, or error, the user was given last."""
        task: Task = self.position.handed
        return task

    @property
    def bytes_under_way(self) -> int:
        """Bytes of batches that have come and were not taken. Any thread may ask."""
        return self._engine.bytes_under_way if self._engine is not None else 0

    @property
    def bytes_held(self) -> int:
        """Bytes of shared memory in batches that the user was given. Any thread may ask."""
        return self._engine.bytes_held if self._engine is not None else 0

    def tell_positions(self) -> None:
        """Makes sure that the position can be saved."""
        if self._fleet is not None and self._fleet.usable and self._engine is not None:
            self._engine.note_begins()

    def _close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has neither usable locks nor our threads
            self._release()

    def _shutdown_workers(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # by then `close_all` has done it
            self._close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing() and self._fleet is not None:  # by then `close_all` has done it
            reuse = not self._options.fresh_processes
            janitor.later(functools.partial(_end, self._fleet, self._engine, reuse=reuse, wait=False))


def _end(fleet: Fleet, engine: Engine | None, *, reuse: bool, wait: bool = True) -> None:
    """Ends the work of an iterator, and gives its fleet back: idle after the last batch, otherwise perhaps busy.

    Without a reference to the iterator, for its finalizer.
    """
    busy = engine is None or not engine.finished
    try:
        if engine is not None:
            engine.close(wait=wait)
    finally:
        fleet.release(busy=busy, reuse=reuse)


_live_iterators: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
_abandoned: list[dict[str, Any]] = []  # what the iterators of the parent of this forked process own


def close_all() -> None:
    """Ends the work of every live iterator; they raise from then on."""
    for iterator in list(_live_iterators):
        with contextlib.suppress(Exception):  # one that cannot be closed must not keep the others open
            iterator._close()
    images.clear()


def _keep_after_fork() -> None:
    """In a forked child: dropping the references to Ray's objects would call Ray."""
    _abandoned.extend(vars(iterator) for iterator in list(_live_iterators))


os.register_at_fork(after_in_child=_keep_after_fork)
ends_with_program("iterators", close_all)
