"""The position of an iterator's user in its stream, and what is drawn for it; `saved.py` makes a part of a state of it.

Promise: only batches that were handed to the user count.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rayloader import fetching
from rayloader.interrupts import new_lock
from rayloader.protocol import carried
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.journal import Journal
from rayloader.resume.samplers import EpochBegin, Samplers, Start
from rayloader.task import SkipSteps

if TYPE_CHECKING:
    from rayloader.resume.state import State, Stream


class DrawnAgain(itertools.chain[Any]):
    """A sampler's iterator of a resumed epoch: first the indices that were drawn, but not taken, before saving."""


class Position:
    """The position of one iterator's user; kept up to date by the epoch, under `lock`."""

    def __init__(self, samplers: Samplers, base_seed: int, num_workers: int, *, iterable: bool) -> None:
        self.lock = new_lock()
        self.handed: Any = None  # the `Task` whose batch the user was given last
        self.samplers = samplers
        self.begin = EpochBegin(base_seed)
        self.num_workers = num_workers
        self.iterable = iterable
        self.journals = [Journal() for _ in range(num_workers)]  # the workers' own, for a position outlives its fleet
        self.packed: dict[Any, Any] = {}  # parts of the last state, see NOTE [Same parts] in state.py
        self.epoch_of_run = -1  # the number of the epoch that was begun last, from 0
        self.skips = SkipSteps()
        self._forget_epoch()

    def begins(self, again: bool) -> None:
        """A new epoch, before the sampler's iterator is created; `again`: of workers that had one before."""
        self.epoch_of_run += 1
        self._forget_epoch()
        start = Start(self.samplers.capture(), self.samplers.own_state())
        self._begin_is(epoch=self.begin.epoch + again, starts=(start,), stages=())

    def is_seeded(self, base_seed: int, shared_seed: int | None) -> None:
        """The seeds of the workers, and of DataPipes, are these."""
        self._begin_is(base_seed=base_seed, shared_seed=shared_seed)

    def _begin_is(self, **fields: Any) -> None:
        self.begin = self.begin._replace(**fields)

    def restarts(self) -> None:
        """The workers are lost: new ones begin."""
        self._begin_is(epoch=0)
        self.finished = False
        self.journals = [Journal() for _ in range(self.num_workers)]

    def _forget_epoch(self) -> None:
        self.next_task = 0  # all tasks before it are taken
        self.next_worker = 0
        self.delivered = 0  # batches
        self.checksum = 0  # of the indices before `next_task`
        self.skipped = 0  # samples
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

    def redeals(self, begin: EpochBegin) -> Any:
        """The epoch was begun by other ranks: returns the iterator over this rank's share of the rest."""
        self._begin_is(starts=begin.starts, stages=begin.stages)
        self.skips.forget(self.epoch_of_run)
        from rayloader.resume.ranks import iterator_of

        with self.samplers.at(begin.starts[0].moment):
            return iterator_of(self.samplers, begin.stages)

    def sampler_begins(self, iterator: Any) -> None:
        """The sampler's iterator is about to be read for the first time, or to continue."""
        if isinstance(iterator, DrawnAgain):
            return
        self.stateful = self.samplers.is_stateful(iterator)
        start = self.begin.starts[0]
        self._begin_is(starts=(start._replace(own=self.samplers.with_iterator(start.own, iterator)),))

    def first_draw(self, iterator: Any) -> None:
        """The first read of the sampler's iterator, if that is some time after its creation."""
        if not self.begin.stages:  # otherwise the whole epoch is drawn already
            self._begin_is(starts=(self.begin.starts[0]._replace(drawing=self.samplers.capture()),))
        self.sampler_begins(iterator)

    def drawn(self, task_id: int, iterator: Any, indices: Any, checksum: int) -> bool:
        """The sampler has given the indices of a task; returns whether it is not built: the user has or skips it."""
        self._draws = max(self._draws, task_id + 1)
        self._checksums[task_id] = checksum
        is_not_built = self.has(task_id) or (not self.iterable and self.skips.has((self.epoch_of_run, task_id)))
        if is_not_built:
            self._ahead[task_id] = checksum
        if task_id == 0 and self.stateful and len(self.begin.starts) == 1:
            own = self.samplers.with_iterator(self.samplers.own_state(), iterator)
            after = Start(self.samplers.capture(), own, copy.deepcopy(indices), checksum)
            self._begin_is(starts=(*self.begin.starts, after))
        return is_not_built

    def sampler_ended(self, total: int) -> None:
        """The sampler has yielded the indices of `total` tasks, and has no more."""
        self._draws = total + 1

    def has(self, task_id: int) -> bool:
        """Whether the user already has this task's batch."""
        return task_id in self._ahead

    def read_skips(self, loader: Any, instead: SkipSteps | None = None) -> None:
        """Reads the loader's `skip_steps`, or has others `instead`.

        It is called in an epoch of which nothing was drawn since it was begun or resumed.
        """
        at = self.epoch_of_run, self.delivered if self.iterable else self.next_task
        self.skips = instead or SkipSteps(loader.skip_steps, self.skips.steps, at)

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
                self.taken(task.worker_id, task.task_id, task.indices.checksum)
                self.handed.counted = True

    def ends(self) -> None:
        """The last batch of the epoch was taken."""
        self.finished = True

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


class Draws:
    """The draws of one epoch. Only the user's thread makes them, because sampler and generator are the user's.

    Args:
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        position: the user's position in the stream; it is told of each draw.

    Attributes:
        count: draws so far, of the epoch: the number of the next task.
    """

    def __init__(self, sampler_iter: Iterator[Any], position: Position) -> None:
        self._sampler_iter = sampler_iter
        self._position = position
        self.count = position.next_task
        self._checksum = position.checksum

    def begin(self) -> None:
        """The sampler's iterator is about to be read."""
        self._position.sampler_begins(self._sampler_iter)

    def next(self) -> Drawn | None:
        """The next indices, None if the user has that batch. Raises the sampler's errors; StopIteration at its end."""
        try:
            if self.count >= self._position.skips.end:
                raise StopIteration
            indices = next(self._sampler_iter)
        except StopIteration:
            self._position.sampler_ended(self.count)
            raise
        result = drawn(indices, self._checksum, carried())
        self._checksum = result.checksum
        self.count += 1
        return None if self._position.drawn(self.count - 1, self._sampler_iter, indices, self._checksum) else result


def new_position(loader: Any, state: State | None, base_seed: int, num_workers: int) -> Position:
    """The position of a new iterator of the loader, which continues from a state, or begins another epoch."""
    earlier = loader._position
    iterable = bool(loader._dataset_kind)
    position = Position(Samplers(loader), base_seed, num_workers, iterable=iterable)
    if state is not None:
        position.epoch_of_run, position.skips = state.epoch - 1, SkipSteps(known=state.skip_steps)
    elif earlier is not None:
        position.epoch_of_run, position.skips = earlier.epoch_of_run, earlier.skips
    return position
