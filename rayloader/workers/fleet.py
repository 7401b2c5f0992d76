"""The workers of one iterator, and the processes that host them: begun, lost, replaced, moved, ended.

Promise: each method checks that the processes can still be used before it calls Ray, and raises `RaySessionError` if
not; errors about a lost process, node or object arrive as `ProcessLost`. A worker that has lost its process, or is to
move to another, is *away* until it is begun again, on a process that knows what its journal says. Processes that host
others' workers, until these have processes of their own, give them up when those processes have come. `release` gives
the processes back.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rayloader.errors import RaySessionError
from rayloader.protocol import Setup, WorkerAddress
from rayloader.resume.journal import Journal, Resumed
from rayloader.task import Task
from rayloader.workers.connection import Mailbox, Message, NeverStarts, Process, ProcessLost, Started
from rayloader.workers.janitor import janitor
from rayloader.workers.processes import Processes

if TYPE_CHECKING:
    from rayloader.gpu.device import Accelerator

# How many replacement processes may fail to start before the helping processes keep the work.
MOST_FAILED_STARTS = 3


@dataclass(slots=True)
class Rebuilding:
    """What a restored worker builds again, before it is given anything else."""

    call: int  # the newest, of its process
    began: float | None = None  # time.monotonic() of its first answer
    first: int = 0  # batches that had been built by then
    news_at: float = math.inf  # time.monotonic(): when to report its progress


class Worker:
    """One worker, wherever it runs at the moment.

    Attributes:
        worker_id: from 0 on, torch's.
        setup: sent to it when it starts.
        journal: its last snapshot, and the tasks since then; the iterator's position has it too.
        host: the process that is, or will be, this worker.
        away: its host has not been told yet that it is this worker.
        started: the answer to `Channel.start`.
        begun_at: when its host was told that it is this worker, time.monotonic().
        rebuilding: the rebuilding in progress, if any.
        dropped: of the epoch that was closed, its first task that is not wanted any more, if any.
        unanswered: the tasks that it was given and has not answered, oldest first; the schedule's record of them.
    """

    __slots__ = (
        "_after_call",
        "_mailbox",
        "away",
        "begun_at",
        "dropped",
        "host",
        "journal",
        "rebuilding",
        "setup",
        "started",
        "unanswered",
        "worker_id",
    )

    def __init__(self, setup: Setup, journal: Journal, host: Process, mailbox: Mailbox) -> None:
        self.worker_id = setup.worker_id
        self.setup = setup
        self.journal = journal
        self.host = host
        self._mailbox = mailbox
        self.away = True
        self.started: Started | None = None
        self.begun_at = 0.0
        self.rebuilding: Rebuilding | None = None
        self.dropped: int | None = None
        self.unanswered: Sequence[Task] = ()
        self._after_call = 0  # of its host: later ones are of its current epoch

    def begin(self, source: Any) -> None:
        """Tells its host that it is this worker, and from where to open its replica; see `Processes.sources`.

        It then is where its journal's state is.
        """
        setup, journal = self.setup, self.journal
        if journal.shared_seed is not None:
            setup = replace(setup, shared_seed=journal.shared_seed)
        self.started = self._mailbox.to(self.host).start(source, setup, journal.state)
        self._after_call = self.host.calls
        self.begun_at = time.monotonic()
        self.away = False

    def give(self, task: Task) -> None:
        """Lets it build a task's batch."""
        task.lent = self._mailbox.to(self.host).run(self.worker_id, task)
        task.call = self.host.calls

    def rebuild(self, tasks: Sequence[Task]) -> int:
        """Lets it build batches again; without tasks it continues with those that it was given before.

        Returns:
            The number of the call.
        """
        self._mailbox.to(self.host).replay(self.worker_id, tasks)
        return self.host.calls

    def resume(self, resumed: Resumed) -> None:
        """Lets it begin another epoch; its journal is updated when it has."""
        self._mailbox.to(self.host).resume(self.worker_id, resumed)
        self.journal.resumed = self.host, self.host.calls
        self._after_call = self.host.calls

    def drop(self, from_task: int) -> None:
        """Cancels its tasks of this epoch from this one on, of those that it was given so far.

        Tasks of the previous epoch that it rebuilds have numbers of their own, and are not cancelled.
        """
        self._mailbox.to(self.host).drop(self._after_call, from_task)

    def hurry(self) -> None:
        """Tells its host that another process will soon be this worker."""
        if self.host in self._mailbox and not self.away:
            self._mailbox.to(self.host).hurry(self.worker_id)

    def leave(self) -> None:
        """Tells its host that it no longer is this worker, if it was ever told that it is."""
        if self.host in self._mailbox and not self.away:
            self._mailbox.to(self.host).leave(self.worker_id)
            self.host.lane.abandon(self.worker_id)

    def moves_to(self, host: Process) -> None:
        """It continues on this process, once that is told so."""
        self.host, self.away = host, True

    @property
    def has_begun(self) -> bool:
        """Whether it has finished its start, and begun the epoch."""
        return self.started is not None and self.started.succeeded and self.journal.begun


class Fleet:
    """The workers of one iterator, dealt out in turn to the processes that it owns until `release`.

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
        # Requested while others host their workers: these workers, and how many processes have failed to start.
        self._coming: dict[Any, tuple[list[Worker], int]] = {}
        self._replaced: list[Any] = []  # replacements were requested, because their nodes will leave

    # ---- the loan of processes

    @property
    def usable(self) -> bool:
        """Whether the processes are still this fleet's and can be called."""
        return not self._released and self.processes.usable

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

    def _lend(self, count: int, *, fresh: bool = True) -> list[Any]:
        self.check_session()
        return self.processes.lend(count, fresh=fresh)

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
        for process in self.awaited:
            self.processes.watch_start(process, self.mailbox)
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
        """The processes whose start is awaited: workers that are away will begin there, or move there."""
        away = [worker for worker in self.workers if worker.away and not worker.host.lost]
        if not away and not self._coming:
            return []  # as nearly always: a wait asks
        hosts = {id(worker.host): worker.host for worker in away}
        return [process for process in (*hosts.values(), *self._coming) if process.tells_start]

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

    def fall_back(self, process: Any, reason: str) -> list[Worker]:
        """Replaces the line to a process with Ray calls.

        Returns:
            Its workers, which must be begun again; they are away now.
        """
        self.processes.refused(process, reason)
        self.mailbox.remove(process)
        workers = self.hosted_by(process)
        for worker in workers:
            if not worker.away:
                self.drop(worker, from_task=0)
                worker.leave()
                worker.away = True
        return workers

    # ---- workers begin

    def begin(self, setups: list[Setup], journals: list[Journal]) -> None:
        """Tells the processes that run which workers they are; the others' workers are away until they run."""
        self.check_session()
        self.workers = [
            Worker(setup, journal, self.hosts[setup.worker_id % len(self.hosts)], self.mailbox)
            for setup, journal in zip(setups, journals, strict=True)
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

    def drop(self, worker: Worker, from_task: int) -> None:
        """`Worker.drop`; workers that share a process are not told: their calls have one sequence of numbers."""
        if worker.host in self.mailbox and len(self.hosted_by(worker.host)) == 1:
            worker.drop(from_task)

    # ---- which process hosts each worker

    def hosted_by(self, process: Any) -> list[Worker]:
        """The workers of a process; none if it no longer belongs to this fleet."""
        return [worker for worker in self.workers if worker.host is process] if process in self.hosts else []

    def lose(self, process: Any) -> None:
        """Kills a process that is dead or not to be trusted any more, and gives up what it shares with this process."""
        if not process.lost:
            process.lost = True
            for worker in self.hosted_by(process):
                worker.away = True
            self._end(process)

    def _end(self, process: Any) -> None:
        """Kills a process, and gives up what it shares with us."""
        self.mailbox.remove(process)
        self.processes.kill(process)

    def replace(self, worker: Worker) -> bool:
        """Gives a worker whose process is dead another one, with all that the old one hosted; False if it lives."""
        old = worker.host
        if not old.lost:
            return False
        own = self._own_of(old)
        hosts = self._survivors_of(old) if old.vanished or not own else []
        if own or not hosts:
            (new,) = self._lend(1)  # idle ones may be just as dead
            if hosts:
                self._coming[new] = own, 0
            else:
                hosts = [new]
        self._move([old], hosts)
        return True

    def _own_of(self, process: Any) -> list[Worker]:
        """The workers of a process, except for those that it hosts until their own process comes."""
        others = [worker for workers, _ in self._coming.values() for worker in workers]
        return [worker for worker in self.hosted_by(process) if worker not in others]

    def _survivors_of(self, vanished: Any) -> list[Any]:
        """Processes that can do the work of one whose node may be gone, those with the fewest workers first.

        If a node loses power, Ray regards it as alive for up to half a minute, and may place a new process there.
        """
        gone = None if vanished.address is None else vanished.address.node_id
        there = [a for a in self.hosts if a.address is not None and not a.lost and a.address.node_id != gone]
        stay = [process for process in there if not self.processes.is_draining(process)]
        return sorted(stay, key=lambda process: len(self.hosted_by(process)))

    @property
    def may_spread(self) -> bool:
        """Whether there may be work for `spread`; the question costs next to nothing."""
        return bool(self._coming or self.processes.drains)

    def spread(self) -> list[Worker]:
        """Moves workers to processes of their own that have come, and away from nodes that will leave.

        A process on such a node continues until its replacement has come, or until it is late. Others then host its
        workers.

        Returns:
            The workers that move; they are away now.
        """
        before = self.hosts
        draining = [process for process in before if not process.lost and self.processes.is_draining(process)]
        for process in draining:
            if process not in self._replaced and (own := self._own_of(process)):
                (new,) = self._lend(1)
                self._coming[new] = own, 0
                self._replaced.append(process)
                for worker in own:
                    worker.hurry()
        moved = self._take_over()
        for process in draining:
            # If no process stays, Ray must not be asked again for each batch.
            if (hosts := self._survivors_of(process)) and self._is_late(process):
                for worker in self.hosted_by(process):
                    worker.leave()
                moved += self._move([process], hosts)
        for process in before:
            if process not in self.hosts and not process.lost:
                self._end(process)
        return moved

    def _is_late(self, process: Any) -> bool:
        """Whether its workers must leave it at once: its node leaves, or they have waited long enough for room."""
        coming = [new for new, (workers, _) in self._coming.items() if process in [worker.host for worker in workers]]
        return self.processes.is_late(process, coming)

    def _take_over(self) -> list[Worker]:
        """Lets late processes take over their workers from those that have helped out."""
        moved = []
        for new, (workers, failed) in list(self._coming.items()):
            try:
                if not new.has_started():
                    continue
            except NeverStarts:  # it was given room on a node that is gone
                self.processes.kill(new)
                if failed < MOST_FAILED_STARTS:
                    (another,) = self._lend(1)
                    self._coming[another] = workers, failed + 1
            else:
                for worker in workers:
                    worker.leave()
                    worker.moves_to(new)
                    moved.append(worker)
                self.hosts = self._hosts_of_workers
            del self._coming[new]
        return moved

    def _move(self, old: list[Any], new: list[Any]) -> list[Worker]:
        """Deals the workers of some processes, which leave the fleet, to other processes.

        Returns:
            The workers that move; they are away now.
        """
        moved = [worker for worker in self.workers if worker.host in old]
        for number, worker in enumerate(moved):
            worker.moves_to(new[number % len(new)])
        self.hosts = self._hosts_of_workers
        return moved

    @property
    def _hosts_of_workers(self) -> list[Any]:
        return list(dict.fromkeys(worker.host for worker in self.workers))

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
