"""An epoch of the engine on worker processes that do their work when a test says so: no Ray, no waiting.

The fleet and its workers are real. What a process builds depends on everything that it built before, as if each batch
drew one number from its worker's random stream: a worker that is not restored exactly builds other batches, and a batch
that is rebuilt is compared with its digest, as real workers do. Messages reach a process once the mailbox is flushed.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils.data import ChainDataset

from rayloader import DataLoader
from rayloader._compat import ExceptionWrapper
from rayloader.epoch.engine import LOOK_S, Engine
from rayloader.epoch.schedule import Schedule
from rayloader.gpu.to_device import PINNED_AHEAD, PinOrMove
from rayloader.observe.recorder import Tally
from rayloader.options import Options
from rayloader.protocol import Answer, ResultKind, Up, WorkerAddress, pack_spent
from rayloader.resume.journal import Journal, Resumed
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.resume.snapshot import WorkerState
from rayloader.task import DELIVERED, GONE, LOST, OUTSTANDING, QUEUED, READY, SkipSteps, Task
from rayloader.transport import codec
from rayloader.transport.lanes import to_wire
from rayloader.workers import fleet as fleet_module
from rayloader.workers.connection import LineRefused, NeverStarts, ProcessLost
from rayloader.workers.fleet import Fleet, Worker

# Waits in a row in which nothing can happen: after so many the test fails, instead of hanging.
STANDSTILL = 500


class Clock:
    """Stands for the module `time`: it moves only when somebody waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Process:
    """A worker process, its channel and its arena; `work` and all that follows it are for tests."""

    kind, worker_id, calls, created_at, leased_bytes = "fork", -1, 0, 0.0, 0
    started_at: float | None = None
    address: WorkerAddress | None = None
    lost = False
    is_dead = False  # though the driver may not know
    is_deaf = False  # nothing arrives over its channel any more
    has_exited = False  # it goes on until it is killed; nothing that it builds counts
    full = 0  # answers that said that the arena was full
    # Of the worker that it is: `position` is that of its random stream.
    epoch, tasks, last_task, position, rebuilt, to_rebuild = 0, 0, -1, 0, 0, 0

    def __init__(self, world: World, *, runs: bool, cannot_start: bool) -> None:
        self.world, self.runs, self.cannot_start, self.lane = world, runs, cannot_start, self
        self.tells_start = not world.forks
        self.queue: list[tuple[Any, ...]] = []  # not flushed
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.left: deque[tuple[Any, ...]] = deque()  # to be rebuilt
        self.exits_at: set[tuple[int, int]] = set()  # epochs and tasks that end it, each once
        self.refusals: list[str] = []
        if runs and self.tells_start:
            self.comes()

    def comes(self) -> None:
        """It runs from now on."""
        self.address = WorkerAddress(1000, "node", "host", True, "machine")
        self.started_at = self.world.clock.now
        self.world.came = True

    def has_started(self) -> bool:
        if self.cannot_start or (self.is_dead and self.address is None):
            raise NeverStarts("as planned")
        return self.address is not None

    @property
    def may_come(self) -> bool:
        """It does not run yet; a fork is made only when there is something to tell it."""
        return self.address is None and (bool(self.inbox) or self.tells_start)

    def cause(self, error: Exception | None) -> str:
        return str(error)

    # ---- as a channel

    def _tell(self, kind: str, *content: Any) -> None:
        self.calls += kind != "start"
        self.queue.append((kind, self.calls, *content))

    def flush(self) -> None:
        if self.is_deaf:
            self.queue = [message for message in self.queue if message[0] == "start"]
        if not self.is_dead:
            self.inbox.extend(self.queue)
        elif self.queue and not self.lost and self.tells_start:
            self._tell_of_end()  # a call to a process that is dead fails, also after the news of its end
        self.queue = []
        if self.may_come and self.runs and not self.tells_start and not self.is_dead:
            self.comes()

    def start(self, source: object, setup: Any, state: WorkerState | None) -> Any:
        assert setup.worker_id == self.worker_id
        answer = SimpleNamespace(succeeded=False)
        self._tell("start", state, answer)
        if self.tells_start:  # a call of its own
            self.flush()
        return answer

    def run(self, task: Task) -> None:
        self._tell("run", task.task_id, task.indices.indices)

    def rebuild(self, tasks: Sequence[Task]) -> None:
        self._tell("rebuild", [(task.task_id, task.indices.indices, task.digest) for task in tasks])

    def resume(self, resumed: Resumed) -> None:
        self._tell("resume", resumed)

    def was_full(self) -> None:
        self.full += 1

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    # ---- at work

    @property
    def can_work(self) -> bool:
        return self.address is not None and bool(self.inbox)

    def work(self, count: int = 1) -> None:
        """Carries out calls until it has sent so many answers."""
        while count > 0 and self.can_work:
            count -= self.step()

    def step(self) -> bool:
        """Carries out one call; returns whether it has sent an answer."""
        kind, call, *content = self.inbox.popleft()
        answer = getattr(self, f"_do_{kind}")(call, *content)
        if answer is not None:
            self.world.mail.append((self, answer))
        return answer is not None

    def _do_start(self, call: int, state: WorkerState | None, answer: Any) -> None:
        state = state or WorkerState(0, 0, -1, digest=0)
        self.epoch, self.tasks, self.last_task, self.position = state.epoch, state.tasks, state.last_task, state.digest
        self.rebuilt = self.to_rebuild = 0
        self.left.clear()
        answer.succeeded = True

    def _do_run(self, call: int, task_id: int, indices: Any) -> tuple[Any, ...]:
        while self.left:
            if (ends := self._rebuild(*self.left.popleft())) is not None:
                ends.task_id = task_id
                return self._answer(call, ends)
        return self._answer(call, self._build(task_id, indices))

    def _build(self, task_id: int, indices: Any) -> Answer:
        world = self.world
        if (self.epoch, task_id) in self.exits_at:
            self.exits_at.discard((self.epoch, task_id))
            self.has_exited = True
            return Answer(task_id, ResultKind.EXITED, text=f"SystemExit in batch {task_id}")
        if world.length is not None and self.tasks >= world.length(self.worker_id):
            return Answer(task_id, ResultKind.EXHAUSTED)
        self.tasks, self.last_task, self.position = self.tasks + 1, task_id, self.position + 1
        if (answer := world.outcome(task_id)) is not None:
            return answer
        batch = world.batch(self.worker_id, self.epoch, self.position - 1, indices=indices)
        wire, digest = tuple(to_wire(codec.encode(batch))), zlib.crc32(repr(batch).encode())
        return Answer(task_id, ResultKind.BATCH, wire, "", 1000, digest=digest, samples=1)

    def _state(self, **more: bool) -> tuple[Any, ...]:
        return tuple(WorkerState(self.epoch, self.tasks, self.last_task, digest=self.position, **more))

    def _answer(self, call: int, answer: Answer) -> tuple[Any, ...]:
        ended = answer.kind == ResultKind.EXHAUSTED
        if ended or (answer.kind == ResultKind.BATCH and self.tasks % self.world.snapshot_every == 0):
            answer.state = self._state(exhausted=ended)
        answer.seconds = 1.0
        answer.spent = pack_spent(self.worker_id, 0.0, 0.0, 0.0, 0.0, 0.0)
        answer.rebuilt = self.rebuilt, self.to_rebuild
        return Up.ANSWER, call, dataclasses.replace(answer, **self.world.news).fields

    def _do_rebuild(self, call: int, again: list[Any]) -> tuple[Any, ...]:
        self.left.extend(again)
        self.to_rebuild += len(again)
        ends = None
        for _ in range(min(self.world.slice, len(self.left))):
            ends = ends or self._rebuild(*self.left.popleft())
        return self._answer(call, ends or Answer(-1, ResultKind.REBUILT))

    def _rebuild(self, task_id: int, indices: Any, digest: int | None) -> Answer | None:
        """Returns a result that ends the process."""
        self.rebuilt += 1
        result = self._build(task_id, indices)
        if result.kind == ResultKind.EXITED:
            return result
        assert self.has_exited or digest in (None, result.digest), f"batch {task_id} was not rebuilt as it was"
        self.world.rebuilt.append(task_id)
        return None

    def _do_resume(self, call: int, resumed: Resumed) -> tuple[Any, ...] | None:
        while self.left:
            if self._rebuild(*self.left.popleft()) is not None:
                self.dies()
                return None
        self.epoch, self.tasks, self.last_task = resumed.epoch, 0, -1
        return Up.BEGUN, call, self._state()

    # ---- ends

    def dies(self) -> None:
        """What it has sent so far arrives, and then its end; that of a fork which has not come is only found out."""
        self.ends()
        if self.tells_start or self.address is not None:
            self._tell_of_end()

    def ends(self) -> None:
        self.is_dead = True
        self.queue.clear()
        self.inbox.clear()

    def _tell_of_end(self) -> None:
        self.world.mail.append((self, ProcessLost(self, RuntimeError("as planned"))))  # type: ignore[arg-type]

    def refuses_line(self) -> None:
        """What was told over the channel is lost; calls that do not need one arrive all the same."""
        self.is_deaf = True
        for messages in (self.queue, self.inbox):
            kept = [message for message in messages if message[0] == "start"]
            messages.clear()
            messages.extend(kept)
        self.world.mail.append((self, LineRefused("as planned")))


class World:
    """Where the processes of a fleet come from, and its mailbox.

    Args:
        num_workers: each in a process of its own.
        journals: of the workers.
        forks: the processes are made when they are first told something, and tell neither that they have started nor,
            more than once, that they have ended. Others run before they are told anything.

    Attributes:
        mail: what the processes have sent, and the engine has not received.
        works: whether a wait lets processes work; otherwise only the test does.
        random: which of them then works; None: the first that can.
        batch: makes a batch, from worker_id, epoch, position of the worker's random stream, and indices.
        length: batches of a worker's stream, for iterable datasets.
        outcome: the result of a task that gives no batch.
        news: fields of every `Answer`.
        slice: how many batches are rebuilt for one answer.
        snapshot_every: after how many batches a worker sends a snapshot.
        rebuilt: the tasks of all batches that were built again.
        new_runs: whether processes that replace others run at once.
        stillborn: how many of the next ones cannot start.
        hopeless: the error of processes that wait for a place in vain.
        killed: processes.
    """

    length: Callable[[int], int] | None = None
    random: random.Random | None = None
    hopeless: Exception | None = None
    works = new_runs = True
    slice, snapshot_every, stillborn = 1000, 3, 0
    came = False  # a process runs by now
    uses_store = copies = False
    leased_bytes = rung = read_count = _idle = 0

    def __init__(self, num_workers: int, journals: list[Journal], *, forks: bool) -> None:
        self.forks, self.clock = forks, Clock()
        self.mail: list[tuple[Process, Any]] = []
        self.batch: Callable[..., Any] = lambda *place, indices: [*place, *indices]
        self.outcome: Callable[[int], Answer | None] = lambda task_id: None
        self.news: dict[str, Any] = {}
        self.rebuilt: list[int] = []
        self.killed: list[Process] = []
        self._open: set[Process] = set()
        self._changed = threading.Condition()
        with mock.patch.object(fleet_module, "Mailbox", return_value=self):
            self.fleet = Fleet(self)  # type: ignore[arg-type]
        with mock.patch.object(fleet_module, "time", self.clock):
            self.fleet.lend(num_workers)
            setups: list[Any] = [SimpleNamespace(worker_id=n, shared_seed=None) for n in range(num_workers)]
            self.fleet.begin(setups, journals)

    @property
    def hosts(self) -> list[Process]:
        return self.fleet.hosts

    @property
    def workers(self) -> list[Worker]:
        return self.fleet.workers

    # ---- where processes come from

    def check(self) -> None:
        pass

    def lend(self, count: int, *, fresh: bool) -> list[Process]:
        lent = [Process(self, runs=self.new_runs, cannot_start=n < self.stillborn) for n in range(count)]
        self.stillborn = max(0, self.stillborn - count)
        return lent

    def watch_start(self, process: Process, mailbox: object) -> None:
        pass

    def kill(self, process: Process) -> None:
        process.ends()
        self.killed.append(process)

    def channel(self, process: Process, mailbox: object) -> Process:
        return process

    def sources(self, others: object) -> Callable[[Process], None]:
        return lambda process: None

    def refused(self, process: Process, reason: str) -> None:
        process.is_deaf = False

    def check_pending(self, pending: object, of: int) -> None:
        if self.hopeless is not None:
            raise self.hopeless

    # ---- messages

    def __contains__(self, process: Process) -> bool:
        return process in self._open

    def add(self, process: Process) -> None:
        self._open.add(process)

    def remove(self, process: Process) -> None:
        self._open.discard(process)

    def to(self, process: Process) -> Process:
        assert process in self, "a call to a process that is gone"
        return process

    def flush(self) -> None:
        for process in self.hosts:
            process.flush()

    def wait(self, timeout: float) -> bool:
        assert not [process for process in self.hosts if process.queue], "tasks were held back while somebody waits"
        able = [process for process in self.hosts if process.can_work]
        if not self.mail and self.works and able:
            (self.random.choice(able) if self.random is not None else able[0]).work()
        if self.mail or self.came:
            self.came, self._idle = False, 0
            return True
        if threading.current_thread() is not threading.main_thread():
            with self._changed:
                self._changed.wait(min(timeout, 0.01))
            return False
        self._idle += 1
        assert self._idle < STANDSTILL, "nobody has anything to do"
        self.clock.now += timeout
        return False

    @property
    def has_news(self) -> bool:
        return bool(self.mail)

    def read(self) -> None:
        self.read_count += 1

    def receive(self, *, also: Process | None = None, was_read: bool = False) -> list[tuple[Process, Any]]:
        mail, self.mail = self.mail, []
        return mail

    def ring(self) -> None:
        self.rung += 1

    def lane(self, process: Process) -> str:
        return "line"


class Epoch:
    """An epoch of `length` batches, and what its user does.

    Args:
        before: the epoch before it, of the same workers.
        meanwhile: called at each moment between that one and this.
        schedule_class: of which its schedule is.
        options: of its loader, and of that of the epochs after it.
    """

    def __init__(
        self,
        num_workers: int = 2,
        length: int = 12,
        *,
        iterable: bool = False,
        sampler: Any = None,
        pin: Any = None,
        before: Epoch | None = None,
        forks: bool = False,
        skips: tuple[int, ...] = (),
        meanwhile: Callable[[], object] = lambda: None,
        schedule_class: type[Schedule] = Schedule,
        **options: Any,
    ) -> None:
        self.before, self.got, self.drawn = before, [], 0
        if before is None:
            data: Any = ChainDataset([]) if iterable else range(length)
            self.loader = DataLoader(data, 1, num_workers=1, **options)
            self.position = Position(Samplers(self.loader), 7, num_workers, iterable=iterable)
            self.position.begins(False)
            self.world = World(num_workers, self.position.journals, forks=forks)
        else:
            self.loader, self.position, self.world = before.loader, before.position, before.world
        self.options = Options.of(self.loader)
        if before is not None:
            self._follow(before, meanwhile)
        self.position.skips = SkipSteps([(self.position.epoch_of_run, step) for step in skips])
        self.schedule = schedule_class(
            num_workers,
            self.options.prefetch_factor,
            in_order=self.options.in_order,
            dynamic=self.options.dynamic,
            max_restarts=self.options.max_worker_restarts,
        )
        self.tally = Tally(num_workers, self.options.prefetch_factor)
        self.engine = Engine(
            self.world.fleet,
            self.schedule,
            map(self._note_draw, iter(self.loader._index_sampler if sampler is None else sampler)),
            self.options,
            position=self.position,
            delivery=PinOrMove(pin, ahead=PINNED_AHEAD),
            tally=self.tally,
        )

    def _note_draw(self, indices: Any) -> Any:
        self.drawn += 1
        return indices

    def process(self, worker_id: int) -> Process:
        """Of a worker."""
        host: Any = self.world.workers[worker_id].host
        return host

    def _follow(self, before: Epoch, meanwhile: Callable[[], object]) -> None:
        """The workers of an epoch are told that another begins, as by `EpochIterator`."""
        before.engine.close(resuming=True)
        meanwhile()
        self.position.begins(True)
        for worker in self.world.workers:
            resumed = Resumed(self.position.begin.epoch, None)
            worker.journal.begins(resumed)
            if not worker.away:
                worker.resume(resumed)
        meanwhile()

    def open(self) -> Epoch:
        self.engine.open(fresh=self.before is None)
        return self

    def take(self) -> Any:
        """The next batch, as `EpochIterator` takes it; `StopIteration` after the last."""
        task = self.engine.next()
        if task is None:
            raise StopIteration
        batch, task.data = task.data, None
        self.position.handed = task
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()
        self.got.append(batch)
        return batch

    def take_all(self) -> list[Any]:
        while True:
            try:
                self.take()
            except StopIteration:
                return self.got

    def work(self, worker_id: int) -> None:
        """A worker's process sends one answer, which arrives."""
        self.engine.flush()
        self.process(worker_id).work()
        self.hear()

    def hear(self) -> None:
        """What was sent arrives."""
        self.engine._take()

    def await_one(self) -> None:
        """As `next` does while there is no batch."""
        self.engine._await(LOOK_S)

    def check(self) -> None:
        """What must hold at any time: the schedule's rules, and that the journals say what the schedule says."""
        check_rules(self.schedule)
        assert not self.engine.broken
        if self.schedule.closed or self.engine.failure is not None:
            return
        for worker in self.world.workers:
            mine = [task for task in self.schedule.tasks if task.worker_id == worker.worker_id]
            owed = [task.task_id for task in mine if task.state in (OUTSTANDING, LOST)]
            entries = worker.journal.tasks
            assert [task.task_id for task in entries if task.digest is None] == owed
            assert [task.task_id for task in entries] == sorted(task.task_id for task in entries)

    def close(self) -> None:
        """Twice, which does no harm, and wakes whoever waits."""
        rung = self.world.rung
        self.engine.close()
        self.engine.close()
        assert self.world.rung == rung + 2


def expected(length: int, num_workers: int = 2, *, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """The batches of an epoch that nothing disturbs; `first`: of each worker's random stream."""
    return [[n % num_workers, epoch, first + n // num_workers, n] for n in range(length)]


def check_rules(schedule: Schedule) -> None:
    """Asserts what must hold of a schedule between any two events."""
    tasks = schedule.tasks
    of_any = [task for task in tasks if not task.is_assigned]
    undelivered = [task for task in tasks if task.state is not DELIVERED]  # not by `head`, which changes `_head_id`
    checks = {
        "task ids ascend": list(schedule._tasks) == sorted(schedule._tasks),
        "what is GONE is not in the table": all(task.state is not GONE for task in tasks),
        "the queue holds what no worker has": list(schedule._queued) == of_any,
        "what no worker has is QUEUED": all(task.state is QUEUED for task in of_any),
        "only a dynamic schedule has a queue": schedule.dynamic or not of_any,
        "who may be given what queues has it": not schedule._queued or schedule._freest() is None,
        "what is DELIVERED is deliverable": sorted(task.task_id for task in schedule.deliverable)
        == [task.task_id for task in tasks if task.state is DELIVERED],
        "no undelivered task is below the head": all(task.task_id >= schedule._head_id for task in undelivered),
        "in order, what is READY waits for the head": not schedule.in_order
        or not undelivered
        or undelivered[0].state is not READY,
        "what is READY is counted": schedule.early == sum(task.state is READY for task in tasks),
        "draws are owed, or none": schedule.owed_draws >= 0,
        "what is closed holds nothing": not schedule.closed or not (tasks or schedule.owed_draws),
        "the table fits the window": len(tasks) + schedule.owed_draws <= schedule.window
        or schedule._sampler_exhausted
        # An exhausted worker's places are dropped, although its tasks may still wait for the head.
        or not all(worker.active for worker in schedule._workers),
        "active workers are counted": schedule._num_active == sum(worker.active for worker in schedule._workers),
    }
    for worker_id, worker in enumerate(schedule._workers):
        mine = [task for task in tasks if task.worker_id == worker_id]
        checks[f"worker {worker_id} holds its tasks"] = worker.held == len(mine)
        unanswered = {task.task_id for task in mine if task.state is OUTSTANDING}
        checks[f"worker {worker_id} owes what is OUTSTANDING"] = unanswered == {
            task.task_id for task in worker.unanswered
        }
        waiting = [task for task in mine if task.state in (QUEUED, LOST)]
        checks[f"worker {worker_id} waits for what is QUEUED or LOST"] = list(worker.waiting) == waiting
        checks[f"worker {worker_id} is given what it may be"] = not (worker.waiting and worker.ready)
        checks[f"worker {worker_id} without a process has nothing"] = worker.ready or not worker.unanswered
    for rule, holds in checks.items():
        assert holds, f"the schedule has broken a rule of its own: {rule}; {schedule._history()}"
