"""A worker, in torch's sense: its dataset object, its random streams, and what it has built.

Promise: seeded and set up as by torch's worker loop, it builds what torch's worker would. An exception of user code is
the result of a task, never an exception here.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from rayloader import fetching
from rayloader._compat import DatasetKind, begin_streams, loading_streams, numpy_seed, set_worker_info
from rayloader.errors import ReplayError, add_note, exit_in_words
from rayloader.host.collate import (
    FreshTensors,
    adopt_collate_fn_map,
    are_torchs,
    collate_into,
    is_torchs,
    takes_whole_batches,
    whole_batch,
)
from rayloader.host.shard_info import Reader
from rayloader.protocol import ENDS, Answer, Caught, Replica, ResultKind, Setup, carried, pack_spent
from rayloader.random.generators import RandomState, seed_all, seed_torch
from rayloader.resume.digest import chain, digest, of_error
from rayloader.resume.journal import Resumed
from rayloader.resume.snapshot import SnapshotTaker, WorkerState, end_again, has_state, load_state
from rayloader.transport import codec
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.lanes import Wire, from_wire, in_message, sealed, to_wire

# How long a call rebuilds batches, in seconds: then it returns, so that the driver sees progress.
REPLAY_SECONDS = 0.1

# Why a rebuilt batch differs, and what to do.
_LEFT_OUT = (
    "what state_dict() of the dataset returns leaves something out, such as a shuffle buffer or a random generator, or "
    "the batch shows the time or the process. Add what is missing to the state, or take that out of the batches"
)
_NOT_LOADED = (
    "load_state_dict() of the dataset has not restored its position. Correct that method, or start the epoch again"
)
_NOT_RESTORED = (
    "the dataset, or a wrapper around it, is another one than was saved or has other arguments, or the batch depends "
    "on something that can't be restored, such as a random generator that was created while loading, the time, the "
    "process, or the order of a set of strings (set PYTHONHASHSEED). Create generators in __init__, in worker_init_fn "
    "or with the dataset's module, not in __getitem__, and let the dataset, collate_fn or a global of their modules "
    "hold them; or give the dataset state_dict() and load_state_dict() that restore what it depends on"
)


def _encode(obj: Any, **options: Any) -> codec.Encoded:
    """Encodes an object that goes back to the driver."""
    return codec.encode(obj, known_classes=True, carry=carried(), **options)


class BuildOrder(NamedTuple):
    """What to build."""

    task_id: int
    indices: tuple[Any, ...]  # fields of a `Wire`
    again: bool = False  # it is rebuilt for its effect on the worker
    digest: int | None = None  # of the batch that was delivered before, if it is rebuilt


@dataclass(slots=True)
class Restoring:
    """What a worker builds again, to come to where its last process was.

    Attributes:
        goal: what an iterable dataset without a state of its own, which is read again, must come to.
        left: batches that are not begun, oldest first.
        done: number of batches that were built again.
        total: number of those that are to be.
    """

    goal: WorkerState | None = None
    left: deque[BuildOrder] = field(default_factory=deque)
    done: int = 0
    total: int = 0


class HostedWorker:
    """The worker that a process hosts.

    Args:
        setup: which worker it is, and how to set it up.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._where = f"in DataLoader worker process {setup.worker_id}"
        self._dataset: Any = None
        self._collate_fn: Any = None
        self._fetcher: Any = None
        self._takes_whole = False  # whether whole batches may be selected from its dataset
        self._failure: Answer | None = None  # of `start` or `resume`; the answer to every task
        self._unrestored = False  # whether that failure means that this worker cannot be restored
        self._exhausted = False
        self._end_is_told = False  # in a snapshot
        self._epoch = 0
        self._dataset_epoch = setup.dataset_epoch
        self._tasks = 0  # number built in this epoch
        self._last_task = -1
        self._digest = 0
        self._restoring: Restoring | None = None  # until it has reported where it is then
        self._reader = Reader(setup.ranks, setup.worker_id, setup.num_workers)
        self._snapshots = SnapshotTaker(None, {}, RandomState.capture())
        # When the last task began, was fetched, and was collated: perf_counter(), 0 where it did not come to that.
        self._began = self._fetched = self._collated = 0.0

    def start(self, opened: Callable[[], Replica], state: WorkerState | None) -> None:
        """Sets up process state, dataset, seeds, worker_init_fn, iterator: in torch's order. Keeps an error.

        Args:
            opened: returns the replica.
            state: to continue from; None: newly started.
        """
        with self._keeping_failure():
            loaded = opened()
            self._dataset, self._collate_fn = loaded.dataset, loaded.collate_fn
            adopt_collate_fn_map(loaded.collate_fn_map)
            self._seed()
            seeded = RandomState.capture()
            if loaded.worker_init_fn is not None:
                loaded.worker_init_fn(self._setup.worker_id)
            begin_streams(self._dataset)
            others = {"collate_fn": self._collate_fn, "worker_init_fn": loaded.worker_init_fn}
            self._snapshots = SnapshotTaker(self._dataset, {"dataset": self._dataset, **others}, seeded)
            self._takes_whole = self._setup.auto_collation and takes_whole_batches(self._dataset)
            if state is None:
                self._create_fetcher()
            else:
                self._restore(state)
        self._unrestored = self._failure is not None and state is not None

    def _restore(self, state: WorkerState) -> None:
        """Restores the worker from a snapshot; a stream without a state of its own is read later."""
        if state.error:
            raise ReplayError(f"the state of worker {self._setup.worker_id} could not be saved:\n{state.error}")
        self._epoch, self._exhausted = state.epoch, state.exhausted
        if state.dataset_epoch != self._dataset_epoch:  # the program has told the dataset another one since
            self._tell_epoch(state.dataset_epoch)
        with loading_streams(self._dataset):
            self._load_states(state)

    def _load_states(self, state: WorkerState) -> None:
        load_state(self._dataset, state.dataset)
        if self._is_iterable and (state.is_to_be_proven or (self._setup.persistent and not state.has_own)):
            if state.begin is not None:
                self._snapshots.restore(state.begin)
            self._restoring, self._exhausted = Restoring(goal=state, total=state.tasks), False
            self._create_fetcher()
            return
        self._snapshots.loaded = state if state.has_own else None
        self._create_fetcher()
        load_state(self._iterator, state.iterator)  # after `__iter__`, which may have reset it to its start
        if self._is_iterable:
            self._fetcher.ended, self._fetcher.taken = state.ended, state.tasks * (self._setup.batch_size or 1)
        self._snapshots.restore(state.random)
        self._tasks, self._last_task, self._digest = state.tasks, state.last_task, state.digest

    def _restore_on(self, until: float = math.inf, is_unwanted: Callable[[], bool] = lambda: False) -> Answer | None:
        """Builds what is to be built again, up to time `until`. Returns only a result that ends the process."""
        restoring = self._restoring
        if restoring is None or not self._read_on(restoring, until):
            return None
        while restoring.left:
            task = restoring.left.popleft()
            if is_unwanted():
                restoring.done += 1
                continue
            result = self._do(task, None)
            if result.kind in ENDS:
                return result
            if time.monotonic() >= until:
                break
        return None

    def _read_on(self, restoring: Restoring, until: float) -> bool:
        """Reads an iterable dataset from its start to its position; False if this is not finished at time `until`."""
        goal = restoring.goal
        if goal is None:
            return True
        nothing = in_message(codec.encode([None] * self._setup.batch_size if self._setup.batch_size else None))
        again = BuildOrder(-1, nothing, again=True)
        while self._failure is None and not self._exhausted and (self._tasks < goal.tasks or goal.exhausted):
            result = self._build(again, None)
            if result.kind == ResultKind.EXITED:
                self._failure = replace(result, kind=ResultKind.NOT_STARTED)
            restoring.done += 1
            if time.monotonic() >= until:
                return False
        restoring.goal, restoring.done = None, goal.tasks
        if self._failure is not None:
            return True
        with self._keeping_failure():
            if (
                (self._tasks, self._exhausted) != (goal.tasks, goal.exhausted)
                or self._digest != goal.digest
                or not self._snapshots.is_at(goal.random)
            ):
                raise ReplayError(
                    f"the iterable dataset of worker {self._setup.worker_id} was read again up to batch {goal.tasks}, "
                    "and gave something else than before; to be resumed, it must be made as it was, with the same "
                    "arguments, and give the same each time that it is read, or have state_dict() and load_state_dict()"
                )
            self._snapshots.restore(goal.random)
        self._unrestored = self._failure is not None
        self._last_task = goal.last_task
        return True

    def _end_again(self, loaded: WorkerState) -> None:
        """Lets a stream that has loaded the state of its end take that over."""
        with self._keeping_failure(), loading_streams(self._dataset):
            if end_again(self._fetcher, loaded.dataset, loaded.iterator):
                self._snapshots.loaded = None
            self._snapshots.restore(loaded.random)

    def complete(self, answer: Answer, ended: float, idle: float, sending: float) -> None:
        """Adds the news of this worker to an answer that was ready at `ended` (perf_counter()).

        `idle` and `sending` are the seconds before its task that the process did nothing, and sent the last answer.
        """
        if (restoring := self._restoring) is not None:
            answer.rebuilt = restoring.done, restoring.total
        answer.asked, answer.read = self._reader.was_asked_for, self._reader.read
        answer.state = self._snapshot_if_due(answer.seconds)
        began, fetched, collated = self._began, self._fetched or ended, self._collated or ended
        fetch, collate, transfer = fetched - began, collated - fetched, ended - collated + sending
        answer.spent = pack_spent(self._setup.worker_id, began, idle, fetch, collate, transfer)

    def _snapshot_if_due(self, seconds: float) -> tuple[Any, ...] | None:
        """A snapshot of the worker, if one is due after these seconds of work."""
        self._snapshots.worked(seconds)
        restoring = self._restoring
        if self._unrestored or (restoring is not None and restoring.goal is not None):
            return None
        begins = restoring is not None and 0 < restoring.done == restoring.total  # something new, after all was rebuilt
        ends = self._exhausted and not self._end_is_told
        self._end_is_told = self._exhausted
        if begins:
            self._restoring = None
        if not (ends or begins or self._snapshots.is_due):
            return None
        return tuple(self.snapshot())

    def end(self) -> None:
        """Drops the iterator, which may have something to finish, as torch's worker does last."""
        self._fetcher = None

    def snapshot(self) -> WorkerState:
        """A snapshot of the worker, as the difference from the last one."""
        return self._snapshots.snapshot(
            self._iterator,
            epoch=self._epoch,
            tasks=self._tasks,
            last_task=self._last_task,
            exhausted=self._exhausted,
            ended=getattr(self._fetcher, "ended", False),
            digest=self._digest,
            dataset_epoch=self._dataset_epoch,
        )

    def resume(self, resumed: Resumed) -> WorkerState:
        """Begins a new epoch over the same dataset; as in torch's persistent workers nothing is seeded again.

        As there, tasks that torch's worker would have been given are built first, and nothing more: the random streams
        continue after these.
        """
        if (ends := self._restore_on()) is not None:
            sys.exit(ends.text)  # this call has no other way to say so
        if self._snapshots.loaded is not None and (self._exhausted or getattr(self._fetcher, "ended", False)):
            self._end_again(self._snapshots.loaded)
        self._epoch, self._exhausted, self._end_is_told = resumed.epoch, False, False
        self._tasks, self._last_task, self._digest = 0, -1, 0
        if self._unrestored and self._failure is not None:
            return self.snapshot()._replace(error=self._failure.text)
        if self._fetcher is not None:  # otherwise it never started: that failure remains
            self._failure = None
            with self._keeping_failure():
                self._shuffle_datapipe(resumed.shared_seed)
                self._tell_epoch(resumed.dataset_epoch)
                begin_streams(self._dataset)
                self._create_fetcher()
        self._snapshots.forget()  # answers of an epoch that was broken off
        return self.snapshot()

    def _tell_epoch(self, epoch: int | None) -> None:
        """Sets the epoch that the program has set since, on a dataset from a previous epoch."""
        if epoch is not None:
            self._dataset_epoch = epoch
            self._dataset.set_epoch(epoch)
            self._snapshots.renew()

    def run(self, task: BuildOrder, arena: ArenaWriter | None) -> Answer:
        """Returns a task's result."""
        if (ends := self._restore_on()) is not None:
            return replace(ends, task_id=task.task_id)
        return self._do(task, arena)

    def rebuild(self, tasks: list[BuildOrder], is_unwanted: Callable[[], bool]) -> Answer | None:
        """Rebuilds tasks for a limited time, and keeps the rest. Returns only a result that ends the process."""
        self._unrestored |= self._failure is not None
        if not tasks and self._restoring is None:
            return None
        self._restoring = restoring = self._restoring or Restoring()
        restoring.left.extend(tasks)
        restoring.total += len(tasks)
        return self._restore_on(time.monotonic() + REPLAY_SECONDS, is_unwanted)

    def _do(self, task: BuildOrder, arena: ArenaWriter | None) -> Answer:
        """Executes a task when it is its turn; a rebuilt batch must equal the original."""
        result = self._build(task, arena)
        if task.again and self._restoring is not None:
            self._restoring.done += 1
        if task.digest in (None, result.digest) or self._failure is not None or result.kind in ENDS:
            return result
        has_own = has_state(self._dataset) or has_state(self._iterator)
        what = f"differs from the original: {_LEFT_OUT if has_own else _NOT_RESTORED}"
        if has_own and result.kind not in (ResultKind.BATCH, ResultKind.EMPTY):
            what = f"did not come: {_NOT_LOADED}. What came instead: {result.text or 'its stream has ended'}"
        with self._keeping_failure():
            raise ReplayError(
                f"batch {task.task_id} of worker {self._setup.worker_id}, which was to be rebuilt after its worker was "
                f"replaced or resumed, {what}"
            )
        self._unrestored = True
        assert self._failure is not None
        return replace(self._failure, task_id=task.task_id)

    def _build(self, task: BuildOrder, arena: ArenaWriter | None) -> Answer:
        self._began, self._fetched, self._collated = time.perf_counter(), 0.0, 0.0
        task_id = task.task_id
        if self._failure is not None and (self._unrestored or not self._exhausted):
            # A stream's indices are endless: its failure to start is reported once, just as an iterator that raised
            # ends.
            self._exhausted = self._is_iterable and not task.again and not self._unrestored
            return replace(self._failure, task_id=task_id)
        if self._exhausted:
            return Answer(task_id, ResultKind.EXHAUSTED)
        skipped: list[fetching.Skipped] = []
        setup = self._setup
        has_just_loaded = self._snapshots.loaded is not None
        try:
            if setup.seed_batches:
                # For a stream: its number if no worker's stream had ended; the true one depends on when that happened.
                number = self._tasks * setup.num_workers + setup.worker_id if self._is_iterable else task_id
                seed_all(setup.base_seed, self._epoch, number)
            if arena is not None:
                arena.begin()
            batch, samples, fresh = self._load(task.indices, arena, skipped)
            self._collated = time.perf_counter()
            try:
                encoded = _encode(batch, fresh=fresh)
            except Exception as error:  # the user's objects may raise anything
                from rayloader.transport.replica import note_batch

                note_batch(error, batch, _encode)
                raise
            checksum = digest(batch, encoded)
            wire, nbytes = to_wire(encoded, arena), sum([buffer.nbytes for buffer in encoded.buffers])
            if arena is not None:
                del batch, encoded, fresh  # the last references to the batch, unless user code has some
                wire = sealed(wire, arena)
            result = Answer(task_id, ResultKind.BATCH, tuple(wire), "", nbytes, tuple(skipped), checksum, samples)
        except fetching.NothingLeft:
            result = Answer(task_id, ResultKind.EMPTY, skipped=tuple(skipped))
        except Exception as error:  # anything that user code can raise: it belongs to the user, not to Ray
            if isinstance(error, StopIteration) and self._is_iterable:
                self._exhausted = True
                return Answer(task_id, ResultKind.EXHAUSTED, skipped=tuple(skipped))
            checksum = of_error(type(error))
            if has_just_loaded:
                add_note(
                    error,
                    "rayloader: this is the first batch since load_state_dict() of the dataset restored a worker that "
                    "was replaced or resumed; if the error comes from the loaded state, the dataset cannot continue "
                    "from what its state_dict() returned",
                )
            result = _error(task_id, error, self._where)
            result.skipped, result.digest, result.sample = tuple(skipped), checksum, fetching.raised_by(error)
        except BaseException as error:
            return _exited(task_id, error)
        if self._is_iterable:
            self._digest = chain(result.digest, self._digest)
            if self._tasks == self._epoch == 0:
                self._reader.has_read(self._dataset)
        self._tasks, self._last_task = self._tasks + 1, task_id
        return result

    def _load(
        self, indices: tuple[Any, ...], arena: ArenaWriter | None, skipped: list[fetching.Skipped]
    ) -> tuple[Any, int, FreshTensors]:
        """Returns a batch, how many samples are in it, and which of its tensors are fresh."""
        setup = self._setup
        collate_into(arena)
        # A dataset may pass a state that it has loaded on to others only when it is iterated.
        loading = loading_streams(self._dataset) if self._snapshots.loaded else contextlib.nullcontext()
        if not getattr(self._fetcher, "ended", False):
            self._snapshots.loaded = None
        try:
            left_out = skipped if setup.skip_errors else None
            wanted, only_torchs = from_wire(Wire(*indices)), is_torchs(self._collate_fn)
            if self._takes_whole and only_torchs:
                fresh = collate_into(arena, alone=True)
                if (batch := whole_batch(self._dataset, wanted)) is not None:
                    self._fetched = time.perf_counter()
                    return batch, len(wanted), fresh
                collate_into(arena)
            with loading:
                samples, count = fetching.fetch(self._fetcher, setup.dataset_kind, wanted, left_out)
            self._fetched = time.perf_counter()
            fresh = collate_into(arena, alone=only_torchs and are_torchs(samples))
            return self._collate_fn(samples), count, fresh
        finally:
            collate_into(None)

    @property
    def _is_iterable(self) -> bool:
        return self._setup.dataset_kind == DatasetKind.Iterable

    @property
    def _iterator(self) -> Any:
        return getattr(self._fetcher, "dataset_iter", None)

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # anything that user code can raise, as in _build
            self._failure = _error(-1, error, self._where)
        except BaseException as error:
            self._failure = replace(_exited(-1, error), kind=ResultKind.NOT_STARTED)

    def _seed(self) -> None:
        setup = self._setup
        seed = setup.base_seed + setup.worker_id
        torch.set_num_threads(1)
        random.seed(seed)
        seed_torch(seed)
        np.random.seed(numpy_seed(setup.base_seed, setup.worker_id))
        self._shuffle_datapipe(setup.shared_seed)
        info = self._reader.worker_info(seed, self._dataset)
        set_worker_info(info)
        self._reader.attach(info)

    def _shuffle_datapipe(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe):
            assert shared_seed is not None
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, generator)

    def _create_fetcher(self) -> None:
        setup = self._setup
        if self._is_iterable:
            self._snapshots.iterator_begins()
        self._fetcher = fetching.create_fetcher(
            setup.dataset_kind, self._dataset, setup.auto_collation, setup.drop_last
        )


def _error(task_id: int, error: Exception, where: str) -> Answer:
    """An exception of user code, as torch sends it."""
    caught = Caught(error, where)
    caught.drop_types(_encode)
    return Answer(task_id, ResultKind.ERROR, tuple(to_wire(_encode(caught))), caught.text)


def _exited(task_id: int, error: BaseException) -> Answer:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)  # as of a process
        text = f"{exit_in_words(code)}\n{text}"
    return Answer(task_id, ResultKind.EXITED, text=text)
