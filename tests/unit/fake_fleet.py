"""A fleet for the engine's tests: worker processes that do their work when a test says so; no Ray, no waiting.

What a process builds depends on everything that it built before, as if each batch drew one number from its worker's
random stream: a worker that is not restored exactly builds other batches, and a batch that is rebuilt is compared with
its digest, as real workers do. Messages reach a process once the fleet is flushed.
"""

from __future__ import annotations

import itertools
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from rayloader.errors import RaySessionError
from rayloader.protocol import Answer, ResultKind, Up, WorkerAddress, pack_spent
from rayloader.resume.journal import Journal, Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport import codec
from rayloader.transport.lanes import to_wire
from rayloader.workers.connection import LineRefused, ProcessLost
from rayloader.workers.fleet import Worker

# Waits in a row in which nothing can happen: after so many the test fails, instead of hanging.
STANDSTILL = 500


class Clock:
    """Stands for the module `time`: it moves only when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@dataclass
class Setup:
    """The part of the real one that `Worker` looks at."""

    worker_id: int
    shared_seed: int | None = None


@dataclass
class Hosted:
    """The worker that a process is; `position` is that of its random stream."""

    worker_id: int
    epoch: int = 0
    tasks: int = 0
    last_task: int = -1
    position: int = 0
    rebuilt: int = 0
    to_rebuild: int = 0
    left: deque[Task] = field(default_factory=deque)  # to be rebuilt

    @property
    def state(self) -> WorkerState:
        return WorkerState(self.epoch, self.tasks, self.last_task, digest=self.position)


class Process:
    """A worker process: stands for a `Process`, its channel and its arena. Tests call what these do not have."""

    kind = "fork"

    def __init__(self, fleet: FakeFleet, *, runs: bool = True) -> None:
        self.fleet = fleet
        self.number = next(fleet.numbers)
        self.lane = self
        self.calls = 0
        self.lost = False
        self.created_at = 0.0
        self.started_at: float | None = None
        self.address: WorkerAddress | None = None
        self.cannot_start = False
        self.is_dead = False  # though the driver may not know
        self.is_deaf = False  # nothing arrives over its channel any more
        self.runs = runs
        self.worker_id = -1  # of the worker that it is, or will be
        self._hosted: Hosted | None = None
        self.queue: list[tuple[Any, ...]] = []  # not flushed
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.exits_at: set[tuple[int, int]] = set()  # epochs and tasks that end it, each once
        self.has_exited = False  # it goes on until it is killed; nothing that it builds counts
        self.full = 0  # answers that said that the arena was full
        self.refusals: list[str] = []
        if runs and not fleet.forks:
            self.comes()

    def __repr__(self) -> str:
        return f"process {self.number}"

    def comes(self) -> None:
        """It runs from now on."""
        self.address = WorkerAddress(1000 + self.number, f"node{self.number}", "host", True, "machine")
        self.started_at = self.fleet.clock.now
        self.fleet.came = True

    def has_started(self) -> bool:
        return self.address is not None

    @property
    def hosted(self) -> Hosted:
        assert self._hosted is not None
        return self._hosted

    @property
    def tells_start(self) -> bool:
        return not self.fleet.forks

    @property
    def may_come(self) -> bool:
        """It does not run yet; a fork is made only when there is something to tell it."""
        return self.address is None and (bool(self.inbox) or not self.fleet.forks)

    def cause(self, error: Exception | None) -> str:
        return str(error)

    # ---- as a channel

    def _tell(self, kind: str, *content: Any) -> None:
        self.queue.append((kind, self.calls, *content))

    def flush(self) -> None:
        if self.is_deaf:
            self.queue = [message for message in self.queue if message[0] == "start"]
        if not self.is_dead:
            self.inbox.extend(self.queue)
        elif self.queue and not self.lost and not self.fleet.forks:
            self._tell_of_end()  # a call to a process that is dead fails, also after the news of its end
        self.queue = []
        if self.may_come and self.runs and self.fleet.forks and not self.is_dead:
            self.comes()

    def start(self, source: object, setup: Setup, state: WorkerState | None) -> Any:
        answer = SimpleNamespace(succeeded=False)
        assert setup.worker_id == self.worker_id
        self._tell("start", setup.worker_id, state, answer)
        if not self.fleet.forks:  # a call of its own
            self.flush()
        return answer

    def run(self, task: Task) -> None:
        self.calls += 1
        self._tell("run", task.task_id, task.indices.indices)

    def rebuild(self, tasks: Sequence[Task]) -> None:
        self.calls += 1
        again = [(task.task_id, task.indices.indices, task.digest) for task in tasks]
        self._tell("rebuild", again)

    def resume(self, resumed: Resumed) -> None:
        self.calls += 1
        self._tell("resume", resumed)

    def was_full(self) -> None:
        self.full += 1

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    # ---- at work

    @property
    def can_work(self) -> bool:
        return self.address is not None and bool(self.inbox)

    def work(self, count: int = 1) -> int:
        """Carries out calls until it has sent so many answers; returns how many it has sent."""
        sent = 0
        while sent < count and self.can_work:
            sent += self.step()
        return sent

    def step(self) -> bool:
        """Carries out one call; returns whether it has sent an answer."""
        kind, call, *content = self.inbox.popleft()
        answer = getattr(self, f"_do_{kind}")(call, *content)
        if answer is not None:
            self.fleet.mail.append((self, answer))
        return answer is not None

    def _do_start(self, call: int, worker_id: int, state: WorkerState | None, answer: Any) -> None:
        self._hosted = hosted = Hosted(worker_id)
        if state is not None:
            hosted.epoch, hosted.tasks, hosted.last_task = state.epoch, state.tasks, state.last_task
            hosted.position = state.digest
        answer.succeeded = True

    def _do_run(self, call: int, task_id: int, indices: Any) -> tuple[Any, ...] | None:
        hosted = self.hosted
        while hosted.left:
            if (ends := self._rebuild(hosted, *hosted.left.popleft())) is not None:
                ends.task_id = task_id
                return Up.ANSWER, call, self._answer(hosted, ends).fields
        return Up.ANSWER, call, self._answer(hosted, self._build(hosted, task_id, indices)).fields

    def _build(self, hosted: Hosted, task_id: int, indices: Any) -> Answer:
        if (hosted.epoch, task_id) in self.exits_at:
            self.exits_at.discard((hosted.epoch, task_id))
            self.has_exited = True
            return Answer(task_id, ResultKind.EXITED, text=f"SystemExit in batch {task_id}")
        fleet = self.fleet
        if fleet.length is not None and hosted.tasks >= fleet.length(hosted.worker_id):
            return Answer(task_id, ResultKind.EXHAUSTED)
        hosted.tasks, hosted.last_task = hosted.tasks + 1, task_id
        if (kind := fleet.outcome(task_id)) is not None:
            hosted.position += 1
            return kind
        batch = fleet.batch(hosted.worker_id, hosted.epoch, hosted.position, indices=indices)
        hosted.position += 1
        digest = zlib.crc32(repr(batch).encode())
        return Answer(
            task_id,
            ResultKind.BATCH,
            tuple(to_wire(codec.encode(batch))),
            "",
            1000,
            digest=digest,
            samples=1,
        )

    def _answer(self, hosted: Hosted, outcome: Answer | None) -> Answer:
        answer = outcome or Answer(-1, ResultKind.REBUILT)
        ended = answer.kind == ResultKind.EXHAUSTED
        if ended or (answer.kind == ResultKind.BATCH and hosted.tasks % self.fleet.snapshot_every == 0):
            answer.state = tuple(hosted.state._replace(exhausted=ended))
        answer.seconds = 1.0
        answer.spent = pack_spent(hosted.worker_id, 0.0, 0.0, 0.0, 0.0, 0.0)
        answer.rebuilt = hosted.rebuilt, hosted.to_rebuild
        return replace(answer, **self.fleet.news)

    def _do_rebuild(self, call: int, again: list[Any]) -> tuple[Any, ...]:
        hosted = self.hosted
        hosted.left.extend((call, *task) for task in again)
        hosted.to_rebuild += len(again)
        ends = None
        for _ in range(min(self.fleet.slice, len(hosted.left))):
            ends = ends or self._rebuild(hosted, *hosted.left.popleft())
        return Up.ANSWER, call, self._answer(hosted, ends).fields

    def _rebuild(self, hosted: Hosted, call: int, task_id: int, indices: Any, digest: int | None) -> Answer | None:
        """Returns a result that ends the process."""
        hosted.rebuilt += 1
        result = self._build(hosted, task_id, indices)
        if result.kind == ResultKind.EXITED:
            return result
        assert self.has_exited or digest in (None, result.digest), f"batch {task_id} was not rebuilt as it was"
        self.fleet.rebuilt.append((hosted.worker_id, task_id))
        return None

    def _do_resume(self, call: int, resumed: Resumed) -> tuple[Any, ...] | None:
        hosted = self.hosted
        for again in [*hosted.left]:
            if self._rebuild(hosted, *again) is not None:
                self.dies()
                return None
        hosted.left.clear()
        hosted.epoch, hosted.tasks, hosted.last_task = resumed.epoch, 0, -1
        return Up.BEGUN, call, tuple(hosted.state)

    # ---- ends

    def dies(self) -> None:
        """What it has sent so far arrives, and then its end; that of a fork which has not come is only found out."""
        self.is_dead = True
        self.queue.clear()
        self.inbox.clear()
        if not self.fleet.forks or self.address is not None:
            self._tell_of_end()

    def _tell_of_end(self) -> None:
        self.fleet.mail.append((self, ProcessLost(self, RuntimeError("as planned"))))  # type: ignore[arg-type]

    def refuses_line(self) -> None:
        """What was told over the channel is lost; calls that do not need one arrive all the same."""
        self.is_deaf = True
        for messages in (self.queue, self.inbox):
            kept = [message for message in messages if message[0] == "start"]
            messages.clear()
            messages.extend(kept)
        self.fleet.mail.append((self, LineRefused("as planned")))


class FakeFleet:
    """Stands for a `Fleet`, its processes, and the mailbox of its workers, which are real.

    Args:
        num_workers: each in a process of its own.
        journals: of the workers.

    Attributes:
        mail: what the processes have sent, and the engine has not received.
        works: whether a wait lets processes work; otherwise only the test does.
        batch: makes a batch, from worker_id, epoch, position of the worker's random stream, and indices.
        length: batches of a worker's stream, for iterable datasets.
        outcome: the result of a task that gives no batch.
        news: fields of every `Answer`.
        slice: how many batches are rebuilt for one answer.
        snapshot_every: after how many batches a worker sends a snapshot.
        forks: the processes are made when they are first told something, and tell neither that they have started nor,
            more than once, that they have ended. Others run before they are told anything.
        rebuilt: worker and task of every batch that was built again.
        new_runs: whether processes that replace others run at once.
        stillborn: how many of the next ones cannot start.
        hopeless: the error of processes that wait for a place in vain.
        killed: processes.
        ended: why the fleet cannot be used any more.
    """

    def __init__(self, num_workers: int, journals: list[Journal], *, forks: bool = False) -> None:
        self.forks = forks
        self.clock = Clock()
        self.came = False  # a process runs by now
        self.numbers = itertools.count()
        self.mail: list[tuple[Process, Any]] = []
        self.works = True
        self.random: random.Random | None = None
        self.batch: Callable[..., Any] = lambda *place, indices: [*place, *indices]
        self.length: Callable[[int], int] | None = None
        self.outcome: Callable[[int], Answer | None] = lambda task_id: None
        self.news: dict[str, Any] = {}
        self.slice = 1000
        self.snapshot_every = 3
        self.rebuilt: list[tuple[int, int]] = []
        self.new_runs = True
        self.stillborn = 0
        self.hopeless: Exception | None = None
        self.killed: list[Process] = []
        self.ended: str = ""
        self.uses_store = self.copies = False
        self.leased_bytes = 0
        self.rung = self.read_count = 0
        self._idle = 0
        self._changed = threading.Condition()
        self.hosts = [Process(self) for _ in range(num_workers)]
        everything: Any = self
        self.mailbox = self.processes = everything
        self.workers = [
            Worker(Setup(n), journals[n], self.hosts[n], everything)  # type: ignore[arg-type]
            for n in range(num_workers)
        ]
        self.revive()

    def process(self, worker_id: int) -> Process:
        """Of a worker."""
        host: Any = self.workers[worker_id].host
        return host

    # ---- the mailbox's

    def __contains__(self, process: Process) -> bool:
        return not process.lost

    def to(self, process: Process) -> Process:
        assert not process.lost, "a call to a process that is gone"
        return process

    # ---- messages

    def check_session(self) -> None:
        if self.ended:
            raise RaySessionError(self.ended)

    def flush(self) -> None:
        for process in self.hosts:
            process.flush()

    def wait(self, timeout: float) -> bool:
        self.check_session()
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
        self.check_session()
        mail, self.mail = self.mail, []
        return mail

    def ring(self) -> None:
        self.rung += 1

    @property
    def awaited(self) -> list[Process]:
        hosts: list[Any] = [worker.host for worker in self.workers if worker.away and not worker.host.lost]
        return [host for host in hosts if host.tells_start]

    def lane(self, process: Process) -> str:
        return "line"

    def address(self, worker: Worker) -> WorkerAddress | None:
        return worker.host.address

    def fall_back(self, worker: Worker, reason: str) -> None:
        host: Any = worker.host
        host.is_deaf, worker.away = False, True

    # ---- workers

    def revive(self) -> list[Worker]:
        ready = []
        for worker in self.workers:
            host: Any = worker.host
            if worker.away and not host.lost:
                if host.cannot_start:
                    raise ProcessLost(host, RuntimeError("as planned"))
                if host.address is not None or self.forks:
                    worker.begin(None)
                    worker.begun_at = self.clock.now
                    ready.append(worker)
        return ready

    def worker_of(self, process: Process) -> Worker | None:
        worker = self.workers[process.worker_id]
        return worker if self.process(process.worker_id) is process else None

    def lose(self, process: Process) -> None:
        if not process.lost and (worker := self.worker_of(process)) is not None:
            process.lost = process.is_dead = worker.away = True
            process.queue.clear()
            process.inbox.clear()
            self.killed.append(process)

    def replace(self, worker: Worker) -> bool:
        if not worker.host.lost:
            return False
        process = Process(self, runs=self.new_runs)
        process.cannot_start, self.stillborn = self.stillborn > 0, max(0, self.stillborn - 1)
        worker.continues_on(process)  # type: ignore[arg-type]
        self.hosts = [self.process(worker.worker_id) for worker in self.workers]
        return True

    def check_started(self) -> None:
        for process in self.hosts:
            if process.is_dead and process.address is None and not process.lost:
                raise ProcessLost(process, RuntimeError("as planned"))  # type: ignore[arg-type]
        if self.hopeless is not None:
            raise self.hopeless
