"""The workers of one iterator, each with a process of its own: begun, lost, replaced, ended.

Promise: each method checks that the processes can still be used before it calls Ray, and raises `RaySessionError` if
not; errors about a lost process, node or object arrive as `ProcessLost`. A worker that has lost its process is *away*
until it is begun again, on a process that knows what its journal says. `release` gives the processes back.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rayloader.errors import RaySessionError
from rayloader.protocol import Setup, WorkerAddress
from rayloader.resume.journal import Journal, Resumed
from rayloader.task import Task
from rayloader.workers.connection import Mailbox, Message, NeverStarts, Process, Processes, ProcessLost, Started
from rayloader.workers.janitor import janitor

if TYPE_CHECKING:
    from rayloader.gpu.device import Accelerator


@dataclass(slots=True)
class Rebuilding:
    """What a restored worker builds again, before it is given anything else."""

    call: int  # the newest, of its process
    began: float | None = None  # time.monotonic() of its first answer
    first: int = 0  # batches that had been built by then
    news_at: float = math.inf  # time.monotonic(): when to report its progress


@dataclass(eq=False, slots=True)
class Worker:
    """One worker, wherever it runs at the moment.

    Attributes:
        setup: sent to it when it starts.
        journal: its last snapshot, and the tasks since then; the iterator's position has it too.
        host: the process that is, or will be, this worker; no other worker has it.
        mailbox: of its fleet.
        worker_id: from 0 on, torch's.
        away: its host has not been told yet that it is this worker.
        started: the answer to `Channel.start`.
        begun_at: when its host was told that it is this worker, time.monotonic().
        rebuilding: the rebuilding in progress, if any.
        unanswered: the tasks that it was given and has not answered, oldest first; the schedule's record of them.
    """

    setup: Setup
    journal: Journal
    host: Process
    mailbox: Mailbox
    worker_id: int = field(init=False)
    away: bool = field(init=False)
    started: Started | None = None
    begun_at: float = 0.0
    rebuilding: Rebuilding | None = None
    unanswered: Sequence[Task] = ()

    def __post_init__(self) -> None:
        self.worker_id = self.setup.worker_id
        self.continues_on(self.host)

    def begin(self, source: Any) -> None:
        """Tells its host that it is this worker, and from where to open its replica; see `Processes.sources`.

        It then is where its journal's state is.
        """
        setup, journal = self.setup, self.journal
        if journal.shared_seed is not None:
            setup = replace(setup, shared_seed=journal.shared_seed)
        self.started = self.mailbox.to(self.host).start(source, setup, journal.state)
        self.begun_at = time.monotonic()
        self.away = False

    def give(self, task: Task) -> None:
        """Lets it build a task's batch."""
        task.lent = self.mailbox.to(self.host).run(task)
        task.call = self.host.calls

    def rebuild(self, tasks: Sequence[Task]) -> int:
        """Lets it build batches again; without tasks it continues with those that it was given before.

        Returns:
            The number of the call.
        """
        self.mailbox.to(self.host).rebuild(tasks)
        return self.host.calls

    def resume(self, resumed: Resumed) -> None:
        """Lets it begin another epoch; its journal is updated when it has."""
        self.mailbox.to(self.host).resume(resumed)
        self.journal.resumed = self.host, self.host.calls

    def continues_on(self, host: Process) -> None:
        """This process is the worker, once it is told so."""
        self.host, self.away = host, True
        host.worker_id = self.worker_id

    @property
    def has_begun(self) -> bool:
        """Whether it has finished its start, and begun the epoch."""
        return self.started is not None and self.started.succeeded and self.journal.begun


class Fleet:
    """The workers of one iterator, and the processes that it owns until `release`.

    Args:
        processes: where they come from.
        accelerator: for which the memory of batches is page-locked.

    Attributes:
        processes: as above.
        mailbox: the channels to the processes.
        hosts: the processes, in the order in which they were lent.
        workers: by worker id.
    """

    def __init__(self, processes: Processes, accelerator: Accelerator | None = None) -> None:
        self.processes = processes
        self._accelerator = accelerator
        self._released = False
        self._pid = os.getpid()
        self.mailbox = Mailbox(janitor.later)  # whose thread ends what finalizers leave behind
        self.hosts: list[Any] = []
        self.workers: list[Worker] = []

    # ---- the loan of processes

    @property
    def usable(self) -> bool:
        """Whether the processes are still this fleet's and can be called."""
        try:
            self.processes.check()
        except RaySessionError:
            return False
        return not self._released

    def check_session(self) -> None:
        """Raises RaySessionError unless the fleet is usable."""
        if os.getpid() != self._pid:
            raise RaySessionError(
                "an iterator works in the process that made it, and this one was forked from it; "
                "load with num_workers=0 here, or start this process with the spawn method"
            )
        if self._released:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        self.processes.check()

    def lend(self, count: int, *, fresh: bool = True) -> None:
        """Adds `count` processes; does not wait until new ones run. `fresh`: none that has worked before."""
        self.hosts = self.hosts + self._lend(count, fresh=fresh)

    def _lend(self, count: int, *, fresh: bool) -> list[Any]:
        self.check_session()
        lent = self.processes.lend(count, fresh=fresh)
        for process in lent:
            self.processes.watch_start(process, self.mailbox)
        return lent

    def release(self, *, busy: bool, reuse: bool = True) -> None:
        """Gives the processes back; callable more than once. Not for finalizers.

        After an interrupt within, the next call goes on.

        Args:
            busy: calls may be unanswered.
            reuse: whether others may have the processes.
        """
        if os.getpid() != self._pid:
            return
        self._released = True
        self.mailbox.close()
        self.processes.release(busy=busy, reuse=reuse)

    # ---- messages

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; False if nothing has."""
        self.check_session()
        return self.mailbox.wait(timeout)

    def receive(self, *, also: Process | None = None, was_read: bool = False) -> list[tuple[Process, Message]]:
        """`Mailbox.receive`."""
        self.check_session()
        arrived = self.mailbox.receive(also=also, was_read=was_read)
        if ProcessLost in [type(message) for _, message in arrived]:
            self.check_session()  # Ray's shutdown is not the worker's fault
        return arrived

    @property
    def awaited(self) -> list[Process]:
        """The processes whose start is awaited: workers that are away will begin there."""
        away = [worker.host for worker in self.workers if worker.away]
        return [process for process in away if process.tells_start and not process.lost]

    @property
    def leased_bytes(self) -> int:
        """Bytes of memory in which batches lie, including the user's. Any thread may ask."""
        return self.processes.leased_bytes + sum(int(process.lane.leased_bytes) for process in self.hosts)

    def address(self, worker: Worker) -> WorkerAddress | None:
        """Where a worker runs; None if it does not run, or if that is no longer known."""
        if self.usable:
            with contextlib.suppress(NeverStarts):
                worker.host.has_started()
        return worker.host.address

    def fall_back(self, worker: Worker, reason: str) -> None:
        """Replaces the line to a worker's process with Ray calls; the worker must be begun again, and is away now."""
        self.processes.refused(worker.host, reason)
        self.mailbox.remove(worker.host)
        worker.away = True

    # ---- workers begin

    def begin(self, setups: list[Setup], journals: list[Journal]) -> None:
        """Tells the processes that run which workers they are; the others' workers are away until they run."""
        self.check_session()
        self.workers = [
            Worker(setup, journal, process, self.mailbox)
            for setup, journal, process in zip(setups, journals, self.hosts, strict=True)
        ]
        self._begin(self._ready)

    def revive(self) -> list[Worker]:
        """Begins the workers that are away and have a host by now; the epoch must then repeat their journals' calls.

        Raises:
            ProcessLost: a host could not be started.
        """
        if not [worker for worker in self.workers if worker.away]:
            return []
        self.check_session()
        self._note_starts()
        ready = self._ready
        self._begin(ready)
        return ready

    @property
    def _ready(self) -> list[Worker]:
        """The workers that are away, and whose hosts can be told so."""
        away = [worker for worker in self.workers if worker.away and not worker.host.lost]
        return [worker for worker in away if worker.host.address is not None or not worker.host.tells_start]

    def _begin(self, workers: list[Worker]) -> None:
        source_of = self.processes.sources(self.hosts)
        for worker in workers:
            source = source_of(worker.host)
            if worker.host not in self.mailbox:
                worker.host.lane.accelerator = self._accelerator
                self.mailbox.add(self.processes.channel(worker.host, self.mailbox))
            worker.begin(source)

    # ---- which process is each worker

    def worker_of(self, process: Process) -> Worker | None:
        """The worker that a process is; None if another one is by now."""
        worker = self.workers[process.worker_id]
        return worker if worker.host is process else None

    def lose(self, process: Process) -> None:
        """Kills a process that is dead or not to be trusted any more, and gives up what it shares with this process."""
        if not process.lost and (worker := self.worker_of(process)) is not None:
            process.lost = worker.away = True
            self.mailbox.remove(process)
            self.processes.kill(process)

    def replace(self, worker: Worker) -> bool:
        """Gives a worker whose process is dead another one; False if it lives."""
        if not worker.host.lost:
            return False
        (another,) = self._lend(1, fresh=True)  # idle ones may be just as dead
        worker.continues_on(another)
        self.hosts = [one.host for one in self.workers]
        return True

    def check_started(self) -> None:
        """Notes which processes run by now, and makes sure that no worker waits for one for too long.

        Raises:
            WorkerStartError: one has found no place, or does not start there.
            ProcessLost: one could not be started.
        """
        self.check_session()
        if pending := self._note_starts():
            self.processes.check_pending(pending, len(self.hosts))

    def _note_starts(self) -> list[Any]:
        """Notes which processes run by now; returns those that do not.

        Raises:
            ProcessLost: one could not be started.
        """
        pending = []
        for process in self.hosts:
            if process.lost:
                continue
            try:
                if not process.has_started():
                    pending.append(process)
            except NeverStarts as error:
                self.check_session()
                raise ProcessLost(process, error) from error
        return pending
