"""One epoch: where the schedule meets I/O.

Promise: `Epoch` feeds events to the schedule and carries out its commands; it decides nothing. It owns the unanswered
calls, the answers that wait for their turn, and the pin thread; `close` ends all of them.

Threads: the user's thread draws from the sampler, at torch's moments, and submits. It also receives, unless batches are
to be pinned: then `rayloader-pin` receives and the user's thread takes from it. `Epoch._changed` guards the schedule
and the tables.
"""

from __future__ import annotations

import math
import pickle
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper

from rayloader.crew import ActorLost, Crew, Ref
from rayloader.delivery.pinning import TICK_S as PIN_TICK_S
from rayloader.delivery.pinning import PinThread
from rayloader.errors import BatchTimeoutError, RayloaderError, WorkerDiedError, add_note
from rayloader.messages import (
    ANY_WORKER,
    BatchTaken,
    CallAnswered,
    Closed,
    Deliver,
    DrawIndices,
    Drop,
    Event,
    Fail,
    Forget,
    IndicesDrawn,
    Opened,
    Paced,
    SamplerExhausted,
    SamplerFailed,
    Submit,
    Task,
    TasksDone,
    WorkerExhausted,
    WorkerLost,
)
from rayloader.pace import Pace
from rayloader.prefetch import DrawAhead
from rayloader.schedule import Schedule
from rayloader.transport import codec
from rayloader.transport.lanes import Lent, from_wire, unplaced
from rayloader.worker import CARRY, Result, ResultKind

# How often a wait for the head looks at the other workers, in seconds: a dead one may be what the head waits for.
TICK_S = 1.0
# How often a wait for a call of several tasks looks at the control page, in seconds: a call is meant to take less.
PAGE_TICK_S = 0.01


class Delivery(NamedTuple):
    """A task and its batch, or the user's exception in its place."""

    task: Task
    data: Any


class _Drawn(NamedTuple):
    """What the sampler gave, and the same as it was then, encoded."""

    indices: Any
    encoded: codec.Encoded


@dataclass(frozen=True, slots=True)
class _Call:
    """An unanswered call of a worker."""

    ref: Ref
    number: int  # counts the actor's calls
    num_tasks: int  # that it brought
    lent: Lent | None  # room for its batches


class Epoch:
    """The way of the batches of one epoch: indices in, batches out, in the schedule's order.

    Args:
        crew: one actor a worker, told what to do.
        schedule: not yet opened.
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        paces: say how many tasks each worker's calls carry.
        timeout: seconds that the user waits for a batch at most, 0 for ever.
        arenas: whether batches may travel in the workers' arenas.
        pin: pins a batch, in a thread of its own; None: no pinning.
        device_index: accelerator that the pin thread works for, if any.
    """

    def __init__(
        self,
        crew: Crew,
        schedule: Schedule,
        sampler_iter: Iterator[Any],
        *,
        paces: list[Pace],
        timeout: float,
        arenas: bool,
        pin: Callable[[Any], Any] | None,
        device_index: int | None,
    ) -> None:
        self._crew = crew
        self._sampler_iter = sampler_iter
        self._paces = paces
        self._timeout = timeout
        self._arenas = arenas
        self._pin = pin
        self._device_index = device_index
        self._pin_thread: PinThread[Delivery] | None = None
        self._tick = TICK_S if pin is None else PIN_TICK_S
        self._changed = threading.Condition()  # guards what follows; notified with every event
        self._schedule = schedule
        self._calls: list[deque[_Call]] = [deque() for _ in crew.actors]  # unanswered, by worker, oldest first
        self._left_over = [0] * len(crew.actors)  # tasks that a worker's answered calls have not done
        self._unanswered: set[int] = set()  # tasks
        self._results: dict[int, Result] = {}  # not delivered, by task
        self._deliverable: deque[tuple[Task, Result]] = deque()  # in delivery order
        self.dropped: dict[int, int] = {}  # by worker: its first task that nobody wants any more, set by `close`
        self._last_arrival = 0.0  # time.monotonic()
        self._failure: WorkerDiedError | None = None
        self._cut_short = False  # closed before its last batch

    def open(self) -> None:
        """Fills the window. What the sampler raises is raised here."""
        self._handle(Opened())
        self._draw_owed()
        if self._pin is not None:
            self._pin_thread = PinThread(self._receive_and_pin, self._device_index)

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to come."""
        with self._changed:
            return self._schedule.finished

    @property
    def failure(self) -> WorkerDiedError | None:
        """The loss of a worker that ended the epoch."""
        return self._failure

    def next(self) -> Delivery | None:
        """The next batch, None after the last.

        Raises:
            RayloaderError: a worker died, could not start, or did not answer in time.
            Exception: the sampler's own.
        """
        if self._cut_short and self._failure is None:
            self._crew.check_session()
        began = 0.0 if self._deliverable else time.monotonic()
        while not self.finished:
            delivery = self._open_first() if self._pin_thread is None else None
            if delivery is None:
                self._check_integrity()
                began = began or time.monotonic()
                wait = max(0.0, min(self._tick, self._deadline(began) - time.monotonic()))
                delivery = self._pin_thread.get(wait) if self._pin_thread is not None else self._receive(wait)
            if delivery is not None:
                self._handle(BatchTaken(delivery.task.task_id))
                self._draw_owed()
                return delivery
            self._draw_owed()
            if time.monotonic() >= self._deadline(began):
                raise self._timed_out()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return None

    def close(self, *, resuming: bool = False) -> None:
        """Drops what is under way; callable more than once.

        With `resuming` the workers are to go on with another epoch, from where torch's would be by now: they finish
        their first tasks, and `dropped` says which are to be undone.
        """
        with self._changed:
            self._cut_short |= not self._schedule.finished
            self._handle(Closed(resuming))
            for calls in self._calls:
                calls.clear()
        if self._pin_thread is not None:
            self._pin_thread.close()

    # ---- events in, commands out

    def _handle(self, event: Event) -> None:
        with self._changed:
            for command in self._schedule.handle(event):
                match command:
                    case DrawIndices():
                        pass  # owed: the sampler belongs to the user's thread, see _draw_owed
                    case Submit(worker_id, tasks):
                        self._submit(worker_id, tasks)
                    case Deliver(task):
                        self._deliverable.append((task, self._results.pop(task.task_id)))
                    case Forget(task_ids):
                        for task_id in task_ids:
                            self._unanswered.discard(task_id)
                            self._results.pop(task_id, None)
                    case Drop(worker_id, first_task_id):
                        self._crew.actors[worker_id].drop(first_task_id)
                        self.dropped[worker_id] = first_task_id
                    case Fail():
                        self._failure = self._worker_died(command)
                        self._calls[command.worker_id].clear()
            if self._pin_thread is not None:
                self._changed.notify_all()

    def _draw_owed(self) -> None:
        """Draws what the schedule asked for; in the user's thread, for the sampler and its generator are the user's."""
        if isinstance(self._sampler_iter, DrawAhead):
            self._sampler_iter.reach(self._schedule.torch_draws)
        while self._schedule.owed_draws:
            try:
                indices = next(self._sampler_iter)
                drawn = _Drawn(indices, codec.encode(indices, carry=CARRY))
            except StopIteration:
                self._handle(SamplerExhausted())
            except BaseException:  # the sampler's own, or that its indices cannot be pickled
                self._handle(SamplerFailed())
                raise
            else:
                self._handle(IndicesDrawn(drawn))

    def _check_integrity(self) -> None:
        """Raises where something under way was lost, which would be waited for for ever."""
        with self._changed:
            under_way = any(self._calls) or self._deliverable or self._schedule.owed_draws
            if self._pin_thread is None and not under_way and not self._schedule.finished and self._failure is None:
                raise RayloaderError("this iterator was interrupted and has lost its place; call iter() again")

    def _submit(self, worker_id: int, tasks: tuple[Task, ...]) -> None:
        self._crew.check_session()
        actor = self._crew.actors[worker_id]
        window = self._schedule.window // len(self._crew.actors)
        lent = actor.lane.lend(max(1, len(tasks) + self._left_over[worker_id]), window) if self._arenas else None
        encoded = [task.indices.encoded for task in tasks]
        ref = actor.run([task.task_id for task in tasks], encoded, lent.room if lent is not None else None)
        self._calls[worker_id].append(_Call(ref, actor.calls, len(tasks), lent))
        self._unanswered.update(task.task_id for task in tasks)

    # ---- receiving: the user's thread, or the pin thread

    def _receive(self, wait: float) -> Delivery | None:
        """The next batch, opened; None if it has not come within about `wait` seconds."""
        if not self._deliverable and self._failure is None:
            try:
                self._collect(wait)
            except ActorLost as lost:
                self._take_published(lost.worker_id)  # what it showed before it died is the driver's
                self._handle(WorkerLost(lost.worker_id, str(lost)))
        if not self._deliverable and self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._open_first()

    def _open_first(self) -> Delivery | None:
        """The next batch if it is there."""
        if not self._deliverable:
            return None
        task, result = self._deliverable[0]
        delivery = Delivery(task, _open(task, result))
        self._deliverable.popleft()  # only now: a Ctrl-C while it was opened does not lose it
        return delivery

    def _receive_and_pin(self) -> Delivery | None:
        """The next batch, pinned; None after the last. Waits while all that is under way waits for the user."""
        assert self._pin is not None
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._schedule.finished or any(self._calls) or self._deliverable or self._failure
                )
                if self._schedule.finished and self._failure is None:
                    return None
            delivery = self._receive(self._tick)
            if delivery is None:
                continue
            if isinstance(delivery.data, ExceptionWrapper):
                return delivery
            try:
                return Delivery(delivery.task, self._pin(delivery.data))
            except Exception:  # a custom pin_memory() may raise anything: it arrives in its turn, as torch's does
                where = f"in pin memory thread for device {self._device_index}"
                return Delivery(delivery.task, ExceptionWrapper(where=where))

    def _collect(self, wait: float) -> None:
        """Waits for answers, for about `wait` seconds, and takes them in.

        In order the one call that the head is in is waited for, Ray's cheapest wait; only when it does not come the
        others are looked at. Without order, or with a timeout (which each arrival extends, as in torch), any answer
        is waited for. Of each worker only the oldest call counts: it answers them one after the other.
        """
        with self._changed:
            head = self._schedule.head
        if head is None:
            return
        first = self._oldest_call(head.worker_id) if head.worker_id != ANY_WORKER else None
        count = 1
        if first is not None and self._schedule.in_order and not self._timeout:
            if self._await_call(head.worker_id, first, wait):
                return
            count, wait = len(self._calls), 0.0
        with self._changed:
            oldest = {worker_id: calls[0] for worker_id, calls in enumerate(self._calls) if calls}
        if any(self._may_publish(worker_id, call) for worker_id, call in oldest.items()):
            wait = min(wait, PAGE_TICK_S)
        by_ref = {call.ref: worker_id for worker_id, call in oldest.items()}
        answered = self._crew.ready(list(by_ref), count=count, timeout=wait) if by_ref else []
        for ref in answered:
            self._take_answer(by_ref[ref], 0.0)
        if not answered and not sum(self._take_published(worker_id) for worker_id in oldest):
            self._crew.check_started()

    def _await_call(self, worker_id: int, call: _Call, wait: float) -> bool:
        """Waits for a worker's oldest call, or for results of it that come before; False if nothing came."""
        give_up = time.monotonic() + wait
        patience = min(wait, PAGE_TICK_S) if self._may_publish(worker_id, call) else wait
        while True:
            if self._take_answer(worker_id, patience) or self._take_published(worker_id):
                return True
            if time.monotonic() >= give_up:
                return False

    def _take_answer(self, worker_id: int, timeout: float) -> bool:
        """Takes in the answer to a worker's oldest call; False if there is none yet."""
        call = self._oldest_call(worker_id)
        reply = self._crew.fetch(worker_id, call.ref, timeout) if call is not None else None
        if call is None or reply is None:
            return False
        self._last_arrival = time.monotonic()
        lane, pace = self._crew.actors[worker_id].lane, self._paces[worker_id]
        with self._changed:
            if not self._calls[worker_id]:
                return True  # closed meanwhile
            results = [Result(*fields) for fields in reply.results]
            nbytes = sum(result.nbytes for result in results)
            for result in results:
                lane.saw(result.nbytes)
            exhausted = bool(results) and results[-1].kind is ResultKind.EXHAUSTED
            self._take_in(worker_id, results, call.lent)
            if not self._calls[worker_id]:
                return True  # it exited
            self._calls[worker_id].popleft()  # only now: after a Ctrl-C before this it is fetched again
            self._left_over[worker_id] += call.num_tasks - len(results)
            lane.release(call.lent, reuse=reply.reuse)
            if reply.no_arena:
                lane.refused(reply.no_arena)
            if exhausted:  # it writes nothing any more, and will say nothing new
                for later in self._calls[worker_id]:
                    lane.release(later.lent, reuse=True)
                self._calls[worker_id].clear()
            else:
                self._handle(CallAnswered(worker_id))
                if pace.saw(len(results), reply.seconds, nbytes, publishes=reply.publishes):
                    self._handle(Paced(worker_id, pace.tasks_per_call, pace.places))
        return True

    def _may_publish(self, worker_id: int, call: _Call) -> bool:
        """Whether the worker may have done a task of this call, its oldest, and not yet returned."""
        return self._left_over[worker_id] + call.num_tasks > 1

    def _oldest_call(self, worker_id: int) -> _Call | None:
        """None too when the epoch was closed meanwhile, by the user's thread."""
        with self._changed:
            return self._calls[worker_id][0] if self._calls[worker_id] else None

    def _take_published(self, worker_id: int) -> bool:
        """Takes in what a worker has published of the call that it is at; False if that is nothing new."""
        call, page = self._oldest_call(worker_id), self._crew.actors[worker_id].page
        if call is None or page is None or not self._may_publish(worker_id, call):
            return False
        with self._changed:
            entries = page.read(call.number)
            if entries:
                self._last_arrival = time.monotonic()
                self._take_in(worker_id, [Result(*pickle.loads(entry)) for entry in entries], call.lent)
        return bool(entries)

    def _take_in(self, worker_id: int, results: list[Result], lent: Lent | None) -> None:
        """Reports results to the schedule, but for those that were forgotten or published before."""
        done = []
        for result in results:
            if result.task_id not in self._unanswered:
                continue
            match result.kind:
                case ResultKind.BATCH | ResultKind.ERROR:
                    if result.wire is not None and lent is not None:
                        result = result._replace(wire=unplaced(result.wire, lent))
                    self._results[result.task_id] = result
                    done.append(result.task_id)
                case ResultKind.EXHAUSTED:
                    self._tasks_done(done)
                    self._handle(WorkerExhausted(result.task_id))
                case ResultKind.EXITED:
                    self._tasks_done(done)
                    self._handle(WorkerLost(worker_id, result.text))
        self._tasks_done(done)

    def _tasks_done(self, task_ids: list[int]) -> None:
        self._handle(TasksDone(tuple(task_ids)))
        self._unanswered.difference_update(task_ids)
        task_ids.clear()

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

        That is `timeout` seconds after he asked, after the last answer of any worker (torch's rule), and after the
        start of the worker that he waits for.
        """
        if not self._timeout:
            return math.inf
        started = began
        with self._changed:
            head = self._schedule.head
        if head is not None and head.worker_id != ANY_WORKER:
            actor = self._crew.actors[head.worker_id]
            if actor.address is None:
                return math.inf
            started = actor.started_at or began
        return max(began, self._last_arrival, started) + self._timeout

    def _timed_out(self) -> BatchTimeoutError:
        with self._changed:
            head = self._schedule.head
        what = f" waiting for {describe(head, self._crew)}" if head is not None else " waiting for pinned memory"
        return BatchTimeoutError(f"DataLoader timed out after {self._timeout} seconds{what}")


class _RemoteError(ExceptionWrapper):
    """A user's exception whose type cannot come here: raised as torch raises what it cannot construct."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reraise(self) -> None:
        raise RuntimeError(self._text)


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
