"""The driver's schedule: which worker builds which batch, and which batch is delivered next.

Promise: a pure state machine. Standard library only; no Ray, no torch, no clock, no thread, no I/O. Two
rules govern it:

1. Everything that happened comes in through `Schedule.handle` as an event; everything to be done goes out as the
   list of commands that it returns. Nothing else changes the state.
2. A task's state changes only along `TRANSITIONS` (messages.py).

It runs under whatever lock its caller holds. The assignment of tasks to workers is torch's (see NOTE [round-robin]),
for the workers' random streams, and with them random augmentation, depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rayloader.messages import (
    ANY_WORKER,
    TRANSITIONS,
    BatchTaken,
    CallAnswered,
    Closed,
    Command,
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
    TasksDone,
    TaskState,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)

_SUBMITTED = TRANSITIONS[TaskState.QUEUED]["Submit"]
_DONE = TRANSITIONS[TaskState.OUTSTANDING]["TasksDone"]
_DELIVERED = TRANSITIONS[TaskState.READY]["Deliver"]

# NOTE [round-robin]
# Map-style: task i goes to worker i mod W. Iterable: to the next worker in the cycle that is not exhausted. Without
# order (`in_order=False`) a worker is passed over while it holds its share of the window. Per worker at most
# `prefetch_factor` tasks are in the table, W * prefetch_factor in all: they are drawn when the epoch opens, then one
# for each batch that is taken, which are the moments at which torch draws. In order, an exhausted worker's places in
# the window go with it, so the others keep their own bound. Without order the others' shares grow (torch's rule), and
# the places are drawn anew: else the one worker left could be without a task, and with nothing to take nothing would
# ever be drawn.
#
# NOTE [calls]
# A call costs much the same whatever it carries, so it carries `tasks_per_call` tasks of its worker. They queue here
# until they fill a call, or until the worker has no call left: it is never idle for want of a full one. An *elastic*
# window grows with the calls: `Paced` says how far.
#
# NOTE [dynamic]
# Where nothing depends on who builds a batch, tasks queue for any worker: whoever has fewer than two calls gets the
# next ones, the least busy first, so that a slow sample holds up what its worker has been given and nothing else.
CALLS_AHEAD = 2
#
# NOTE [blame]
# What was lost is sent again one task a call, so that the next loss shows which task was at work. What killed the
# process is not known: Ray says the same of a crash in the task and of a kill from outside. So a worker may die
# `max_restarts` times in a row without finishing anything, whatever it was at; one more death ends the epoch. However
# large that number is, a task ends it that was at work, alone in its call, at so many deaths:
DEATHS = 5
# And one whose process said itself that the task ended it (SystemExit), so that chance has no part in it, at so many:
KILLS = 2


class Schedule:
    """The ordered task table of one epoch.

    Args:
        num_workers: number of workers, at least 1.
        prefetch_factor: tasks per worker submitted and not yet taken by the user, at least 1; if `elastic`, torch's.
        in_order: deliver in task order; otherwise as tasks finish.
        elastic: whether the window grows with the calls.
        dynamic: any worker takes the next task (map-style datasets only).
        max_restarts: how often in a row a worker is replaced that has not finished a task.
        first_task_id: where the epoch goes on: the tasks before are done.
        first_worker_id: whose turn it is.
    """

    def __init__(
        self,
        num_workers: int,
        prefetch_factor: int,
        *,
        in_order: bool = True,
        elastic: bool = False,
        dynamic: bool = False,
        max_restarts: int = 0,
        first_task_id: int = 0,
        first_worker_id: int = 0,
    ) -> None:
        self.in_order = in_order
        self.elastic = elastic
        self._grows = elastic  # still
        self.dynamic = dynamic
        self._prefetch_factor = prefetch_factor
        self._places = prefetch_factor  # in the window, per worker
        self._surplus = 0  # tasks in the table beyond the window, after it shrank
        self._max_restarts = max_restarts
        self._restarts = [0] * num_workers  # since a worker's last finished task
        self._kills: dict[int, int] = {}  # by task
        self._active = [True] * num_workers  # not exhausted and not lost for good, by worker
        self._exhausted_at: dict[int, int] = {}  # at which task, by worker
        self._away = [False] * num_workers  # lost and not yet replaced
        self._held = [0] * num_workers  # tasks in the table, by worker
        self._tasks_per_call = [1] * num_workers
        self._wanted_places = [0] * num_workers
        self._queued: list[deque[Task]] = [deque() for _ in range(num_workers)]
        self._queued_for_any: deque[Task] = deque()
        self._unanswered_tasks = [0] * num_workers
        self._unanswered_calls = [0] * num_workers
        self._hungry: set[int] = set()  # workers with queued tasks and no call
        self._tasks: dict[int, Task] = {}  # in task order
        self._head_id = first_task_id  # no task below it is undelivered
        self._next_task_id = first_task_id
        self._next_worker_id = first_worker_id
        self.owed_draws = 0  # asked for and not reported
        self.taken = first_task_id  # batches; those that are skipped among them
        self._opened = False
        self._sampler_exhausted = False
        self._failed = False  # a worker is lost for good
        self.closed = False
        self._finished = False  # when it was closed
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            Opened: self._open,
            IndicesDrawn: self._assign,
            IndicesSkipped: self._skip,
            SamplerExhausted: self._sampler_ended,
            SamplerFailed: self._sampler_failed,
            DrawsPutOff: self._put_off,
            DrawsUndone: self._draws_undone,
            TasksDone: self._done,
            CallAnswered: self._call_answered,
            Paced: self._paced,
            WorkerExhausted: self._worker_exhausted,
            WorkerLost: self._worker_lost,
            WorkerReady: self._worker_ready,
            BatchTaken: self._taken,
            Closed: self._close,
        }

    @property
    def window(self) -> int:
        """Tasks that may be in the table, of all workers together."""
        return self._places * len(self._active)

    @property
    def torch_draws(self) -> int:
        """How often torch's loader would have asked the sampler by now."""
        return self._prefetch_factor * len(self._active) + self.taken

    @property
    def head(self) -> Task | None:
        """The lowest undelivered task, None if there is none."""
        while self._head_id < self._next_task_id:
            task = self._tasks.get(self._head_id)
            if task is not None and task.state is not TaskState.DELIVERED:
                return task
            self._head_id += 1
        return None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task table, in task order."""
        return tuple(self._tasks.values())

    @property
    def outstanding(self) -> tuple[Task, ...]:
        """The tasks that workers have not answered, in task order; also those that still queue, or are lost."""
        unanswered = (TaskState.QUEUED, TaskState.OUTSTANDING, TaskState.LOST)
        return tuple(task for task in self._tasks.values() if task.state in unanswered)

    def has(self, task: Task) -> bool:
        """Whether it is in the task table; another one of its number may be."""
        return self._tasks.get(task.task_id) is task

    @property
    def finished(self) -> bool:
        """Whether every batch there is has been taken. An epoch that is closed before will never be finished."""
        return self._finished if self.closed else (self._opened and not self._tasks and not self.owed_draws)

    def handle(self, event: Event) -> list[Command]:
        """Takes in what happened and returns what is to be done, in order.

        Raises:
            RuntimeError: the event contradicts the state (a fault in the caller).
        """
        if self.closed:
            return []  # late news of an epoch that nobody listens to
        return self._handlers[type(event)](event)

    # ---- drawing and assigning

    def _open(self, event: Opened) -> list[Command]:
        self._opened = True
        return self._draw(self.window)

    def _draw(self, count: int) -> list[Command]:
        if count <= 0 or self._sampler_exhausted or not any(self._active):
            return []
        self.owed_draws += count
        return [DrawIndices(count)]

    def _assign(self, event: IndicesDrawn) -> list[Command]:
        self.owed_draws -= 1
        if self.dynamic:
            return self._assign_to_any(event.indices)
        worker_id = self._next_with_room()
        commands: list[Command] = []
        if worker_id is not None:  # else all are exhausted: these indices stand for no sample (iterable datasets only)
            task = Task(self._next_task_id, worker_id, event.indices)
            self._next_task_id += 1
            self._tasks[task.task_id] = task
            self._held[worker_id] += 1
            queued = self._queued[worker_id]
            queued.append(task)
            if len(queued) >= self._tasks_per_call[worker_id]:
                commands = [self._submit(worker_id)]
            elif not self._unanswered_calls[worker_id]:
                self._hungry.add(worker_id)
        return commands + self._feed_hungry() if self._hungry else commands

    def _skip(self, event: IndicesSkipped) -> list[Command]:
        self.owed_draws -= 1
        self._next_task_id += 1
        self.taken += 1
        return self._draw(1)

    def _assign_to_any(self, indices: Any) -> list[Command]:
        task = Task(self._next_task_id, ANY_WORKER, indices)
        self._next_task_id += 1
        self._tasks[task.task_id] = task
        self._queued_for_any.append(task)
        return self._feed_any()

    def _next_with_room(self) -> int | None:
        num_workers = len(self._active)
        for step in range(num_workers):
            worker_id = (self._next_worker_id + step) % num_workers
            if self._active[worker_id] and (self.in_order or self._has_share(worker_id)):
                self._next_worker_id = (worker_id + 1) % num_workers
                return worker_id
        return None

    def _has_share(self, worker_id: int) -> bool:
        return self._held[worker_id] < self.window // sum(self._active)

    def _sampler_ended(self, event: SamplerExhausted) -> list[Command]:
        self._sampler_exhausted = True
        self.owed_draws = 0
        return self._feed_hungry()

    def _sampler_failed(self, event: SamplerFailed) -> list[Command]:
        self.owed_draws -= 1
        return self._feed_hungry()

    def _put_off(self, event: DrawsPutOff) -> list[Command]:
        self._shrink_to_torch()
        return self._feed_hungry()

    def _draws_undone(self, event: DrawsUndone) -> list[Command]:
        """Without the tasks from this one on; their workers are told anew what they have to do."""
        if self._failed:
            return []
        gone = [task for task in self._tasks.values() if task.task_id >= event.from_task]
        again = [worker_id for worker_id, task_id in self._exhausted_at.items() if task_id >= event.from_task]
        at_once = [worker_id for worker_id in again if self._exhausted_at[worker_id] == event.from_task]
        if not self.dynamic:
            self._next_worker_id = next(iter(at_once or [task.worker_id for task in gone]), self._next_worker_id)
        for worker_id in again:
            self._active[worker_id] = True
            del self._exhausted_at[worker_id]
        for task in gone:
            self._move(task, event)
        self._next_task_id = event.from_task
        self._head_id = min(self._head_id, event.from_task)
        self._sampler_exhausted = False
        self._shrink_to_torch()
        return [Forget(tuple(task.task_id for task in gone)), *self._draw(self.torch_draws - event.from_task)]

    def _shrink_to_torch(self) -> None:
        self._grows, self._places, self.owed_draws = False, self._prefetch_factor, 0
        self._surplus = max(0, len(self._tasks) - self.window)

    # ---- submitting, see NOTE [calls]

    def _submit(self, worker_id: int) -> Submit:
        queued = self._queued_for_any if self.dynamic else self._queued[worker_id]
        tasks = tuple(queued.popleft() for _ in range(min(len(queued), self._tasks_per_call[worker_id])))
        for task in tasks:
            task.state = _SUBMITTED
            task.worker_id = worker_id
        self._unanswered_tasks[worker_id] += len(tasks)
        self._unanswered_calls[worker_id] += 1
        self._hungry.discard(worker_id)
        return Submit(worker_id, tasks)

    def _feed_any(self) -> list[Command]:
        """See NOTE [dynamic]."""
        commands: list[Command] = []
        while self._queued_for_any:
            here = [w for w, active in enumerate(self._active) if active and not self._away[w]]
            free = [worker_id for worker_id in here if self._unanswered_calls[worker_id] < CALLS_AHEAD]
            worker_id = min(free, key=self._unanswered_tasks.__getitem__, default=None)
            if worker_id is None:
                break
            full = len(self._queued_for_any) >= self._tasks_per_call[worker_id]
            if not full and (self._unanswered_calls[worker_id] or self.owed_draws):
                break
            commands.append(self._submit(worker_id))
        return commands

    def _feed_hungry(self) -> list[Command]:
        """Once no more draws are to come now, what would fill a call has come."""
        if self.dynamic:
            return self._feed_any()
        return [] if self.owed_draws else [self._submit(worker_id) for worker_id in sorted(self._hungry)]

    def _call_answered(self, event: CallAnswered) -> list[Command]:
        worker_id = event.worker_id
        self._unanswered_calls[worker_id] -= 1
        if self.dynamic and self._unanswered_tasks[worker_id] and not self._unanswered_calls[worker_id]:
            self._unanswered_calls[worker_id] += 1
            return [Submit(worker_id, ()), *self._feed_any()]
        if self.dynamic:
            return self._feed_any()
        if self._unanswered_calls[worker_id] or not (self._queued[worker_id] or self._unanswered_tasks[worker_id]):
            return []
        return [self._submit(worker_id)]

    def _paced(self, event: Paced) -> list[Command]:
        self._tasks_per_call[event.worker_id] = event.tasks_per_call
        queued = self._queued[event.worker_id]
        commands: list[Command] = self._feed_any()
        while len(queued) >= event.tasks_per_call:
            commands.append(self._submit(event.worker_id))
        self._wanted_places[event.worker_id] = event.places
        if self._grows:
            places = max(self._prefetch_factor, *self._wanted_places)
            self._surplus += (self._places - places) * sum(self._active)
            self._places = places
            missing, self._surplus = max(0, -self._surplus), max(0, self._surplus)
            commands += self._draw(missing)
        return commands

    # ---- delivering

    def _done(self, event: TasksDone) -> list[Command]:
        """Tasks dropped meanwhile, or answered before, are passed over: telling it twice does no harm."""
        done = []
        for task_id in event.task_ids:
            task = self._tasks.get(task_id)
            if task is not None and task.state is TaskState.OUTSTANDING:
                task.state = _DONE
                self._unanswered_tasks[task.worker_id] -= 1
                self._restarts[task.worker_id] = 0
                done.append(task)
        return self._deliver_ready() if self.in_order else [self._deliver(task) for task in done]

    def _deliver_ready(self) -> list[Command]:
        """Delivers from the head on, up to the first task that is not ready."""
        commands: list[Command] = []
        while self.in_order and (head := self.head) is not None and head.state is TaskState.READY:
            commands.append(self._deliver(head))
        return commands

    def _deliver(self, task: Task) -> Deliver:
        task.state = _DELIVERED
        return Deliver(task)

    def _taken(self, event: BatchTaken) -> list[Command]:
        worker_id = self._tasks[event.task_id].worker_id
        self._move(self._tasks[event.task_id], event)
        self.taken += 1
        if self.in_order and not self._active[worker_id]:
            return []
        if self._surplus:
            self._surplus -= 1
            return []
        return self._draw(1)

    # ---- ends

    def _worker_exhausted(self, event: WorkerExhausted) -> list[Command]:
        """A worker's answers may be told in any order: its tasks before this one may still bring batches."""
        if event.task_id not in self._tasks:
            return []
        worker_id = self._tasks[event.task_id].worker_id
        if self._active[worker_id] and self._surplus:
            self._surplus = max(0, self._surplus - max(0, self._held[worker_id] - self._places))
        self._active[worker_id] = False
        self._exhausted_at[worker_id] = event.task_id
        dropped = [t for t in self.outstanding if t.worker_id == worker_id and t.task_id >= event.task_id]
        for task in dropped:
            self._move(task, event)
        commands: list[Command] = [Forget(tuple(task.task_id for task in dropped))]
        if not self.in_order:
            commands += self._draw(len(dropped))
        return commands + self._deliver_ready()

    def _worker_lost(self, event: WorkerLost) -> list[Command]:
        """See NOTE [blame]."""
        worker_id = event.worker_id
        lost = [t for t in self._tasks.values() if t.worker_id == worker_id and t.state is TaskState.OUTSTANDING]
        lost_before = [t for t in self._tasks.values() if t.worker_id == worker_id and t.state is TaskState.LOST]
        if self._failed or not (lost or lost_before or self._active[worker_id]):
            return []  # told before, or its work was done
        for task in lost:
            self._move(task, event)
        suspect = self._tasks.get(event.suspect) if event.suspect is not None else None
        if not event.blameless:
            self._restarts[worker_id] += 1
        if suspect is not None:
            self._kills[suspect.task_id] = self._kills.get(suspect.task_id, 0) + 1
        hopeless = suspect is not None and self._kills[suspect.task_id] >= (KILLS if event.admitted else DEATHS)
        if hopeless or self._restarts[worker_id] > self._max_restarts:
            self._failed, self._active[worker_id] = True, False
            self._sampler_exhausted, self.owed_draws = True, 0  # the epoch ends with what is there
            return [Fail(worker_id, event.cause, suspect or next(iter(lost_before + lost), None))]
        self._away[worker_id] = True
        return [ReplaceWorker(worker_id, event.cause)]

    def _worker_ready(self, event: WorkerReady) -> list[Command]:
        worker_id = event.worker_id
        self._away[worker_id] = False
        for task in self._tasks.values():
            if task.worker_id == worker_id and task.state is TaskState.LOST:
                self._move(task, event)
                self._unanswered_tasks[worker_id] += 1
        self._unanswered_calls[worker_id] = event.calls
        if self.dynamic:
            return self._feed_any()
        return [self._submit(worker_id)] if self._queued[worker_id] and not event.calls else []

    def _close(self, event: Closed) -> list[Command]:
        """Whatever the state is, also one that a Ctrl-C left half-changed."""
        self._finished = self.finished
        commands: list[Command] = self._finish_as_torch() if event.resuming else []
        if self._tasks:
            commands.append(Forget(tuple(self._tasks)))
        self._tasks.clear()
        self.closed = True
        self.owed_draws = 0
        return commands

    def _finish_as_torch(self) -> list[Command]:
        """Of each worker's tasks in the table torch's would have the first `prefetch_factor`."""
        commands: list[Command] = []
        for worker_id, queued in enumerate(self._queued):
            held = [task.task_id for task in self._tasks.values() if task.worker_id == worker_id]
            surplus = held[self._prefetch_factor :] if self.elastic else []
            if surplus:
                commands.append(Drop(worker_id, surplus[0]))
            wanted = tuple(task for task in queued if not surplus or task.task_id < surplus[0])
            if wanted:
                commands.append(Submit(worker_id, wanted))
        return commands

    def _move(self, task: Task, event: Event) -> None:
        before = task.state
        try:
            state = TRANSITIONS[before][type(event).__name__]
        except KeyError:
            raise RuntimeError(f"{event} cannot happen to {task}; see TRANSITIONS in messages.py") from None
        if before is TaskState.OUTSTANDING:
            self._unanswered_tasks[task.worker_id] -= 1
        elif before is TaskState.QUEUED:
            (self._queued_for_any if self.dynamic else self._queued[task.worker_id]).remove(task)
            self._hungry.discard(task.worker_id)
        if state is TaskState.GONE:
            del self._tasks[task.task_id]
            if not self.dynamic:
                self._held[task.worker_id] -= 1
        task.state = state
