"""The engine of one epoch: the one place where the schedule meets I/O.

Promise: what happens goes into the schedule as events, and its commands are carried out, under one lock (see
NOTE [interrupts] in interrupts.py). The user's thread draws from the sampler when torch's would, gives tasks, replaces
workers, and receives. Where batches are to be pinned or moved, `rayloader-ahead` does so and receives; where they come
through Ray's object store, or large ones over the network, it receives, and copies them into memory that the user may
write to (ahead.py). `close` drops all work in progress.

A worker's tasks move with it to its next process, in order; batches that the driver already has are rebuilt there for
their effect on the worker. See NOTE [Proof] in journal.py and NOTE [blame] in schedule.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rayloader import fetching
from rayloader.epoch.ahead import AheadThread, Delivery, Preparation, opened
from rayloader.epoch.messages import (
    BatchTaken,
    Closed,
    Event,
    Fail,
    IndicesDrawn,
    IndicesSkipped,
    Opened,
    ReplaceWorker,
    SamplerExhausted,
    SamplerFailed,
    Submit,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)
from rayloader.epoch.reports import (
    briefly,
    describe,
    indices_of,
    timed_out,
    worker_died,
)
from rayloader.epoch.schedule import Schedule
from rayloader.errors import RayloaderError, RaySessionError, SkipLimitError, WorkerDiedError
from rayloader.interrupts import Changes, change, interrupted
from rayloader.observe.recorder import Tally
from rayloader.options import Options
from rayloader.protocol import ENDS, Answer, ResultKind, Spent, Up
from rayloader.resume.journal import Resumed
from rayloader.resume.position import Draws, Position
from rayloader.resume.snapshot import WorkerState
from rayloader.task import DELIVERED, UNOPENED, Task
from rayloader.transport.lanes import Recycled, leased_bytes, received
from rayloader.workers.connection import LineRefused, Message, Process, ProcessLost
from rayloader.workers.fleet import Fleet, Rebuilding, Worker

logger = logging.getLogger("rayloader")

# For how many seconds at most a thread waits before it looks at what nothing wakes it for: a worker that is dead may be
# the one whose batch is next, and the epoch may have ended meanwhile.
LOOK_S = 1.0
# Rebuilding is reported after this many seconds, and again each time the elapsed time has doubled.
REBUILDING_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Loss:
    """A process that will not answer any more."""

    process: Process
    cause: str
    suspect: int | None = None  # the task that ended it, if the process reported it


class Engine:
    """The path of the batches of one epoch: indices in, batches out, in the schedule's order.

    Args:
        fleet: the workers, already told what to do.
        schedule: not yet opened.
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        options: of the loader.
        position: the user's position in the stream; kept up to date.
        delivery: what is done to batches, in a thread of its own, before the user gets them.
        tally: counts what happens.

    Attributes:
        changes: of all that this object owns.
        lock: guards all that this object owns, and the position.
        was_interrupted: an exception that was neither the program's nor this library's has come out of `next`.
        failure: the error that ends the epoch once all deliverable batches were taken.
    """

    def __init__(
        self,
        fleet: Fleet,
        schedule: Schedule,
        sampler_iter: Iterator[Any],
        options: Options,
        *,
        position: Position,
        delivery: Delivery,
        tally: Tally,
    ) -> None:
        self.fleet = fleet
        self.schedule = schedule
        self._draws = Draws(sampler_iter, position)
        self._options = options
        self._position = position
        self._delivery = delivery
        self._tally = tally
        self.lock = position.lock
        self.changes = Changes(self.lock)
        self.was_interrupted = False
        self.failure: WorkerDiedError | None = None
        self._drawing = False  # indices were requested from the sampler, and the schedule does not know of them yet
        self._out: Task | None = None  # what `next` returns until it is handed over
        self._out_is_taken = False  # the schedule knows that
        self._losses: deque[_Loss] = deque()  # for the user's thread
        self._last_arrival = 0.0  # time.monotonic()
        self._waited = 0.0  # seconds of the last `receive` in which nothing came
        self._copies = Recycled(delivery.accelerator)
        self._ahead: AheadThread | None = None
        self._preparation: Preparation | None = None
        for worker in fleet.workers:
            worker.rebuilding = None
            worker.unanswered = schedule.unanswered(worker.worker_id)

    # ---- the user's side

    def open(self, *, fresh: bool = True) -> None:
        """Fills the window. Raises what the sampler raises. `fresh`: the workers have only just started."""
        self._draws.begin()
        for worker in self.fleet.workers:
            if worker.away:
                self.fleet.replace(worker)
            elif fresh and (worker.journal.entries or worker.journal.state is not None):
                self._rebuild(worker)
            else:
                self.handle(WorkerReady(worker.worker_id))
        self._revive()  # a worker whose process died after its stream had ended was not replaced until now
        self.handle(Opened())
        self._draw_owed()
        self._start_ahead()

    @property
    def finished(self) -> bool:
        """Whether every batch was taken; never true of an epoch that was closed before that."""
        with self.lock:
            return self.schedule.finished

    @property
    def over(self) -> bool:
        """Whether every batch was taken, and nothing more will come. For the user's thread."""
        return self.schedule.finished and not self._is_under_way

    @property
    def broken(self) -> bool:
        """Whether an interrupt has left something half changed, see NOTE [interrupts]."""
        return self._drawing or self.changes.are_broken

    def next(self) -> Task | None:
        """The task whose batch is the next, None after the last. It remains the next until it is `position.handed`.

        Raises:
            RayloaderError: a worker died, could not start, or did not answer in time; the epoch was closed or broken.
            Exception: raised by the sampler.
        """
        if self._position.handed is self._out:
            self._out = None
        self._position.settle()
        self._check_open()
        self._delivery.asks()
        deliverable = self.schedule.deliverable
        began = 0.0 if deliverable else time.monotonic()
        while self._out is not None or self.schedule.deliverable or not self.finished:
            if self._out is None:
                self._out = self._first()
            if self._out is None:
                self._check_open()
                self._check_integrity()
                began = began or time.monotonic()
                self._await(max(0.0, min(LOOK_S, self._deadline(began) - time.monotonic())))
                self._out = self._first()
            if self._out is not None:
                if not self._out_is_taken:
                    self._end_turn(self._out)
                if not self._out_is_taken:  # the epoch was closed meanwhile
                    self._out = None
                    continue
                self._draw_owed()
                if self._is_for_the_user(self._out):
                    return self._out
                self._drop_out()
                began = 0.0
                continue
            self._draw_owed()
            if time.monotonic() >= self._deadline(began):
                if self._options.on_timeout != "restart" or not self._restart_hung():
                    raise self._timed_out()
                began = time.monotonic()
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        return None

    def _is_for_the_user(self, task: Task) -> bool:
        """Whether the next batch is for the user: there is one, and `skip_steps` does not leave it out."""
        if self._position.leaves_out:
            task.left_out = True
        return not task.left_out and task.data is not fetching.NOTHING

    def _first(self) -> Task | None:
        """The task whose batch is the next, opened; None if it has not come yet."""
        if self._ahead is not None:
            self._ahead.check()
        with self.lock:
            task = self.schedule.deliverable[0] if self.schedule.deliverable else None
            result: Any = None if task is None else task.result
        if task is None or (self._preparation is not None and not self._preparation.is_done(task, result)):
            return None
        if task.data is UNOPENED:
            task.data = opened(task, result)
        self._out_is_taken = False
        return task

    def _check_open(self) -> None:
        """Raises if the epoch cannot go on. Until it waits, `next` then calls Ray without checking again."""
        if self.broken:
            self.fleet.check_session()
            raise interrupted()
        if self.schedule.closed and not self.schedule.finished:
            if self.failure is not None:
                raise self.failure.with_traceback(None)
            self.fleet.check_session()
            raise RaySessionError(
                "this epoch was ended: iter() was called on the loader again meanwhile, or shutdown()"
            )
        if self.schedule.deliverable or not self.schedule.finished:
            self.fleet.check_session()

    def _check_integrity(self) -> None:
        """Raises if something in progress was lost, because a wait for it would never end."""
        with self.lock:
            under_way = self._is_under_way or self._losses or self.schedule.deliverable or self.schedule.owed_draws
            if under_way or self.schedule.finished or self.failure is not None:
                return
        if self.was_interrupted:
            raise interrupted()
        raise RayloaderError(
            "no worker has anything to do, and the epoch is not over: this is a fault of rayloader. Call iter() on the "
            "loader again, and report it, with the lines of the log 'rayloader'; state_dict() still says which batches "
            "were taken"
        )

    @change
    def _end_turn(self, task: Task) -> None:
        """The batch is handed to the user, unless the epoch was closed meanwhile."""
        if task.state is not DELIVERED:
            return
        skipped = task.result.skipped
        self._handle(BatchTaken(task.task_id))
        self._out_is_taken = True
        if skipped:
            self._tally.skipped += len(skipped)
            try:
                self._position.skip(skipped, self._options.max_skipped)
            except SkipLimitError:
                self._drop_out()
                raise

    def _drop_out(self) -> None:
        """Counts the next batch as handed over although the user does not get it."""
        if self._out is not None:
            self._out.data = None
            self._position.handed = self._out
            self._position.settle()
            self._out = None

    def close(self, *, resuming: bool = False, wait: bool = True) -> None:
        """Drops all work in progress; callable more than once. `wait`: until `rayloader-ahead` has ended.

        With `resuming`, the workers are to continue with another epoch: they finish the tasks that they hold, as
        torch's do.
        """
        self._end(resuming)
        if (ahead := self._ahead) is not None:
            ahead.close(wait=wait)  # first: after an interrupt here, the next call does it
        self._ahead = self._preparation = None  # it refers to this object
        self._lose_rest()
        self._copies.close()
        self.fleet.mailbox.ring()

    @change
    def _end(self, resuming: bool) -> None:
        self._handle(Closed(resuming))
        if resuming:
            self.fleet.mailbox.flush()
        for worker in self.fleet.workers:
            worker.rebuilding = None

    @change
    def _lose_rest(self) -> None:
        """Gives up what was reported to end, up to the end of `rayloader-ahead`: the next epoch is not told again."""
        for lost in self._losses:
            self.fleet.lose(lost.process)

    # ---- events and commands

    def _handle(self, event: Event) -> None:
        """Reports an event to the schedule, and carries out its commands, as a part of a change."""
        for command in self.schedule.handle(event):
            _CARRY_OUT[type(command)](self, command)
        if self._ahead is not None:
            self._ahead.ring()

    handle = change(_handle)  # a change of its own

    def _submit(self, submit: Submit) -> None:
        task = submit.task
        worker = self.fleet.workers[task.worker_id]
        worker.journal.given(task)
        if not worker.away:
            worker.give(task)

    def _replace(self, replace: ReplaceWorker) -> None:
        if self.fleet.replace(self.fleet.workers[replace.worker_id]):
            self._tally.restarts += 1
            cause = briefly(replace.cause)
            logger.warning("rayloader: worker %d is lost and gets another process: %s", replace.worker_id, cause)

    def _fail(self, fail: Fail) -> None:
        address = self.fleet.address(self.fleet.workers[fail.worker_id])
        self.failure = worker_died(fail, address, None if fail.task is None else self.describe(fail.task))

    def describe(self, task: Task, sample: str = "") -> str:
        """Names the sample that raised, if it is known, batch, worker and indices."""
        address = self.fleet.address(self.fleet.workers[task.worker_id]) if task.is_assigned else None
        return describe(task, address, sample)

    @change
    def flush(self) -> None:
        """Sends the messages to the workers."""
        self.fleet.mailbox.flush()

    # ---- drawing

    def _draw_owed(self) -> None:
        """Draws what the schedule has requested."""
        while self.schedule.owed_draws:
            self._drawing = True
            began = time.perf_counter()
            try:
                indices = self._draws.next()
                self._tally.drawing += time.perf_counter() - began
            except StopIteration:
                self.handle(SamplerExhausted())
            except Exception:  # from the sampler, or because its indices cannot be pickled
                self.handle(SamplerFailed())
                self._drop_out()  # as with torch's loader: the error takes the place of a batch that has come
                self._drawing = False
                raise
            else:
                self.handle(IndicesSkipped() if indices is None else IndicesDrawn(indices))
            self._drawing = False
        self.flush()

    # ---- receiving

    def receive(self, timeout: float, *, ahead: bool = False) -> bool:
        """Waits for `timeout` seconds at most until something has come, and handles it; returns whether something has.

        Any thread may receive, one at a time. The loss of a process is left to the user's thread.

        Args:
            timeout: in seconds.
            ahead: the caller is a thread that no signal handler interrupts, and the user's must not wait while it
                reads.
        """
        self.flush()
        began = time.perf_counter()
        came = self.fleet.wait(timeout)
        self._waited = time.perf_counter() - began
        if came and ahead:
            self.fleet.mailbox.read()
        if came or self.fleet.mailbox.has_news:
            self._take(was_read=came and ahead)
        return came

    def _await(self, timeout: float) -> None:
        """Waits for `timeout` seconds at most until something comes, and handles what has come."""
        if not self.schedule.deliverable and self.failure is not None:
            raise self.failure.with_traceback(None)
        came = self._wait(timeout)
        while self._losses:
            lost = self._losses[0]
            self._go_on_without(lost.process, lost.cause, lost.suspect)
            self._losses.popleft()
        if self.fleet.awaited:
            self._revive()
        self._start_ahead()
        if not came and not self._check_started():
            self._revive()

    def _wait(self, timeout: float) -> bool:
        """Waits for something to come, or for the thread that receives; returns whether something has."""
        behind = self.schedule.early > 0
        if self._ahead is not None:
            began = time.perf_counter()
            came = self._ahead.wait(timeout) and bool(self.schedule.deliverable)  # it also rings when it has waited
            waited = time.perf_counter() - began
        else:
            came = self.receive(timeout)
            waited = self._waited
        self._tally.blocked += waited
        if behind:
            self._tally.behind += waited
        return came

    def _start_ahead(self) -> None:
        """Starts the thread that receives, if there is something to prepare; callable more than once."""
        if self._ahead is None and (self._delivery.prepares or self.fleet.processes.copies):
            with self.lock:
                if not self.schedule.closed:
                    preparation = Preparation(self, self._delivery, self._copies, self._tally)
                    self._preparation = preparation
                    self._ahead = AheadThread(preparation.work, self._delivery.device_index)
        if self._ahead is not None:
            self._ahead.start()

    @property
    def is_idle(self) -> bool:
        """Whether nothing will come."""
        return self.failure is not None or not self._is_under_way

    @property
    def _is_under_way(self) -> bool:
        """Whether the workers still have something to send."""
        for worker in self.fleet.workers:  # nearly always the first says so: no list, however many there are
            if self._owes(worker) or self._begins(worker):
                return True
        return bool(self.fleet.awaited)

    @property
    def uses_store(self) -> bool:
        """Whether some batches come through Ray's object store."""
        return self.fleet.processes.uses_store

    def _owes(self, worker: Worker) -> bool:
        return worker.rebuilding is not None or bool(worker.unanswered)

    def _begins(self, worker: Worker) -> bool:
        """Whether it was told of this epoch, and has not reported its state at the start."""
        return not worker.journal.begun and not worker.away

    @change
    def _take(self, *, also: Process | None = None, was_read: bool = False) -> None:
        """Handles what has come, except for the loss of processes. The arguments are those of `Mailbox.receive`."""
        arrived = self.fleet.receive(also=also, was_read=was_read)
        if arrived:
            self._last_arrival = time.monotonic()
        for process, message in arrived:
            if isinstance(message, ProcessLost):
                self._losses.append(_Loss(message.process, str(message)))
            elif isinstance(message, LineRefused):
                if (worker := self.fleet.worker_of(process)) is not None:
                    self.fleet.fall_back(worker, str(message))
                    self._report_lost(worker, "it is reached by Ray calls from now on", blameless=True)
                    self._revive()
            else:
                self._take_message(process, message)

    def _take_message(self, process: Process, message: Message) -> None:
        kind, call, content = message
        worker = self.fleet.worker_of(process)
        if worker is None or process in [lost.process for lost in self._losses]:
            return  # it may go on after what has ended it
        if kind == Up.BEGUN:
            if not worker.journal.begun and worker.journal.resumed == (process, call):
                worker.journal.reached_begin(WorkerState(*content))
            return
        if worker.away:
            return
        # Answers come in the order of the calls. Others are late: the epoch was closed.
        is_late = self._oldest_call(worker) != call
        answer = Answer(*content)
        if answer.kind in ENDS:  # that counts, even if what it was at is of the epoch before
            suspect = answer.task_id if answer.kind == ResultKind.EXITED and not is_late else None
            self._losses.append(_Loss(process, answer.text, suspect))
        elif is_late:
            return
        elif worker.rebuilding is not None:
            self._note_news(worker, answer)
            self._has_rebuilt(worker, worker.rebuilding, *answer.rebuilt)
        else:
            self._take_answer(worker, worker.unanswered[0], answer)

    def _take_answer(self, worker: Worker, task: Task, answer: Answer) -> None:
        """Reports what a worker has built of a task."""
        exhausted = answer.kind == ResultKind.EXHAUSTED
        if not exhausted:
            self._record(worker, task, answer)
            if answer.wire is not None:
                answer.wire = received(answer.wire, task.lent)
            task.samples, task.asked, task.read = answer.samples, answer.asked, answer.read
            worker.journal.answered(task.task_id, answer.digest)
        self._note_news(worker, answer)
        if not exhausted:
            self._handle(TaskDone(task.task_id, answer, answer.nbytes))
            return
        self._tally.skipped += len(answer.skipped)
        self._position.skip(answer.skipped, self._options.max_skipped)
        self._handle(WorkerExhausted(task.task_id))
        worker.journal.exhausted()  # it writes nothing any more, and has nothing new to report

    def _note_news(self, worker: Worker, answer: Answer) -> None:
        """Takes note of what comes with an answer besides its result."""
        if answer.state is not None:
            worker.journal.reached(WorkerState(*answer.state))
        if answer.full:
            worker.host.lane.was_full()
        if answer.no_arena:
            worker.host.lane.refused(answer.no_arena)

    def _record(self, worker: Worker, task: Task, answer: Answer) -> None:
        """Lets the tally count what the worker did."""
        tally = self._tally
        counts, log = tally.workers[worker.worker_id], tally.answers
        log.append(answer.spent)
        if not counts.settled:
            log[-1] = tally.settle(counts, answer.spent)
        if (task.lent is not None) is not counts.arena:
            counts.arena = task.lent is not None
            counts.lane = self.fleet.mailbox.lane(worker.host)
            counts.process = worker.host.kind
            counts.node = worker.host.address.node_id if worker.host.address is not None else ""
        if answer.seconds > tally.slow:
            self._name(worker, task, counts.lane, Spent.unpack(answer.spent))
        if len(log) >= tally.fold_at:
            tally.fold_answers()

    def _name(self, worker: Worker, task: Task, lane: str, spent: Spent) -> None:
        """Notes a batch that may be one of the slowest, or is traced, with its indices."""
        self._tally.note_slow((task.task_id, int(spent.worker_id), spent.build, indices_of(task)))
        if (trace := self._tally.trace) is not None:
            indices = indices_of(task, at_most=64)
            trace.built(worker.host.created_at, lane.startswith("line"), task.task_id, indices, spent)

    # ---- losses

    @change
    def _go_on_without(self, process: Process, cause: str, suspect: int | None = None) -> None:
        """Continues without a process; another one takes over its worker and the worker's tasks."""
        self._take(also=process)  # messages that it sent before still count
        self._give_up(process, cause, suspect)
        self._revive()

    def _give_up(self, process: Process, cause: str, suspect: int | None = None) -> None:
        """Continues without a process, whose messages were all handled. `suspect`: the task that it said ended it.

        Callable more than once: it may be reported twice, or there was no other process to be had.
        """
        worker = self.fleet.worker_of(process)
        if worker is None:
            return
        admitted = suspect is not None
        if not admitted and self._owes(worker) and worker.has_begun and worker.rebuilding is None:
            suspect = worker.unanswered[0].task_id
        self.fleet.lose(process)
        self._report_lost(worker, cause, suspect=suspect, admitted=admitted)

    def _report_lost(self, worker: Worker, cause: str, **blame: Any) -> None:
        """A worker will continue in another process, or over another channel."""
        worker.rebuilding = None
        self.handle(WorkerLost(worker.worker_id, cause, **blame))

    def _oldest_call(self, worker: Worker) -> int:
        """The number of its oldest unanswered call; 0 if it has answered all."""
        if worker.rebuilding is not None:
            return worker.rebuilding.call
        return worker.unanswered[0].call if worker.unanswered else 0

    @change
    def _revive(self) -> None:
        """Begins workers that are away, if there is a process for them, and brings them to where they were."""
        while self.failure is None:
            try:
                ready = self.fleet.revive()
            except ProcessLost as lost:  # another one is lost
                self._give_up(lost.process, str(lost))
                continue
            for worker in ready:
                self._rebuild(worker)
            break

    def _rebuild(self, worker: Worker) -> None:
        """Brings a worker that was begun from its last snapshot to its position."""
        entries, tasks = worker.journal.entries, worker.journal.tasks
        for entry in entries[: len(entries) - len(tasks)]:
            if isinstance(entry, Resumed):
                worker.resume(entry)
            else:
                worker.rebuild([entry])
        worker.rebuilding = Rebuilding(worker.rebuild([task for task in tasks if task.digest is not None]))

    def _has_rebuilt(self, worker: Worker, rebuilding: Rebuilding, done: int, total: int) -> None:
        """A worker has rebuilt a part of its batches."""
        now = time.monotonic()
        if rebuilding.began is None:  # the process runs by now, however long it took to start
            rebuilding.began, rebuilding.news_at, rebuilding.first = now, now + REBUILDING_PATIENCE_S, done
        if done < total:
            if now >= rebuilding.news_at:
                seconds = now - rebuilding.began
                rebuilding.news_at = now + max(REBUILDING_PATIENCE_S, seconds)
                rate = (done - rebuilding.first) / max(seconds, 1e-9)
                logger.warning(
                    "rayloader: worker %d is rebuilding earlier batches: %d of %d in %.0f s, %.1f a second; a dataset "
                    "with state_dict() and load_state_dict() need not be read again",
                    *(worker.worker_id, done, total, seconds, rate),
                )
            rebuilding.call = worker.rebuild([])
            return
        worker.rebuilding = None
        self.handle(WorkerReady(worker.worker_id))

    @change
    def _check_started(self) -> bool:
        """Gives up a process that will never start; returns whether there was none."""
        try:
            self.fleet.check_started()
        except ProcessLost as lost:
            self._give_up(lost.process, str(lost))
            return False
        return True

    def note_begins(self) -> None:
        """Waits until every worker has begun the epoch, but for those that are lost and have nothing to do in it."""
        while self.failure is None and [w for w in self.fleet.workers if not w.journal.begun and not w.host.lost]:
            self._await(LOOK_S)

    # ---- waiting too long

    def _deadline(self, began: float) -> float:
        """When the user has waited long enough.

        That is `timeout` seconds after the latest of: the user's call, the last answer of any worker (torch's rule),
        the start of the worker whose batch is next, and page-locking, which torch's loader does not do.
        """
        if not self._options.timeout:
            return math.inf
        started = began
        with self.lock:
            head = self.schedule.head
        if head is not None and head.is_assigned:
            worker = self.fleet.workers[head.worker_id]
            if worker.host.started_at is None:
                return math.inf
            started = max(worker.host.started_at, worker.begun_at)
        locked_at = 0.0 if self._preparation is None else self._preparation.locked_at
        return max(began, self._last_arrival, started, locked_at) + self._options.timeout

    def _restart_hung(self) -> bool:
        """Replaces the worker whose batch is overdue; returns False if there is none."""
        with self.lock:
            head = self.schedule.head
            if head is None or self.schedule.deliverable:
                return False
            if head.is_assigned:
                hung = {self.fleet.workers[head.worker_id].host}
            else:
                hung = {worker.host for worker in self.fleet.workers if self._owes(worker)}
            for process in hung:
                self._go_on_without(
                    process, f"it gave no batch for {self._options.timeout} s (timeout), and was killed"
                )
        return bool(hung)

    def _timed_out(self) -> Exception:
        with self.lock:
            head = self.schedule.head
        return timed_out(self._options.timeout, None if head is None else self.describe(head))

    # ---- bytes

    @property
    def bytes_under_way(self) -> int:
        """Bytes of batches that have come and were not taken. Any thread may ask."""
        return sum(task.nbytes for task in self.schedule.untaken)

    @property
    def bytes_held(self) -> int:
        """Bytes of shared memory in batches that the user was given. Any thread may ask."""
        results = [task.result for task in self.schedule.untaken]
        ready = sum(leased_bytes(result.wire) for result in results if result is not None and result.wire is not None)
        return max(0, self.fleet.leased_bytes + self._copies.leased_bytes - ready)


_CARRY_OUT: dict[type, Callable[[Engine, Any], None]] = {
    Submit: Engine._submit,
    ReplaceWorker: Engine._replace,
    Fail: Engine._fail,
}
