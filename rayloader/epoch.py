"""One epoch: where the schedule meets I/O.

Promise: `Epoch` feeds events to the schedule and carries out its commands; it decides nothing. It owns the unanswered
calls, the answers that wait for their turn, and the pin thread; `close` ends all of them.

Threads: the user's thread draws from the sampler, at torch's moments, and submits. It also receives, unless batches are
to be pinned: then `rayloader-pin` receives and the user's thread takes from it. `Epoch._changed` guards the schedule
and the tables.
"""

from __future__ import annotations

import math
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._utils import ExceptionWrapper

from rayloader.crew import ActorLost, Crew, Ref
from rayloader.delivery.pinning import TICK_S as PIN_TICK_S
from rayloader.delivery.pinning import PinThread
from rayloader.errors import BatchTimeoutError, RayloaderError, WorkerDiedError, add_note
from rayloader.schedule import (
    BatchTaken,
    Closed,
    Deliver,
    DrawIndices,
    Event,
    Fail,
    Forget,
    IndicesDrawn,
    Opened,
    SamplerExhausted,
    SamplerFailed,
    Schedule,
    Submit,
    Task,
    TasksDone,
    WorkerExhausted,
    WorkerLost,
)
from rayloader.transport import codec
from rayloader.transport.lanes import Lent, from_wire
from rayloader.worker import CARRY, Result, ResultKind

# How often a wait for the head looks at the other workers, in seconds: a dead one may be what the head waits for.
TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A task and its batch, or the user's exception in its place."""

    task: Task
    data: Any


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What the sampler gave, and the same in a list, encoded."""

    indices: Any
    encoded: codec.Encoded


@dataclass(frozen=True, slots=True)
class _Call:
    ref: Ref
    worker_id: int
    lent: Lent | None  # room for its batch


@dataclass(frozen=True, slots=True)
class _Answer:
    result: Result
    lent: Lent | None  # what the batch may lie in


class Epoch:
    """The way of the batches of one epoch: indices in, batches out, in the schedule's order.

    Args:
        crew: one actor a worker, told what to do.
        schedule: not yet opened.
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
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
        timeout: float,
        arenas: bool,
        pin: Callable[[Any], Any] | None,
        device_index: int | None,
    ) -> None:
        self._crew = crew
        self._sampler_iter = sampler_iter
        self._timeout = timeout
        self._arenas = arenas
        self._pin = pin
        self._device_index = device_index
        self._pin_thread: PinThread[Delivery] | None = None
        self._tick = TICK_S if pin is None else PIN_TICK_S
        self._changed = threading.Condition()  # guards what follows; notified with every event
        self._schedule = schedule
        self._calls: dict[int, _Call] = {}  # unanswered, by task
        self._results: dict[int, _Answer] = {}  # not delivered, by task
        self._deliverable: deque[tuple[Task, _Answer]] = deque()  # in delivery order
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
        began = time.monotonic()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._cut_short:
            self._crew.check_session()
        while not self.finished:
            self._check_integrity()
            wait = max(0.0, min(self._tick, self._deadline(began) - time.monotonic()))
            delivery = self._pin_thread.get(wait) if self._pin_thread is not None else self._receive(wait)
            if delivery is not None:
                self._handle(BatchTaken(delivery.task.task_id))
                self._draw_owed()
                return delivery
            self._draw_owed()
            if time.monotonic() >= self._deadline(began):
                raise self._timed_out()
        return None

    def close(self) -> None:
        """Drops what is under way; callable more than once."""
        self._cut_short |= not self.finished
        self._handle(Closed())
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
                            self._calls.pop(task_id, None)
                            self._results.pop(task_id, None)
                    case Fail():
                        self._failure = self._worker_died(command)
                        raise self._failure
            self._changed.notify_all()

    def _draw_owed(self) -> None:
        """Draws what the schedule asked for; in the user's thread, for the sampler and its generator are the user's."""
        while self._schedule.owed_draws:
            try:
                indices = next(self._sampler_iter)
                drawn = _Drawn(indices, codec.encode([indices], carry=CARRY))
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
            under_way = self._calls or self._results or self._deliverable or self._schedule.owed_draws
            if self._pin_thread is None and not under_way and not self._schedule.finished:
                raise RayloaderError("this iterator was interrupted and has lost its place; call iter() again")

    def _submit(self, worker_id: int, tasks: tuple[Task, ...]) -> None:
        self._crew.check_session()
        (task,) = tasks
        actor = self._crew.actors[worker_id]
        lent = actor.lane.lend(self._schedule.window // len(self._crew.actors)) if self._arenas else None
        ref = actor.run((task.task_id,), task.indices.encoded, lent.room if lent is not None else None)
        self._calls[task.task_id] = _Call(ref, worker_id, lent)

    # ---- receiving: the user's thread, or the pin thread

    def _receive(self, wait: float) -> Delivery | None:
        """The next batch, opened; None if it has not come within about `wait` seconds."""
        if not self._deliverable:
            try:
                self._collect(wait)
            except ActorLost as lost:
                self._handle(WorkerLost(lost.worker_id, str(lost)))
        if not self._deliverable:
            return None
        task, answer = self._deliverable[0]
        lane = self._crew.actors[task.worker_id].lane
        delivery = Delivery(task, _open(task, answer))
        self._deliverable.popleft()  # only now: a Ctrl-C while it was opened does not lose it
        lane.release(answer.lent, reuse=answer.result.reuse)
        return delivery

    def _receive_and_pin(self) -> Delivery | None:
        """The next batch, pinned; None after the last. Waits while all that is under way waits for the user."""
        assert self._pin is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._schedule.finished or self._calls or self._deliverable)
                if self._schedule.finished:
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
        is waited for.
        """
        with self._changed:
            head = self._schedule.head
            calls = dict(self._calls)
        if head is None or not calls:
            return
        if self._schedule.in_order and not self._timeout:
            if head.task_id in calls and self._take_in(calls[head.task_id], wait):
                return
            count, wait = len(self._crew.actors), 0.0
        else:
            count = 1
        first_of_worker = {call.worker_id: call for call in reversed(calls.values())}  # it answers in order
        by_ref = {call.ref: call for call in first_of_worker.values()}
        answered = self._crew.ready(list(by_ref), count=count, timeout=wait)
        for ref in answered:
            self._take_in(by_ref[ref], 0.0)
        if not answered:
            self._crew.check_started()

    def _take_in(self, call: _Call, timeout: float) -> bool:
        """Reports what a call returned to the schedule; False if it has not returned yet."""
        results = self._crew.fetch(call.worker_id, call.ref, timeout)
        if results is None:
            return False
        self._last_arrival = time.monotonic()
        lane = self._crew.actors[call.worker_id].lane
        for result in results:
            with self._changed:
                if result.task_id not in self._calls:
                    continue  # forgotten meanwhile
                match result.kind:
                    case ResultKind.BATCH | ResultKind.ERROR:
                        self._results[result.task_id] = _Answer(result, call.lent)
                        lane.saw(result.nbytes)
                        if result.no_arena:
                            lane.refused(result.no_arena)
                        self._handle(TasksDone((result.task_id,)))
                        del self._calls[result.task_id]
                    case ResultKind.EXHAUSTED:
                        lane.release(call.lent, reuse=result.reuse)
                        for task_id, later in self._calls.items():
                            if later.worker_id == call.worker_id and task_id > result.task_id:
                                lane.release(later.lent, reuse=True)  # an exhausted worker writes nothing any more
                        self._handle(WorkerExhausted(result.task_id))
                    case ResultKind.EXITED:
                        self._handle(WorkerLost(call.worker_id, result.text))
        return True

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
        if head is not None:
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


def _open(task: Task, answer: _Answer) -> Any:
    """The batch, or the ExceptionWrapper, that a result holds; an ExceptionWrapper too when it cannot be unpickled."""
    result = answer.result
    if result.wire is None:
        return _RemoteError(result.text)
    try:
        return from_wire(result.wire, answer.lent)
    except Exception:  # the user's own unpickling may raise anything
        if result.kind is ResultKind.ERROR:
            return _RemoteError(result.text)
        return ExceptionWrapper(where=f"unpickling a batch of DataLoader worker process {task.worker_id}")


def describe(task: Task, crew: Crew) -> str:
    """Which batch, where, of what."""
    address = crew.address(task.worker_id)
    where = f" (pid {address.pid} on {address.hostname}, node {address.node_id})" if address is not None else ""
    indices = task.indices.indices
    of_what = "" if _stands_for_nothing(indices) else f", indices {reprlib.repr(indices)}"
    return f"batch {task.task_id} from worker {task.worker_id}{where}{of_what}"


def _stands_for_nothing(indices: Any) -> bool:
    """Whether these are the placeholders that torch draws for iterable datasets."""
    return indices is None or (isinstance(indices, list) and all(index is None for index in indices))
