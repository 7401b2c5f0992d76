"""The user's side of one epoch: the next batch, the draws for later batches, and the end.

Promise: the user's thread draws from the sampler when torch's would, submits, replaces workers, and receives. Where
batches are to be pinned, `rayloader-ahead` receives, opens and pins; where they come through Ray's object store, or
large ones over the network, it receives, and copies them into memory that the user may write to (preparing.py). `close`
drops all work in progress.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rayloader import skipping
from rayloader.epoch.budget import Budget
from rayloader.epoch.messages import (
    Closed,
    DrawsPutOff,
    DrawsUndone,
    IndicesDrawn,
    IndicesSkipped,
    Opened,
    Paced,
    SamplerExhausted,
    SamplerFailed,
    WorkerLost,
)
from rayloader.epoch.opening import Delivery
from rayloader.epoch.preparing import Preparer
from rayloader.epoch.receiver import TICK_S, Receiver
from rayloader.epoch.recovery import Recovery
from rayloader.epoch.schedule import Schedule
from rayloader.epoch.tables import Tables, changes
from rayloader.errors import BatchTimeoutError, RayloaderError, RaySessionError, SkipLimitError
from rayloader.observe.recorder import Tally
from rayloader.options import Options
from rayloader.protocol import CARRY
from rayloader.resume.draws import Drawn, drawn
from rayloader.resume.position import Position
from rayloader.sampling.prefetch import DrawAhead
from rayloader.transport.lanes import leased_bytes
from rayloader.workers.actor import Actor
from rayloader.workers.crew import Crew

logger = logging.getLogger("rayloader")

# Workers that share a process cannot wait for each other: after this many seconds without the next batch, a warning
# says so.
SHARED_PATIENCE_S = 30.0
# Tasks are held back while there are this many batches to take for each of them. See `Epoch._may_wait`.
HELD_BACK = 2


class Epoch:
    """The path of the batches of one epoch: indices in, batches out, in the schedule's order.

    Args:
        crew: one actor per worker, already told what to do.
        schedule: not yet opened.
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        options: of the loader.
        position: the user's position in the stream; kept up to date.
        pin: pins a batch, in a thread of its own; None: no pinning.
        device_index: accelerator that batches are pinned for, if any.
        tally: counts what happens.
    """

    def __init__(
        self,
        crew: Crew,
        schedule: Schedule,
        sampler_iter: Iterator[Any],
        options: Options,
        *,
        position: Position,
        pin: Callable[[Any], Any] | None,
        device_index: int | None,
        tally: Tally,
    ) -> None:
        self._crew = crew
        self._schedule = schedule
        self._sampler_iter = sampler_iter
        self._ahead = sampler_iter if isinstance(sampler_iter, DrawAhead) else None
        self._options = options
        self._position = position
        self.tables = Tables(crew, schedule, position.lock, tally)
        self._tally = tally
        self._recovery = Recovery(self.tables)
        self._receiver = Receiver(self.tables, self._recovery, position, options.max_skipped)
        self._preparer = Preparer(self.tables, self._receiver, pin, device_index)
        held = functools.partial(_bytes_held, crew, self._preparer, self.tables)  # without a reference to this object
        self._budget = Budget(self.tables, options.prefetch_bytes, options.prefetch_factor, held)
        self._drawing = False  # indices were requested from the sampler, and the schedule does not know of them yet
        self._out: Delivery | None = None  # what `next` returns until it is handed over
        self._draws = position.next_task
        self._checksum = position.checksum
        self._warned = False  # that workers share a process

    def open(self, *, fresh: bool = True) -> None:
        """Fills the window. Raises what the sampler raises. `fresh`: the workers have only just started."""
        self._position.sampler_begins(self._sampler_iter)
        for slot in self._crew.slots:
            if slot.away:
                self._crew.moving.replace(slot)
            elif fresh and (slot.journal.entries or slot.journal.state is not None):
                self._recovery.tell_again(slot)
        self.tables.handle(Opened())
        for slot in self._crew.slots:
            if slot.pace is not None and slot.pace.depth:  # as it was at the end of the loader's last epoch
                self.tables.handle(Paced(slot.worker_id, slot.pace.depth, slot.pace.ahead))
        self._draw_owed()
        self._preparer.start()
        self._crew.moving.use_joined_nodes()

    @property
    def finished(self) -> bool:
        """Whether every batch was taken; never true of an epoch that was closed before that."""
        with self.tables.lock:
            return self._schedule.finished

    @property
    def broken(self) -> bool:
        """Whether an interrupt has left the tables half changed, see NOTE [interrupts]."""
        return self._drawing or self.tables.broken

    def next(self) -> Delivery | None:
        """The next batch, None after the last. It remains the next until it is the position's `handed`.

        Raises:
            RayloaderError: a worker died, could not start, or did not answer in time; the epoch was closed or broken.
            Exception: raised by the sampler.
        """
        if self._position.handed is self._out:
            self._out = None
        self._position.settle()
        self._check_open()
        began = 0.0 if self.tables.deliverable else time.monotonic()
        while self._out is not None or self.tables.deliverable or not self.finished:
            if self._crew.moving.due:
                self._recovery.revive()
            if self._out is None:
                self._out = self._preparer.first()
            if self._out is None:
                self._check_open()
                self._check_integrity()
                began = began or time.monotonic()
                wait = max(0.0, min(TICK_S, self._deadline(began) - time.monotonic()))
                self._receive(wait)
                self._out = self._preparer.first()
            if self._out is not None:
                if not self._out.taken:
                    if not self._schedule.has(self._out.task):  # it was drawn again meanwhile
                        self._out = None
                        continue
                    self._end_turn(self._out)
                self._draw_owed()
                if self._out.data is not skipping.NOTHING:
                    return self._out
                self._drop_out()
                began = 0.0
                continue
            self._draw_owed()
            if not self._warned and time.monotonic() - began > SHARED_PATIENCE_S:
                self._warn_of_sharing()
            if time.monotonic() >= self._deadline(began):
                if self._options.on_timeout != "restart" or not self._restart_hung():
                    raise self._timed_out()
                began = time.monotonic()
        if self.tables.failure is not None:
            raise self.tables.failure.with_traceback(None)
        return None

    def _check_open(self) -> None:
        """Raises if the epoch cannot go on. Until it waits, `next` then calls Ray without checking again."""
        if self.broken:
            self._crew.check_session()
            raise _interrupted()
        if self._schedule.closed and not self._schedule.finished:
            if self.tables.failure is not None:
                raise self.tables.failure.with_traceback(None)
            self._crew.check_session()
            raise RaySessionError(
                "this epoch was ended: iter() was called on the loader again meanwhile, or shutdown()"
            )
        if self.tables.deliverable or not self._schedule.finished:
            self._crew.check_session()

    @changes
    def _end_turn(self, delivery: Delivery) -> None:
        """The batch is handed to the user."""
        if self.tables.deliverable and self.tables.deliverable[0][0] is delivery.task:
            self.tables.deliverable.popleft()
            self._preparer.taken(delivery.task)
        self.tables.taken(delivery.task)
        delivery.taken = True
        self._budget.gave(delivery.nbytes)
        if delivery.skipped:
            self._tally.skipped += len(delivery.skipped)
            try:
                self._position.skip(delivery.skipped, self._options.max_skipped)
            except SkipLimitError:
                self._drop_out()
                raise

    def _drop_out(self) -> None:
        """Counts the next batch as handed over although the user does not get it."""
        if self._out is not None:
            self._position.handed = self._out
            self._position.settle()
            self._out = None

    @property
    def bytes_under_way(self) -> int:
        """Bytes of batches that have come and were not taken. Any thread may ask."""
        return sum(result.nbytes for result in self.tables.untaken)

    @property
    def bytes_held(self) -> int:
        """Bytes of shared memory in batches that the user was given. Any thread may ask."""
        return _bytes_held(self._crew, self._preparer, self.tables)

    def resize(self, count: int) -> None:
        """Changes the number of actors that host the same workers."""
        self._tally.processes = count
        self._move_workers(count)
        self._recovery.revive()
        self.tables.flush()

    @changes
    def _move_workers(self, count: int) -> None:
        self._receiver.take()
        self._recovery.have_moved(self._crew.moving.resize(count))

    def close(self, *, resuming: bool = False, wait: bool = True) -> None:
        """Drops all work in progress; callable more than once. `wait`: until `rayloader-ahead` has ended.

        With `resuming`, the workers are to continue with another epoch, from where torch's would be by now: they finish
        their first tasks, and `dropped` says which tasks must be undone.
        """
        with self.tables.lock:
            if resuming:
                self._recovery.tell_what_waits()
            self.tables.handle(Closed(resuming))
            for slot in self._crew.slots:
                slot.drop_calls()
            self.tables.deliverable.clear()
        self._preparer.close(wait=wait)
        self._crew.ring()

    # ---- drawing

    def _draw_owed(self) -> None:
        """Draws what the schedule has requested; in the user's thread, because sampler and generator are the user's."""
        ahead = self._ahead
        self._reach(ahead)
        while self._schedule.owed_draws:
            if ahead is not None and not ahead.may_draw:
                self.tables.handle(DrawsPutOff())
                break
            self._drawing = True
            try:
                indices = self._draw()
            except StopIteration:
                self._position.sampler_ended(self._draws)
                self.tables.handle(SamplerExhausted())
            except Exception:  # from the sampler, or because its indices cannot be pickled
                self.tables.handle(SamplerFailed())
                self._drop_out()  # as with torch's loader: the error takes the place of a batch that has come
                self._drawing = False
                raise
            else:
                skip = self._position.has(self._draws - 1)
                self.tables.handle(IndicesSkipped() if skip else IndicesDrawn(indices))
                if skip:  # torch's loader would have drawn another one
                    self._reach(ahead)
                if self._draws == self._schedule.torch_draws:  # the workers begin while what comes later is drawn
                    self.tables.flush()
            self._drawing = False
        if not self._may_wait():
            self.tables.flush()

    def _may_wait(self) -> bool:
        """Whether messages to the workers may be delayed, so that several tasks go in one message.

        The workers have been sent everything that torch's would have been given by now, and the user has far more
        batches to take than tasks are held back. A thread that has to wait for a batch sends the tasks first.
        """
        unsent = self.tables.unsent
        if not unsent:
            return True
        if not self._schedule.is_paced or min(unsent) < self._schedule.torch_draws:
            return False
        return HELD_BACK * len(unsent) <= len(self.tables.deliverable)

    def _reach(self, ahead: DrawAhead | None) -> None:
        """Checks draws that were made early, at the moment at which torch's loader would have made them."""
        if ahead is None:
            return
        self._drawing = True
        torch_draws = self._schedule.torch_draws
        if (changed := ahead.reach(torch_draws)) is not None:
            out = self._out.task.task_id if self._out is not None and self._out.taken else -1
            if ahead.regroups and (out >= changed or self._position.is_past(changed)):  # only without order
                raise RayloaderError(
                    "the sampler's batch_size was changed during the epoch, and you already have batches that would "
                    'have to be drawn again in other sizes. With in_order=False and scheduling="dynamic" the sampler '
                    "is read far ahead: change batch_size between two epochs, or pass prefetch_factor"
                )
            self._undo(changed)
        self._position.drawn_by_torch = torch_draws
        self._drawing = False

    def _draw(self) -> Drawn:
        began = time.perf_counter()
        indices = next(self._sampler_iter)
        self._tally.drawing += time.perf_counter() - began
        result = drawn(indices, self._checksum, CARRY)
        self._checksum = result.checksum
        self._draws += 1
        self._position.drawn(self._draws - 1, self._sampler_iter, indices, self._checksum)
        return result

    def _undo(self, from_task: int) -> None:
        """Takes the workers back to before they were given this task, to build what is drawn instead."""
        self.note_begins()
        with self.tables.lock:
            if self.tables.failure is not None:
                return
            self._receiver.take()
            before = [task for task in self._schedule.tasks if task.task_id < from_task]
            last = before[-1] if before else self._out.task if self._out is not None else None
            self._checksum = last.indices.checksum if last is not None else self._position.checksum
            self._draws = from_task
            self._position.undrawn(from_task)
            self.tables.deliverable = deque(entry for entry in self.tables.deliverable if entry[0].task_id < from_task)
            self._preparer.undone(from_task)
            self.tables.handle(DrawsUndone(from_task))
            for slot in self._crew.slots:
                if slot.journal.untell(from_task):
                    self._crew.restart(slot)
                    slot.drop_calls()
                    self.tables.handle(WorkerLost(slot.worker_id, "it was given what was not to come", blameless=True))
        self._recovery.revive()

    def _check_integrity(self) -> None:
        """Raises if something in progress was lost, because a wait for it would never end."""
        with self.tables.lock:
            under_way = self.tables.is_under_way or self.tables.deliverable or self._schedule.owed_draws
            if not under_way and not self._schedule.finished and self.tables.failure is None:
                raise _interrupted()

    # ---- receiving

    def _receive(self, wait: float) -> None:
        """Waits about `wait` seconds until something comes, and handles what has come."""
        if not self.tables.deliverable and self.tables.failure is not None:
            raise self.tables.failure.with_traceback(None)
        came = self._await(wait)
        while self._receiver.lost:
            lost = self._receiver.lost[0]
            self._lose(lost.actor, lost.cause, lost.suspect)
            self._receiver.lost.popleft()
        if self._crew.moving.awaited:
            self._recovery.revive()
        self._preparer.start()
        if not came and self._recovery.move_homeless():
            self._recovery.revive()

    def _await(self, wait: float) -> bool:
        """Waits for something to come; returns whether something has."""
        tally, behind = self._tally, bool(self.tables.results)
        if self._preparer.receives:
            began = time.perf_counter()
            came = self._preparer.wait(wait)
            waited = time.perf_counter() - began
        else:
            came = self._receiver.wait(wait)
            waited = self._receiver.waited
        tally.blocked += waited
        if behind:
            tally.behind += waited
        return came

    @changes
    def _lose(self, actor: Actor, cause: str, suspect: int | None = None) -> None:
        """Continues without an actor; another one takes over its workers and their tasks."""
        self._receiver.take()  # messages that it sent before still count
        self._recovery.give_up(actor, cause, suspect)
        self._recovery.revive()

    def note_begins(self) -> None:
        """Waits until every worker has begun the epoch."""
        while self.tables.failure is None and [slot for slot in self._crew.slots if not slot.journal.begun]:
            self._receive(TICK_S)

    # ---- waiting

    def _restart_hung(self) -> bool:
        """Replaces the worker whose batch is overdue; returns False if there is none."""
        with self.tables.lock:
            head = self._schedule.head
            if head is None or self.tables.deliverable:
                return False
            if head.is_anybodys:
                hung = {slot.host for slot in self._crew.slots if slot.calls}
            else:
                hung = {self._crew.slots[head.worker_id].host}
            for actor in hung:
                self._lose(actor, f"it gave no batch for {self._options.timeout} s (timeout), and was killed")
        return bool(hung)

    def _deadline(self, began: float) -> float:
        """When the user has waited long enough.

        That is `timeout` seconds after the latest of: the user's call, the last answer of any worker (torch's rule),
        and the start of the worker whose batch is next.
        """
        if not self._options.timeout:
            return math.inf
        started = began
        with self.tables.lock:
            head = self._schedule.head
        if head is not None and not head.is_anybodys:
            slot = self._crew.slots[head.worker_id]
            if slot.host.address is None:
                return math.inf
            started = max(slot.host.started_at or began, slot.told_at)  # it may have moved to one that hosts others
        return max(began, self._receiver.last_arrival, started) + self._options.timeout

    def _warn_of_sharing(self) -> None:
        with self.tables.lock:
            head = self._schedule.head
            if head is None or head.is_anybodys:
                return
            hosted = self._crew.moving.hosted_by(self._crew.slots[head.worker_id].host)
            waiting = [slot.worker_id for slot in hosted if slot.calls]
        if len(waiting) > 1:
            self._warned = True
            logger.warning(
                "rayloader: no batch for %.0f s while workers %s wait for the same process; workers that wait for each "
                "other cannot share one: raise num_workers, or resize(), to the number that the state was saved with",
                SHARED_PATIENCE_S,
                waiting,
            )

    def _timed_out(self) -> BatchTimeoutError:
        with self.tables.lock:
            head = self._schedule.head
        what = f" waiting for {self.tables.describe(head)}" if head is not None else " waiting for pinned memory"
        return BatchTimeoutError(
            f"DataLoader timed out after {self._options.timeout} seconds{what}. Raise timeout if batches may take so "
            'long; on_timeout="restart" replaces a worker that hangs'
        )


def _interrupted() -> RayloaderError:
    return RayloaderError(
        "this iterator was interrupted (by Ctrl-C, or a signal handler that raised) and has lost its place; "
        "call iter() on the loader again. state_dict() still says which batches were taken"
    )


def _bytes_held(crew: Crew, preparer: Preparer, tables: Tables) -> int:
    ready = sum(leased_bytes(result.wire) for result in tables.untaken if result.wire is not None)
    return max(0, crew.leased_bytes + preparer.leased_bytes - ready)
