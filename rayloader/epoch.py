"""One iteration of a loader: where the schedule meets I/O.

Promise: `EpochIterator` is what `iter(loader)` returns. It owns a crew of actors and one `Epoch` at a time; both end with
the last batch, with an error of the machinery, or with the iterator itself. `Epoch` feeds events to the schedule and carries
out its commands; it decides nothing.

Threads: the user's thread draws from the sampler, at torch's moments, and submits. It also receives, unless batches are to be
pinned: then `rayloader-pin` receives and the user's thread takes from it. `Epoch._changed` guards the schedule and the tables.
The pin thread holds the `Epoch`, never the iterator, so that an iterator dies with its last reference.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import reprlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _sharding_worker_init_fn

from rayloader.delivery.pinning import TICK_S as PIN_TICK_S
from rayloader.delivery.pinning import PinThread
from rayloader.errors import BatchTimeoutError, WorkerDiedError, add_note
from rayloader.pool import ActorLost, Crew, Ref, get_pool
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
    Schedule,
    Submit,
    Task,
    TasksDone,
    WorkerExhausted,
    WorkerLost,
)
from rayloader.transport import codec
from rayloader.worker import (
    ProcessState,
    Replica,
    Result,
    ResultKind,
    Setup,
    changed_collate_fn_map,
    from_wire,
)

# How often a wait for the head looks at the other workers, in seconds: a dead one may be what the head waits for.
TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A task and its batch, or the user's exception in its place."""

    task: Task
    data: Any


@dataclass(frozen=True, slots=True)
class _Call:
    ref: Ref
    worker_id: int


class Epoch:
    """The way of the batches of one epoch: indices in, batches out, in the schedule's order.

    Args:
        crew: one actor a worker, told what to do.
        schedule: not yet opened.
        sampler_iter: yields the indices of a batch, or of a sample where batching is off.
        timeout: seconds that the user waits for a batch at most, 0 for ever.
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
        pin: Callable[[Any], Any] | None,
        device_index: int | None,
    ) -> None:
        self._crew = crew
        self._sampler_iter = sampler_iter
        self._timeout = timeout
        self._pin = pin
        self._device_index = device_index
        self._pin_thread: PinThread[Delivery] | None = None
        self._tick = TICK_S if pin is None else PIN_TICK_S
        self._changed = threading.Condition()  # guards what follows; notified with every event
        self._schedule = schedule
        self._calls: dict[int, _Call] = {}  # unanswered, by task
        self._results: dict[int, Result] = {}  # answered, not delivered, by task
        self._deliverable: deque[tuple[Task, Result]] = deque()  # in delivery order
        self._owed_draws = 0  # from the sampler, which belongs to the user's thread
        self._last_arrival = 0.0  # time.monotonic()
        self._failure: WorkerDiedError | None = None

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
            raise self._failure
        while not self.finished:
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
        self._handle(Closed())
        if self._pin_thread is not None:
            self._pin_thread.close()

    # ---- events in, commands out

    def _handle(self, event: Event) -> None:
        with self._changed:
            for command in self._schedule.handle(event):
                match command:
                    case DrawIndices(count):
                        self._owed_draws += count
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
        while self._owed_draws:
            with self._changed:
                self._owed_draws -= 1
            try:
                indices = next(self._sampler_iter)
            except StopIteration:
                self._owed_draws = 0
                self._handle(SamplerExhausted())
            else:
                self._handle(IndicesDrawn(indices))

    def _submit(self, worker_id: int, tasks: tuple[Task, ...]) -> None:
        self._crew.check_session()
        indices = codec.encode([task.indices for task in tasks])
        ref = self._crew.actors[worker_id].run(tuple(task.task_id for task in tasks), indices)
        self._calls.update((task.task_id, _Call(ref, worker_id)) for task in tasks)

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
        task, result = self._deliverable[0]
        delivery = Delivery(task, _open(task, result))
        self._deliverable.popleft()  # only now: a Ctrl-C while it was opened does not lose it
        return delivery

    def _receive_and_pin(self) -> Delivery | None:
        """The next batch, pinned; None after the last. Waits for the user where the window is full of what he has not taken."""
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

        In order the one call that the head is in is waited for, Ray's cheapest wait; only when it does not come the others are
        looked at. Without order, or with a timeout (which each arrival extends, as in torch), any answer is waited for.
        """
        with self._changed:
            head = self._schedule.head
            calls = dict(self._calls)
        if head is None or not calls:
            return
        if self._schedule.in_order and not self._timeout:
            if self._take_in(calls[head.task_id], wait):
                return
            count, wait = len(calls), 0.0
        else:
            count = 1
        by_ref = {call.ref: call for call in calls.values()}
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
        for result in results:
            with self._changed:
                if result.task_id not in self._calls:
                    continue  # forgotten meanwhile
                match result.kind:
                    case ResultKind.BATCH | ResultKind.ERROR:
                        self._results[result.task_id] = result
                        self._handle(TasksDone((result.task_id,)))
                        del self._calls[result.task_id]
                    case ResultKind.EXHAUSTED:
                        self._handle(WorkerExhausted(call.worker_id))
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
            add_note(error, _describe(fail.task, self._crew))
        return error

    # ---- waiting

    def _deadline(self, began: float) -> float:
        """When the user has waited long enough: `timeout` seconds after he asked, or after the last answer of any worker, and
        not before the worker that he waits for has started."""
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
        what = f" waiting for {_describe(head, self._crew)}" if head is not None else " waiting for pinned memory"
        return BatchTimeoutError(f"DataLoader timed out after {self._timeout} seconds{what}")


class EpochIterator(_BaseDataLoaderIter):
    """Iterates over a loader's batches; what `iter(loader)` returns. One for each `iter()`, or one for all with persistent
    workers. Not to be pickled, and of no use in a forked child."""

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
                    actor.resume(self._shared_seed)
            else:
                self._crew = self._start_crew(loader)
                super()._reset(loader, first_iter)
            self._epoch = Epoch(
                self._crew,
                Schedule(self._num_workers, self._prefetch_factor, in_order=self._in_order),
                self._sampler_iter,
                timeout=self._timeout,
                pin=functools.partial(pin_memory, device=self._pin_memory_device) if self._pin_memory else None,
                device_index=torch.accelerator.current_device_index() if self._pin_memory else None,
            )
            self._epoch.open()
        except BaseException:
            if first_iter or not self._persistent_workers:
                self._close()  # no crew without an epoch that watches it
            elif self._epoch is not None:
                self._epoch.close()  # the workers keep their datasets for the next iter()
            raise

    def _start_crew(self, loader: TorchDataLoader[Any]) -> Crew:
        crew = get_pool().acquire(loader, self._num_workers, self._remote_args, fresh=self._fresh_processes)
        try:
            replica = crew.put(self._encode_replica())
            process = ProcessState.capture()
            for worker_id, actor in enumerate(crew.actors):
                setup = Setup(
                    worker_id=worker_id,
                    num_workers=self._num_workers,
                    base_seed=self._base_seed,
                    shared_seed=self._shared_seed,
                    dataset_kind=self._dataset_kind,
                    auto_collation=self._auto_collation,
                    drop_last=self._drop_last,
                    process=process,
                )
                actor.start(setup, replica)
        except BaseException:  # the actors were borrowed: they go back whatever happened
            crew.release(busy=True)
            raise
        return crew

    def _encode_replica(self) -> codec.Encoded:
        replica = Replica(self._dataset, self._collate_fn, self._worker_init_fn, changed_collate_fn_map())
        try:
            return codec.encode(replica)
        except Exception as error:  # the user's objects may raise anything: name the culprit and pass it on
            for name in ("dataset", "collate_fn", "worker_init_fn"):
                if (explanation := codec.explain_unpicklable(getattr(replica, name), name)) is not None:
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
                add_note(error, _describe(delivery.task, self._crew))
                raise
        return delivery.data

    def _release(self) -> None:
        """Gives the crew back: idle after the last batch, otherwise perhaps at work."""
        if self._crew is None:
            return
        busy = self._epoch is None or not self._epoch.finished
        lost = [] if self._epoch is None or self._epoch.failure is None else [self._epoch.failure.worker_id]
        if self._epoch is not None:
            self._epoch.close()
        self._crew.release(busy=busy, lost=range(self._num_workers) if self._fresh_processes else lost)

    def _close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has neither our locks in order nor our threads
            self._release()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # by then the threads are frozen and `_close_all` has done it
            self._close()


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


def _describe(task: Task, crew: Crew) -> str:
    """Which batch, where, of what."""
    address = crew.address(task.worker_id)
    where = f" (pid {address.pid} on {address.hostname}, node {address.node_id})" if address is not None else ""
    indices = "" if _stands_for_nothing(task.indices) else f", indices {reprlib.repr(task.indices)}"
    return f"batch {task.task_id} from worker {task.worker_id}{where}{indices}"


def _stands_for_nothing(indices: Any) -> bool:
    """Whether these are the placeholders that torch draws for iterable datasets."""
    return indices is None or (isinstance(indices, list) and all(index is None for index in indices))


_live_iterators: weakref.WeakSet[EpochIterator] = weakref.WeakSet()


def _close_all() -> None:
    for iterator in list(_live_iterators):
        iterator._close()


# Runs before the pool's handler, which was registered before it: threads end while there is still something to talk to.
atexit.register(_close_all)
