"""One epoch: where the schedule meets I/O.

Promise: `Epoch` feeds events to the schedule and carries out its commands; it decides nothing. It owns the unanswered
calls, the answers that wait for their turn, and the pin thread; `close` ends all of them.

Threads: the user's thread draws from the sampler, at torch's moments, submits, replaces workers, and receives. Where
batches are to be pinned `rayloader-pin` receives, opens and pins. `Epoch._lock` guards the schedule and the tables.

NOTE [interrupts]
In the main thread a signal handler, Ctrl-C's for one, may raise at almost any line. Three rules keep `next()` right:
1. A batch stays the next one until `EpochIterator.__next__` notes, as the last thing that it does, that the user has
   it (`Position.handed`). CPython runs handlers when a call returns, when a function is entered and in loops, and
   between that note and the user there is none of these. All that comes before may be done again, or is marked as done.
2. What changes the tables is marked before and after (`_changes`). Where an exception breaks it off that is not ours,
   the epoch is `broken`: `next()` says so, and the next `iter()` starts with fresh workers. The position is right
   nevertheless, for it counts what was handed over and nothing else.
3. Locks that the user's thread takes are C's own, and waits are one call of `select.poll`.
"""

from __future__ import annotations

import functools
import logging
import math
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch._utils import ExceptionWrapper

from rayloader import skipping
from rayloader.channel import ActorLost, LineRefused, Message
from rayloader.checkpoint import Position
from rayloader.crew import Actor, Crew
from rayloader.delivery.pinning import PinThread
from rayloader.draws import Drawn, drawn
from rayloader.errors import (
    BatchTimeoutError,
    RayloaderError,
    RaySessionError,
    SkipLimitError,
    WorkerDiedError,
    add_note,
)
from rayloader.journal import Resumed, Told
from rayloader.messages import (
    ANY_WORKER,
    BatchTaken,
    Closed,
    Deliver,
    DrawIndices,
    DrawsPutOff,
    DrawsUndone,
    Drop,
    Event,
    Fail,
    Forget,
    IndicesDrawn,
    IndicesSkipped,
    Opened,
    Paced,
    ReplaceWorker,
    SamplerExhausted,
    SamplerFailed,
    Submit,
    Task,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)
from rayloader.options import Options
from rayloader.pace import Pace
from rayloader.prefetch import DrawAhead
from rayloader.protocol import CARRY, ENDS, Answer, Result, ResultKind, Up, result_of
from rayloader.schedule import Schedule
from rayloader.snapshot import WorkerState
from rayloader.transport.lanes import Lent, from_wire, unplaced

logger = logging.getLogger("rayloader")

# How often a wait for the head looks at the other workers, in seconds: a dead one may be what the head waits for.
TICK_S = 1.0
# How many batches are opened and pinned before the user asks for them.
PINNED_AHEAD = 2
# After how many seconds of building batches again that is said, and again each time that it has taken twice as long.
REPLAY_PATIENCE_S = 10.0
# After how many seconds without the next batch it is said that workers of one process cannot wait for each other.
SHARED_PATIENCE_S = 30.0


@dataclass(eq=False, slots=True)
class Delivery:
    """A task and its batch, or the user's exception in its place; `skipping.NOTHING` where all was skipped."""

    task: Task
    data: Any
    skipped: tuple[tuple[str, str], ...] = ()
    taken: bool = False  # the schedule knows
    counted: bool = False  # the position knows: the user has it


@dataclass(frozen=True, slots=True)
class _Call:
    """An unanswered call of a worker."""

    actor: Actor
    number: int  # counts the actor's calls
    task_id: int | None  # that it is to build; None: what was built before, again
    lent: Lent | None  # room for its batch


@dataclass(slots=True)
class _Replay:
    """What a worker that was restored builds again, before it is told anything else."""

    began: float  # time.monotonic()
    news_at: float  # when to say how far it is


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _changes(method: _Method) -> _Method:
    """Marks a method that changes the tables of an epoch, see NOTE [interrupts]."""

    @functools.wraps(method)
    def change(self: Epoch, *args: Any) -> Any:
        with self._lock:
            self._begun += 1
            try:
                result = method(self, *args)
            except BaseException as error:
                ours = isinstance(error, (RayloaderError, ActorLost))
                if ours or threading.current_thread() is not threading.main_thread():
                    self._ended += 1  # no interrupt: nothing was left half done
                raise
            self._ended += 1
            return result

    return change  # type: ignore[return-value]


class Epoch:
    """The way of the batches of one epoch: indices in, batches out, in the schedule's order.

    Args:
        crew: one actor a worker, told what to do.
        schedule: not yet opened.
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        options: of the loader.
        paces: of each worker, say how deep to go; none where that is the user's to say.
        position: where the user is in the stream; kept up to date.
        pin: pins a batch, in a thread of its own; None: no pinning.
        device_index: accelerator that the pin thread works for, if any.
    """

    def __init__(
        self,
        crew: Crew,
        schedule: Schedule,
        sampler_iter: Iterator[Any],
        options: Options,
        *,
        paces: list[Pace],
        position: Position,
        pin: Callable[[Any], Any] | None,
        device_index: int | None,
    ) -> None:
        self._crew = crew
        self._sampler_iter = sampler_iter
        self._paces = paces
        self._options = options
        self._position = position
        self._pin = pin
        self._device_index = device_index
        self._pin_thread: PinThread | None = None
        self._lock = position.lock  # guards what follows
        self._begun = self._ended = 0  # changes of what follows
        self._drawing = False  # the sampler was asked, and the schedule does not know of it yet
        self._out: Delivery | None = None  # what `next` gives until it was handed over
        self._schedule = schedule
        self._calls: list[deque[_Call]] = [deque() for _ in crew.journals]  # unanswered, by worker, oldest first
        self._replays: dict[int, _Replay] = {}  # under way, by worker
        self._unanswered: set[int] = set()  # tasks
        self._results: dict[int, Result] = {}  # not delivered, by task
        self._deliverable: deque[tuple[Task, Result]] = deque()  # in delivery order
        self._pinned: dict[int, Delivery] = {}  # of the first of them, by task
        self._lost: deque[ActorLost] = deque()  # not gone on without yet
        self._draws = position.next_task
        self._checksum = position.checksum
        self.dropped: dict[int, int] = {}  # by worker: its first task that nobody wants any more, set by `close`
        self._last_arrival = 0.0  # time.monotonic()
        self._failure: WorkerDiedError | None = None
        self._warned = False  # of workers that share a process
        self._doubted = False  # a batch of a dataset that is believed

    def open(self, *, fresh: bool = True) -> None:
        """Fills the window. What the sampler raises is raised here. `fresh`: the workers have only just started."""
        self._position.sampler_begins(self._sampler_iter)
        for worker_id, journal in enumerate(self._crew.journals):
            if self._crew.is_away(worker_id):
                self._crew.replace(worker_id)
            elif fresh and (journal.entries or journal.state is not None):
                self._tell_again(worker_id)
        self._handle(Opened())
        for worker_id, pace in enumerate(self._paces):  # as the loader's last epoch left them
            if pace.places:
                self._handle(Paced(worker_id, pace.places, pace.ahead))
        self._draw_owed()
        if self._pin is not None:
            self._pin_thread = PinThread(self._pin_next, self._device_index)

    @property
    def finished(self) -> bool:
        """Whether every batch was taken; never true of an epoch that was closed before."""
        with self._lock:
            return self._schedule.finished

    @property
    def broken(self) -> bool:
        """Whether an interrupt has left it half changed, see NOTE [interrupts]."""
        with self._lock:
            return self._drawing or self._begun != self._ended

    def next(self) -> Delivery | None:
        """The next batch, None after the last. It stays the next until it is the position's `handed`.

        Raises:
            RayloaderError: a worker died, could not start, or did not answer in time; the epoch was closed or broken.
            Exception: the sampler's own.
        """
        if self._position.handed is self._out:
            self._out = None
        self._position.settle()
        self._check_open()
        began = 0.0 if self._deliverable else time.monotonic()
        while self._out is not None or not self.finished:
            if self._out is None:
                self._out = self._first()
            if self._out is None:
                self._check_open()
                self._check_integrity()
                began = began or time.monotonic()
                wait = max(0.0, min(TICK_S, self._deadline(began) - time.monotonic()))
                self._receive(wait)
                self._out = self._first()
            if self._out is not None:
                if self._is_stale(self._out):
                    self._out = None
                    continue
                self._take(self._out)
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
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return None

    def _check_open(self) -> None:
        """Raises where the epoch cannot go on."""
        if self.broken:
            self._crew.check_session()
            raise RayloaderError(
                "this iterator was interrupted (by Ctrl-C, or a signal handler that raised) and has lost its place; "
                "call iter() on the loader again. state_dict() still says which batches were taken"
            )
        if self._schedule.closed and not self._schedule.finished:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            self._crew.check_session()
            raise RaySessionError(
                "this epoch was ended: iter() was called on the loader again meanwhile, or shutdown()"
            )
        if not self._schedule.finished:
            self._crew.check_connected()

    def _is_stale(self, delivery: Delivery) -> bool:
        """Whether it was drawn again meanwhile."""
        return not delivery.taken and not self._schedule.has(delivery.task)

    def _take(self, delivery: Delivery) -> None:
        """The user gets the batch."""
        if not delivery.taken:
            self._end_turn(delivery)
        self._draw_owed()

    @_changes
    def _end_turn(self, delivery: Delivery) -> None:
        if self._deliverable and self._deliverable[0][0] is delivery.task:
            self._deliverable.popleft()
            self._pinned.pop(delivery.task.task_id, None)
        self._handle(BatchTaken(delivery.task.task_id))
        delivery.taken = True
        try:
            self._count_skipped(delivery.skipped)
        except SkipLimitError:
            self._drop_out()
            raise

    def _drop_out(self) -> None:
        """The next batch counts as handed over though the user does not get it."""
        if self._out is not None:
            self._position.handed = self._out
            self._position.settle()
            self._out = None

    def _count_skipped(self, skipped: tuple[skipping.Skipped, ...]) -> None:
        self._position.skipped += len(skipped)
        skipping.tell(skipped, self._position.skipped, self._options.max_skipped)

    def resize(self, count: int) -> None:
        """Another number of actors for the same workers."""
        self._move_workers(count)
        self._revive()
        self._flush()

    @_changes
    def _move_workers(self, count: int) -> None:
        self._take_arrivals()
        self._have_moved(self._crew.resize(count))

    def close(self, *, resuming: bool = False, wait: bool = True) -> None:
        """Drops what is under way; callable more than once. `wait`: until the pin thread has ended.

        With `resuming` the workers are to go on with another epoch, from where torch's would be by now: they finish
        their first tasks, and `dropped` says which are to be undone.
        """
        with self._lock:
            if resuming:
                self._tell_what_waits()
            self._handle(Closed(resuming))
            for calls in self._calls:
                calls.clear()
            self._deliverable.clear()
            self._pinned.clear()
        if self._pin_thread is not None:
            self._pin_thread.close(wait=wait)
        self._crew.ring()

    @_changes
    def _tell_what_waits(self) -> None:
        """Workers that still build again what they had built are told at once what torch's have been given by now."""
        for worker_id in list(self._replays):
            del self._replays[worker_id]
            self._tell_unanswered(worker_id)
        self._crew.flush()

    # ---- events in, commands out

    @_changes
    def _handle(self, event: Event) -> None:
        for command in self._schedule.handle(event):
            match command:
                case DrawIndices():
                    pass  # owed: the sampler belongs to the user's thread, see _draw_owed
                case Submit(task):
                    self._submit(task)
                case Deliver(task):
                    self._deliverable.append((task, self._results.pop(task.task_id)))
                case Forget(task_ids):
                    for task_id in task_ids:
                        self._unanswered.discard(task_id)
                        self._results.pop(task_id, None)
                case Drop(worker_id, first_task_id):
                    self._crew.drop(worker_id, first_task_id)
                    self.dropped[worker_id] = first_task_id
                case ReplaceWorker(worker_id, cause):
                    if self._crew.replace(worker_id):
                        logger.warning("rayloader: worker %d is lost and gets another process: %s", worker_id, cause)
                case Fail():
                    self._failure = self._worker_died(command)
        if self._pin_thread is not None:
            self._pin_thread.ring()

    def _draw_owed(self) -> None:
        """Draws what the schedule asked for; in the user's thread, for the sampler and its generator are the user's."""
        ahead = self._sampler_iter if isinstance(self._sampler_iter, DrawAhead) else None
        self._reach(ahead)
        while self._schedule.owed_draws:
            if ahead is not None and not ahead.may_draw:
                self._handle(DrawsPutOff())
                break
            self._drawing = True
            try:
                indices = self._draw()
            except StopIteration:
                self._position.sampler_ended(self._draws)
                self._handle(SamplerExhausted())
            except Exception:  # the sampler's own, or that its indices cannot be pickled
                self._handle(SamplerFailed())
                self._drop_out()  # as with torch's loader: the error comes in place of a batch that is there
                self._drawing = False
                raise
            else:
                skip = self._position.has(self._draws - 1)
                self._handle(IndicesSkipped() if skip else IndicesDrawn(indices))
                if skip:  # torch's loader would have drawn another one
                    self._reach(ahead)
            self._drawing = False
        self._flush()

    def _reach(self, ahead: DrawAhead | None) -> None:
        """What was drawn early is looked at when torch's loader would have drawn it."""
        if ahead is None:
            return
        self._drawing = True
        if (changed := ahead.reach(self._schedule.torch_draws)) is not None:
            self._undo(changed)
        self._position.drawn_by_torch = self._schedule.torch_draws
        self._drawing = False

    def _draw(self) -> Drawn:
        indices = next(self._sampler_iter)
        result = drawn(indices, self._checksum, CARRY)
        self._checksum = result.checksum
        self._draws += 1
        self._position.drawn(self._draws - 1, self._sampler_iter, indices, self._checksum)
        return result

    def _undo(self, from_task: int) -> None:
        """The workers go back to before they were given this task, and build what is drawn instead."""
        self.note_begins()
        with self._lock:
            if self._failure is not None:
                return
            self._take_arrivals()
            before = [task for task in self._schedule.tasks if task.task_id < from_task]
            last = before[-1] if before else self._out.task if self._out is not None else None
            self._checksum = last.indices.checksum if last is not None else self._position.checksum
            self._draws = from_task
            self._position.undrawn(from_task)
            self._deliverable = deque(entry for entry in self._deliverable if entry[0].task_id < from_task)
            self._pinned = {task_id: d for task_id, d in self._pinned.items() if task_id < from_task}
            self._handle(DrawsUndone(from_task))
            for worker_id, journal in enumerate(self._crew.journals):
                if journal.untell(from_task):
                    self._crew.restart(worker_id)
                    self._drop_calls(worker_id)
                    self._handle(WorkerLost(worker_id, "it was given what was not to come", blameless=True))
        self._revive()

    def _check_integrity(self) -> None:
        """Raises where something under way was lost, which would be waited for for ever."""
        with self._lock:
            under_way = self._is_under_way() or self._deliverable or self._schedule.owed_draws
            if not under_way and not self._schedule.finished and self._failure is None:
                raise RayloaderError("this iterator was interrupted and has lost its place; call iter() again")

    def _is_under_way(self) -> bool:
        return any(self._calls) or bool(self._crew.awaited)

    def _submit(self, task: Task) -> None:
        self._crew.check_session()
        told = Told(task.task_id, task.indices.encoded)
        self._crew.journals[task.worker_id].told(told)
        self._unanswered.add(task.task_id)
        if not self._crew.is_away(task.worker_id) and task.worker_id not in self._replays:
            self._run(task.worker_id, told)

    def _run(self, worker_id: int, told: Told) -> None:
        lent = self._crew.run(worker_id, told)
        actor = self._crew.actor(worker_id)
        self._calls[worker_id].append(_Call(actor, actor.calls, told.task_id, lent))

    def _replay(self, worker_id: int, tasks: list[Told]) -> None:
        self._crew.replay(worker_id, tasks)
        actor = self._crew.actor(worker_id)
        self._calls[worker_id].append(_Call(actor, actor.calls, None, None))

    def _tell_unanswered(self, worker_id: int) -> None:
        for told in self._crew.journals[worker_id].tasks:
            if told.task_id in self._unanswered:
                self._run(worker_id, told)

    # ---- workers that lose their process, or move to another

    def _lose(self, actor: Actor, cause: str, suspect: int | None = None) -> None:
        """Goes on without an actor; its workers' tasks are told to its successor."""
        self._give_up(actor, cause, suspect)
        self._revive()

    @_changes
    def _give_up(self, actor: Actor, cause: str, suspect: int | None = None) -> None:
        self._take_arrivals()  # what it sent before is the driver's
        if self._crew.is_dead(actor):
            return
        worker_ids = self._crew.hosted_by(actor)
        numbers = {w: self._calls[w][0].number for w in worker_ids if self._calls[w]}
        at_work = min(numbers, key=numbers.__getitem__, default=None)  # it makes one call after the other
        admitted = suspect is not None
        if suspect is None and at_work is not None and self._crew.has_begun(at_work):
            suspect = self._calls[at_work][0].task_id
        self._crew.lose(actor)
        for worker_id in worker_ids:
            self._drop_calls(worker_id)
            blameless = at_work not in (None, worker_id)
            lost = WorkerLost(worker_id, cause, suspect, admitted) if not blameless else None
            self._handle(lost or WorkerLost(worker_id, cause, blameless=True))

    @_changes
    def _have_moved(self, worker_ids: list[int]) -> None:
        """Takes in that these workers are to go on in other processes."""
        for worker_id in worker_ids:
            self._drop_calls(worker_id)
            self._handle(WorkerLost(worker_id, "it moves to another process", blameless=True))

    def _drop_calls(self, worker_id: int) -> None:
        self._calls[worker_id].clear()
        self._replays.pop(worker_id, None)

    @_changes
    def _revive(self) -> None:
        """Sends lost tasks again where there is a process for them."""
        while self._failure is None:
            try:
                ready = self._crew.revive()
            except ActorLost as lost:  # another one
                self._give_up(lost.actor, str(lost))
                continue
            for worker_id in ready:
                self._tell_again(worker_id)
            break

    def _tell_again(self, worker_id: int) -> None:
        """Brings a worker that was started from its last snapshot to where it is to be, see NOTE [blame]."""
        journal = self._crew.journals[worker_id]
        entries, tasks = journal.entries, journal.tasks
        for entry in entries[: len(entries) - len(tasks)]:
            if isinstance(entry, Resumed):
                self._crew.resume(worker_id, entry)
            else:
                self._crew.replay(worker_id, [entry])
        known = [task for task in tasks if task.task_id not in self._unanswered]
        began = time.monotonic()
        self._replays[worker_id] = _Replay(began, began + REPLAY_PATIENCE_S)
        self._replay(worker_id, known)

    def _go_on_replaying(self, worker_id: int, done: int, total: int) -> None:
        """The worker has built a part of what it must build again."""
        if done < total:
            replay, now = self._replays[worker_id], time.monotonic()
            if now >= replay.news_at:
                seconds = now - replay.began
                replay.news_at = now + max(REPLAY_PATIENCE_S, seconds)
                logger.warning(
                    "rayloader: worker %d builds again what it had built before: %d of %d batches in %.0f s, %.1f a "
                    "second; a dataset with state_dict() and load_state_dict() need not be read again",
                    *(worker_id, done, total, seconds, done / max(seconds, 1e-9)),
                )
            self._replay(worker_id, [])
            return
        del self._replays[worker_id]
        self._tell_unanswered(worker_id)
        self._handle(WorkerReady(worker_id))

    def _restart_hung(self) -> bool:
        """Replaces the worker whose batch is overdue; False if there is none."""
        with self._lock:
            head = self._schedule.head
            if head is None or self._deliverable:
                return False
            if head.worker_id != ANY_WORKER:
                hung = {self._crew.actor(head.worker_id)}
            else:
                hung = {self._crew.actor(worker_id) for worker_id, calls in enumerate(self._calls) if calls}
            for actor in hung:
                self._lose(actor, f"it gave no batch for {self._options.timeout} s (timeout), and was killed")
        return bool(hung)

    # ---- receiving

    def _receive(self, wait: float) -> None:
        """Waits until something comes, for about `wait` seconds, and takes in what has."""
        if not self._deliverable and self._failure is not None:
            raise self._failure.with_traceback(None)
        came = self._pin_thread.wait(wait) if self._pin_thread is not None else self._wait_and_take(wait)
        while self._lost:
            lost = self._lost[0]
            self._lose(lost.actor, str(lost))
            self._lost.popleft()
        if self._crew.awaited:
            self._revive()
        if not came and self._move_homeless():
            self._revive()

    @_changes
    def _flush(self) -> None:
        self._crew.flush()

    def _wait_and_take(self, wait: float) -> bool:
        self._flush()
        came = self._crew.wait(wait)
        self._take_arrivals()
        return came

    @_changes
    def _take_arrivals(self) -> None:
        """Takes in what has come, but for the news that an actor is lost."""
        for actor, message in self._crew.receive():
            self._last_arrival = time.monotonic()
            if isinstance(message, ActorLost):
                self._lost.append(message)
            elif isinstance(message, LineRefused):
                self._have_moved(self._crew.fall_back(actor, str(message)))
                self._revive()
            else:
                self._take_message(actor, message)

    def _take_message(self, actor: Actor, message: Message) -> None:
        kind, worker_id, number, content = message
        if kind == Up.BEGUN:
            journal = self._crew.journals[worker_id]
            if not journal.begun and journal.resumed == (actor, number):
                journal.reached_begin(WorkerState(*content))
            return
        call = self._calls[worker_id][0] if self._calls[worker_id] else None
        if call is None or call.actor is not actor or call.number != number:
            return  # closed meanwhile, or the worker was given up: a late answer is nobody's
        self._take_answer(worker_id, call, Answer(*content))

    def _first(self) -> Delivery | None:
        """The next batch, opened, and pinned where that is asked for; None if it is not there yet.

        It stays there until the end of its turn.
        """
        with self._lock:
            first = self._deliverable[0] if self._deliverable else None
        if first is None:
            return None
        if self._pin_thread is not None:
            self._pin_thread.check()
            return self._pinned[first[0].task_id] if self._is_pinned(first[0]) else None
        return _opened(*first)

    def _pin_next(self) -> bool:
        """Opens and pins a batch, or waits for one; False if as many are pinned as may be. In the pin thread."""
        assert self._pin is not None
        with self._lock:
            if self._schedule.closed:
                return False
            first = [self._deliverable[place] for place in range(min(PINNED_AHEAD, len(self._deliverable)))]
            entry = next((entry for entry in first if not self._is_pinned(entry[0])), None)
            idle = self._failure is not None or not self._is_under_way()
        if entry is None:
            if len(first) == PINNED_AHEAD or idle:
                return False
            self._wait_and_take(TICK_S)
            return True
        delivery = _opened(*entry)
        if not isinstance(delivery.data, ExceptionWrapper) and delivery.data is not skipping.NOTHING:
            try:
                delivery.data = self._pin(delivery.data)
            except Exception:  # a custom pin_memory() may raise anything: it arrives in its turn, as torch's does
                where = f"in pin memory thread for device {self._device_index}"
                delivery.data = ExceptionWrapper(where=where)
        with self._lock:
            if any(other[0] is delivery.task for other in self._deliverable):
                self._pinned[delivery.task.task_id] = delivery
        return True

    def _is_pinned(self, task: Task) -> bool:
        return task.task_id in self._pinned and self._pinned[task.task_id].task is task

    @_changes
    def _move_homeless(self) -> bool:
        """Has workers whose actor found no place go on in the others."""
        moved = self._crew.check_started()
        self._have_moved(moved)
        return bool(moved)

    def _take_answer(self, worker_id: int, call: _Call, answer: Answer) -> None:
        lane, journal = call.actor.lane, self._crew.journals[worker_id]
        result = None if answer.result is None else result_of(answer.result)
        if result is not None and not self._take_result(worker_id, result, call.lent):
            return
        if answer.state is not None:
            journal.reached(WorkerState(*answer.state))
        self._calls[worker_id].popleft()
        if answer.doubt is not None and not self._doubted:
            self._doubted = True
            logger.warning(
                "rayloader: batch %d of worker %d was built again and is not what it was. Its dataset has state_dict() "
                "and is believed; if that leaves something out, such as a shuffle buffer, samples are lost or repeated "
                "from here on. If the batch shows the time or the process, all is well",
                *(answer.doubt, worker_id),
            )
        if answer.full:
            lane.was_full()
        if answer.no_arena:
            lane.refused(answer.no_arena)
        if result is None:
            self._go_on_replaying(worker_id, *answer.replay)
        elif result.kind is ResultKind.EXHAUSTED:  # it writes nothing any more, and will say nothing new
            self._calls[worker_id].clear()
            journal.exhausted()
        elif self._paces:
            pace = self._paces[worker_id]
            if pace.saw(answer.seconds, result.nbytes):
                self._handle(Paced(worker_id, pace.places, pace.ahead))

    def _take_result(self, worker_id: int, result: Result, lent: Lent | None) -> bool:
        """Reports a result to the schedule, unless that has forgotten its task; False if the process has ended."""
        if result.kind in ENDS:
            suspect = result.task_id if result.kind is ResultKind.EXITED else None
            self._lose(self._crew.actor(worker_id), result.text, suspect)
            return False
        if result.task_id not in self._unanswered:
            return True
        if result.kind is ResultKind.EXHAUSTED:
            self._count_skipped(result.skipped)
            self._handle(WorkerExhausted(result.task_id))
            return True
        if result.wire is not None and lent is not None:
            result = result._replace(wire=unplaced(result.wire, lent))
        self._results[result.task_id] = result
        self._crew.journals[worker_id].answered(result.task_id, result.digest)
        self._handle(TaskDone(result.task_id))
        self._unanswered.discard(result.task_id)
        return True

    def note_begins(self) -> None:
        """Waits until every worker has begun the epoch."""
        while self._failure is None and not all(journal.begun for journal in self._crew.journals):
            self._receive(TICK_S)

    def _worker_died(self, fail: Fail) -> WorkerDiedError:
        address = self._crew.address(fail.worker_id)
        process, node = (f"(pid(s) {address.pid})", f" on {address.hostname}") if address else ("(not started)", "")
        error = WorkerDiedError(
            f"DataLoader worker {process} exited unexpectedly: worker {fail.worker_id}{node}. Cause: {fail.cause}",
            fail.worker_id,
        )
        if fail.task is not None:
            add_note(error, describe(fail.task, self._crew))
        return error

    # ---- waiting

    def _deadline(self, began: float) -> float:
        """When the user has waited long enough.

        That is `timeout` seconds after the user asked, after the last answer of any worker (torch's rule), and after
        the start of the worker whose batch is next.
        """
        if not self._options.timeout:
            return math.inf
        started = began
        with self._lock:
            head = self._schedule.head
        if head is not None and head.worker_id != ANY_WORKER:
            actor = self._crew.actor(head.worker_id)
            if actor.address is None:
                return math.inf
            started = actor.started_at or began
        return max(began, self._last_arrival, started) + self._options.timeout

    def _warn_of_sharing(self) -> None:
        with self._lock:
            head = self._schedule.head
            if head is None or head.worker_id == ANY_WORKER:
                return
            hosted = self._crew.hosted_by(self._crew.actor(head.worker_id))
            waiting = [worker_id for worker_id in hosted if self._calls[worker_id]]
        if len(waiting) > 1:
            self._warned = True
            logger.warning(
                "rayloader: no batch for %.0f s while workers %s wait for the same process; workers that wait for each "
                "other cannot share one: raise num_workers, or resize(), to the number that the state was saved with",
                SHARED_PATIENCE_S,
                waiting,
            )

    def _timed_out(self) -> BatchTimeoutError:
        with self._lock:
            head = self._schedule.head
        what = f" waiting for {describe(head, self._crew)}" if head is not None else " waiting for pinned memory"
        return BatchTimeoutError(f"DataLoader timed out after {self._options.timeout} seconds{what}")


class _RemoteError(ExceptionWrapper):
    """A user's exception whose type cannot come here: raised as torch raises what it cannot construct."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reraise(self) -> None:
        raise RuntimeError(self._text)


def _opened(task: Task, result: Result) -> Delivery:
    data = skipping.NOTHING if result.kind is ResultKind.EMPTY else _open(task, result)
    return Delivery(task, data, result.skipped)


def _open(task: Task, result: Result) -> Any:
    """The batch, or the ExceptionWrapper, that a result holds; an ExceptionWrapper too when it cannot be unpickled."""
    if result.wire is None:
        return _RemoteError(result.text)
    try:
        return from_wire(result.wire)
    except Exception:  # the user's own unpickling may raise anything
        if result.kind is ResultKind.ERROR:
            return _RemoteError(result.text)
        return ExceptionWrapper(where=f"unpickling a batch of DataLoader worker process {task.worker_id}")


def describe(task: Task, crew: Crew) -> str:
    """Which batch, where, of what."""
    address = crew.address(task.worker_id) if task.worker_id != ANY_WORKER else None
    where = f" (pid {address.pid} on {address.hostname}, node {address.node_id})" if address is not None else ""
    indices = task.indices.indices
    of_what = "" if _stands_for_nothing(indices) else f", indices {reprlib.repr(indices)}"
    worker = "any worker" if task.worker_id == ANY_WORKER else f"worker {task.worker_id}"
    return f"batch {task.task_id} from {worker}{where}{of_what}"


def _stands_for_nothing(indices: Any) -> bool:
    """Whether these are the placeholders that torch draws for iterable datasets."""
    return indices is None or (isinstance(indices, list) and all(index is None for index in indices))
