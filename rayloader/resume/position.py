"""The position of an iterator's user in its stream, also as a part of a state.

Promise: only batches that were handed to the user count. Unpacked, a position continues where the other one was, or
raises an error that says that it cannot.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import operator
import pickle
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rayloader import fetching
from rayloader.errors import StateError
from rayloader.random.generators import note_modules
from rayloader.resume.drawn import Drawn, drawn
from rayloader.resume.journal import Journal, may_be_stale
from rayloader.resume.ranks import Stage
from rayloader.resume.samplers import Samplers
from rayloader.resume.skips import Given, SkipSteps
from rayloader.resume.snapshot import has_state, told_by
from rayloader.resume.state import (
    EpochBegin,
    OwnState,
    Parts,
    SavedPlace,
    SavedWorker,
    Start,
    Stream,
    WorkerStart,
    as_saved,
    tasks_in,
    text_of_tasks,
)
from rayloader.task import Task
from rayloader.transport import codec


class Checksums:
    """Checksums of a sampler's draws, compared with earlier ones.

    Args:
        expected: checksums of the indices of the first tasks.
    """

    def __init__(self, expected: dict[int, int]) -> None:
        self._expected = expected
        self._found = {0: 0} if 0 in expected else {}
        self._checksum = 0
        self.count = 0  # tasks

    def add(self, indices: Any) -> codec.Encoded:
        """The indices of the next task."""
        encoded, self._checksum = drawn(indices, self._checksum)
        self.count += 1
        if self.count in self._expected:
            self._found[self.count] = self._checksum
        return encoded

    @property
    def as_expected(self) -> bool:
        """Whether the draws were the same."""
        return self._found == self._expected


class DrawnAgain(Iterator[Any]):
    """A sampler's iterator of a resumed epoch: first the indices that were drawn, but not taken, before saving."""

    def __init__(self, ahead: Iterable[Any], indices: Iterator[Any], *, ended: bool) -> None:
        self._ahead = deque(ahead)
        self._indices = indices
        self._ended = ended  # read again, the sampler might begin its next epoch

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.popleft()
        if self._ended:
            raise StopIteration
        return next(self._indices)


class _LastWorker:
    """One worker as it was in the last state: what has not changed since is the same object in the next."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = (self,) * 4
        self._worker = SavedWorker()
        self._count = 0  # tasks to be built again

    def of(self, journal: Journal, *, is_compared: bool) -> SavedWorker:
        """The worker with this journal; `is_compared`: its stream is read again from the start, and compared."""
        if not journal.begun:
            raise StateError(
                "the iterator was dropped before its workers had reported their state; save while iterating"
            )
        before, tasks = journal.before, journal.replay
        if is_compared and not may_be_stale(journal.base):
            before = None
        made_of, known = (journal.base, before, journal.newest, tasks), self._made_of
        if len(tasks) == self._count and all(map(operator.is_, made_of, known)):
            return self._worker
        (start, _, replay), count = self._worker, self._count
        if journal.base is not known[0] or before is not known[1]:
            start = WorkerStart(journal.base, before)
            if journal.base is not None and journal.base.error:
                raise StateError(f"a worker's dataset could not save its state:\n{journal.base.error}")
            note_modules(start.located)
        if tasks is not known[3]:
            replay, count = "", 0
        newest_first = itertools.islice(reversed(tasks.values()), len(tasks) - count)
        worker = SavedWorker(start, journal.remembers, replay + text_of_tasks([*newest_first][::-1]))
        count = len(tasks)
        self._worker, self._made_of, self._count = worker, made_of, count  # no interrupt comes in between
        return worker


class StepLog(Protocol):
    """A log of what became of each step; see `replay/log_writer.py`. It is used under the lock of its position."""

    def forget(self) -> None:
        """Another epoch begins."""

    def begin(self, loader: Any, position: Position, tally: Any) -> None:
        """The epoch has begun, or goes on, and the user has got nothing of it yet."""

    def drawn(self, step: int, indices: Any, *, skipped: bool) -> None:
        """The sampler has given a step's indices; `skipped`: nobody builds the batch."""

    def add(self, step: int, worker_id: int, digest: int, outcome: int, skipped: int) -> None:
        """The user has what came of a step. Calling it twice in a row does no harm."""

    def flush(self) -> None:
        """Writes what is not written yet."""


class Position:
    """The position of one iterator's user; kept up to date by the epoch, under `lock`."""

    def __init__(
        self, samplers: Samplers, base_seed: int, num_workers: int, *, iterable: bool, epochs_begun: int = 0
    ) -> None:
        self.lock = threading.RLock()  # taken and released in C: no interrupt comes in between, unlike with a Condition
        self.handed: Any = None  # the `Task` whose batch the user was given last
        self.samplers = self._samplers_now = samplers
        self.base_seed = base_seed
        self.shared_seed: int | None = None
        self.num_workers = num_workers
        self.iterable = iterable
        self.journals = [Journal() for _ in range(num_workers)]  # the workers' own, for a position outlives its fleet
        self.parts = Parts()  # of the last state
        self._workers = [_LastWorker() for _ in range(num_workers)]
        self._begin = EpochBegin()
        self.epoch = 0  # epochs of these workers before this one
        self.epochs_begun = epochs_begun  # of the run, this one included
        self.skips = SkipSteps()
        self.log: StepLog | None = None
        self._forget_epoch()

    @property
    def epoch_of_run(self) -> int:
        """The number of this epoch, from 0."""
        return self.epochs_begun - 1

    def begins(self, again: bool) -> None:
        """A new epoch, before the sampler's iterator is created; `again`: of workers that had one before."""
        self.epoch += again
        self.epochs_begun += 1
        self._forget_epoch()
        self.starts += (Start(self.samplers.capture(), self.samplers.own_state()),)

    def restarts(self) -> None:
        """The workers are lost: new ones begin."""
        self.epoch, self.finished = 0, False
        self.journals = [Journal() for _ in range(self.num_workers)]

    def _forget_epoch(self) -> None:
        self.starts: tuple[Start, ...] = ()  # each is further than the one before
        self.drawn_by_torch = math.inf  # draws that torch's loader would have made by now, if fewer than here
        self.next_task = 0  # all tasks before it are taken
        self.next_worker = 0
        self.delivered = 0  # batches
        self.checksum = 0  # of the indices before `next_task`
        self.skipped = 0  # samples
        self.stages: tuple[Stage, ...] = ()  # through which the epoch went with other numbers of ranks
        self.finished = False
        self.handed = None
        self._counted = -1  # the task that was taken last
        self._ahead: dict[int, int] = {}  # checksums by task, of those taken after `next_task`
        self._checksums: dict[int, int] = {}  # of the indices up to each task that is drawn and not taken
        self._forgotten = 0  # tasks before it are not in there
        self.stateful = False
        self.stream: Stream | None = None  # without workers
        self.error = ""  # why the position can't be saved
        # Without workers: what the dataset has loaded, until it is asked for a sample; see NOTE [Late positions].
        self.loaded: bytes | None = None
        self.follows_break = False  # and may still tell its position in an epoch that was broken off
        self._draws = 0  # from the sampler, including the one that found its end
        if self.log is not None:
            self.log.forget()

    def redeals(self, begin: EpochBegin) -> Any:
        """The epoch was begun by other ranks: returns the iterator over this rank's share of the rest."""
        self.starts, self.stages = begin.starts, begin.stages
        self.skips.forget(self.epoch_of_run)
        with self.samplers.at(self.starts[0].moment):
            return self.samplers.iterator(self.stages)

    def sampler_begins(self, iterator: Any) -> None:
        """The sampler's iterator is about to be read for the first time, or to continue."""
        if isinstance(iterator, DrawnAgain):
            return
        self.stateful = self.samplers.is_stateful(iterator)
        start = self.starts[0]
        self.starts = (start._replace(own=self.samplers.with_iterator(start.own, iterator)),)

    def first_draw(self, iterator: Any) -> None:
        """The first read of the sampler's iterator, if that is some time after its creation."""
        if not self.stages:  # otherwise the whole epoch is drawn already
            self.starts = (self.starts[0]._replace(drawing=self.samplers.capture()),)
        self.sampler_begins(iterator)

    def drawn(self, task_id: int, iterator: Any, indices: Any, checksum: int) -> None:
        """The sampler has given the indices of this task."""
        self._draws = max(self._draws, task_id + 1)
        self._checksums[task_id] = checksum
        known = task_id in self._ahead
        skipped = not known and not self.iterable and self.skips.has((self.epoch_of_run, task_id))
        if known or skipped:
            self._ahead[task_id] = checksum
        if self.log is not None and not known:
            self.log.drawn(task_id, indices, skipped=skipped)
        if task_id == 0 and self.stateful and len(self.starts) == 1:
            own = self.samplers.with_iterator(self.samplers.own_state(), iterator)
            self.starts += (Start(self.samplers.capture(), own, copy.deepcopy(indices), checksum),)

    def sampler_ended(self, total: int) -> None:
        """The sampler has yielded the indices of `total` tasks, and has no more."""
        self._draws = total + 1

    def has(self, task_id: int) -> bool:
        """Whether the user already has this task's batch."""
        return task_id in self._ahead

    def read_skips(self, given: Given) -> None:
        """Reads the loader's `skip_steps`, in an epoch of which nothing was drawn since it was begun or resumed."""
        at = self.epoch_of_run, self.delivered if self.iterable else self.next_task
        self.skips = SkipSteps(given, self.skips.steps, at)

    def step_of(self, task_id: int) -> int:
        """The number of the next task's step, or of the last one's.

        Of a stream it is the place of its batch in the order of delivery. Tasks have other numbers in each run: when a
        worker's stream ends, those that it was given already are left out.
        """
        return task_id if not self.iterable else self.delivered - (task_id == self._counted)

    @property
    def last_step(self) -> tuple[int, int] | None:
        """Epoch and step of the batch that the user was given last."""
        with self.lock:
            self.settle()
            return None if self._counted < 0 else (self.epoch_of_run, self.step_of(self._counted))

    @property
    def leaves_out(self) -> bool:
        """Whether `skip_steps` leaves out the next batch of a stream, which was built, for the stream goes on."""
        return self.iterable and self.skips.has((self.epoch_of_run, self.delivered))

    def settle(self) -> None:
        """Counts the batch that was handed over last, if it is not counted yet."""
        with self.lock:
            if self.handed is not None and not self.handed.counted:
                task = self.handed
                if self.log is not None:
                    step = self.step_of(task.task_id)
                    self.log.add(step, task.worker_id, task.digest or 0, task.outcome, task.skipped)
                self.taken(task.worker_id, task.task_id, task.indices.checksum)
                self.handed.counted = True

    def ends(self) -> None:
        """The last batch of the epoch was taken."""
        self.finished = True
        self.flush_log()

    def flush_log(self) -> None:
        """Completes the log, if there is one, up to the batch that was handed over last."""
        if self.log is not None:
            with self.lock:
                self.settle()
                self.log.flush()

    def taken(self, worker_id: int, task_id: int, checksum: int) -> None:
        """The user has this task's batch now. Calling it twice in a row does no harm, see `Journal.taken`."""
        if self.journals:
            self.journals[worker_id].taken(task_id)
            self.next_worker = (worker_id + 1) % self.num_workers
        if task_id != self._counted:
            if self.iterable:
                # Then the tasks of an exhausted worker are not awaited, and no number is used twice.
                self.next_task, self.checksum = max((self.next_task, self.checksum), (task_id + 1, checksum))
            elif task_id == self.next_task:
                self.next_task, self.checksum = task_id + 1, checksum
            else:
                self._ahead[task_id] = checksum
            self.delivered += 1
            self._counted = task_id
        while self.next_task in self._ahead:
            self.checksum = self._ahead[self.next_task]
            del self._ahead[self.next_task]
            if self.journals and self.next_task > task_id:  # it is skipped, and would have been the next worker's
                self.next_worker = (self.next_worker + 1) % self.num_workers
            self.next_task += 1
        while self._forgotten < self.next_task:
            self._checksums.pop(self._forgotten, None)
            self._forgotten += 1

    def skip(self, samples: Sequence[fetching.Skipped], max_skipped: int) -> None:
        """These samples were left out. Raises SkipLimitError if they are too many."""
        self.skipped += len(samples)
        fetching.tell(samples, self.skipped, max_skipped)

    # ---- as a state

    def samplers_of(self, loader: Any) -> Samplers:
        """The current samplers of the loader whose position this is."""
        if not self._samplers_now.are_of(loader):
            self._samplers_now = Samplers(loader)
        return self._samplers_now

    def state(self) -> SavedPlace:
        """The position, for a state.

        Raises:
            StateError: it can't be saved.
        """
        self.settle()
        if self.error:
            raise StateError(f"the position in the epoch can't be saved: {self.error}")
        begin = self.base_seed, self.shared_seed, self.epoch, self.starts, self.stages
        if not all(map(operator.is_, begin, self._begin)):
            if errors := [start.own.error for start in self.starts if start.own.error]:
                raise StateError(f"the sampler could not save its state:\n{errors[0]}")
            self._begin = EpochBegin(*begin)
        draws = int(min(self._draws, self.drawn_by_torch))
        last = max(draws, self.next_task) - 1
        while last >= self.next_task and last not in self._checksums:
            last -= 1
        stream = self.stream
        if stream is not None and stream.iterator is not None:
            stream = replace(stream, iterator=None, told=stream.told or told_by(stream.iterator))
        pairs = zip(self._workers, self.journals, strict=True)
        return SavedPlace(
            self._begin,
            stream,
            tuple([worker.of(journal, is_compared=self.iterable) for worker, journal in pairs]),
            tuple(sorted(self._ahead)),
            next_task=self.next_task,
            next_worker=self.next_worker,
            delivered=self.delivered,
            checksum=self.checksum,
            skipped=self.skipped,
            finished=self.finished,
            draws=draws,
            drawn=last + 1,
            drawn_checksum=self._checksums.get(last, self.checksum),
        )

    def unpack(self, saved: SavedPlace) -> Any:
        """Moves this position, of a new iterator, to where another one was.

        Returns:
            The sampler's iterator, from there on.

        Raises:
            StateError: the sampler does not reproduce its indices.
        """
        begin = saved.begin
        self.epochs_begun += not saved.finished
        self.base_seed, self.shared_seed, self.epoch = begin.base_seed, begin.shared_seed, begin.epoch
        self.starts, self.stages = begin.starts, begin.stages
        self.next_task, self.next_worker = saved.next_task, saved.next_worker
        self.delivered, self.skipped, self.finished = saved.delivered, saved.skipped, saved.finished
        self._ahead = dict.fromkeys(saved.ahead, saved.checksum)
        self.stateful = any(start.own != OwnState() for start in self.starts)
        replays = [tasks_in(worker.replay) for worker in saved.workers]
        told: dict[int, codec.Encoded | None] = {task_id: None for replay in replays for task_id, _ in replay}
        iterator = iter(()) if self.finished and not told else self._draw_again(saved, told)
        for journal, worker, replay in zip(self.journals, saved.workers, replays, strict=True):
            base = worker.start.state
            if base is not None:  # later tasks come after what it has built, whatever their numbers
                base = base._replace(last_task=min(base.last_task, self.next_task - 1))
            # Without order a worker may be ahead of what was drawn again; then nothing depends on its earlier batches.
            known = [(task_id, told[task_id], digest) for task_id, digest in replay]
            again = [Task(number, Drawn(indices, 0), digest=digest) for number, indices, digest in known if indices]
            journal.starts_at(base, again)
            if worker.start.before is not None:
                journal.starts_before(worker.start.before)
        return iterator

    def _draw_again(self, saved: SavedPlace, told: dict[int, codec.Encoded | None]) -> Any:
        """The sampler's iterator at the position; fills in the indices for the tasks in `told`. See `samplers.py`."""
        expected = {self.next_task: saved.checksum, saved.drawn: saved.drawn_checksum}
        self._draws, self.checksum = saved.draws, saved.checksum
        for start in self.starts:
            theirs = self.samplers.are_of_users  # what they raise is the user's to see
            with self.samplers.at(start.moment), contextlib.nullcontext() if theirs else as_saved():
                iterator = self._iterator_at(start)
                if start.drawing is not None:
                    self.samplers.move_to(start.drawing)
                if self.iterable:  # its indices carry no information, and are all the same
                    told.update(dict.fromkeys(told, codec.encode(next(iterator)) if told else None))
                    return iterator
                given = iterator if start.first is None else itertools.chain([start.first], iterator)
                checksums, ahead = Checksums(expected), []
                for task_id, indices in enumerate(itertools.islice(given, self._draws)):
                    encoded = checksums.add(indices)
                    if task_id >= self.next_task:
                        ahead.append(copy.deepcopy(indices))  # the sampler may reuse its list
                    elif task_id in told:
                        told[task_id] = encoded
                if checksums.as_expected:
                    return DrawnAgain(ahead, iterator, ended=checksums.count < self._draws)
        raise StateError(
            f"the sampler did not reproduce its indices: the first {self.next_task} batches, or those drawn ahead, "
            "differ from the saved ones. A sampler must depend on nothing but its arguments, set_epoch and random "
            "generators that it holds, or have state_dict() and "
            "load_state_dict()"
        )

    def _iterator_at(self, start: Start) -> Any:
        self.samplers.load(start.own.sampler)
        iterator = self.samplers.iterator(self.stages)
        if start.own.iterator is not None and has_state(iterator):
            iterator.load_state_dict(pickle.loads(start.own.iterator))
        return iterator
