"""A discrete-event simulation of a loader with up to thousands of workers, around the real `Schedule`.

Motive: this machine cannot show where the trainer's process becomes the limit, or what the loss of a node costs then.
Method: the schedule and the paces are the library's own code; what happens around them takes simulated time. The user's
thread is one server: each of its steps takes the time that was measured, and so does the training step. A worker builds
its tasks one after the other. Batches reach the trainer's machine through one network link, where another thread reads
them. Both threads run Python, so the user's thread stands still while the other does; no training step hides that here.
A node's workers die at a given time; the driver learns of it, and gets other processes for them, after given times.
Only the workers' times are random, and seeded: the same plan gives the same outcome. Used by `scaling.py`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayloader.epoch import messages as rules
from rayloader.epoch.depth import Pace
from rayloader.epoch.schedule import Schedule
from rayloader.options import PREFETCH_BYTES
from rayloader.task import Task


@dataclass(frozen=True)
class Costs:
    """Seconds of the user's thread, and of the one beside it that reads what comes over the network.

    Attributes:
        draw: to draw a batch's indices.
        schedule: of the schedule, for a batch's events together.
        send: to tell a worker a task.
        wake: to wait once, beside the time in which nothing comes.
        wake_per_worker: the same, for each worker that is looked at.
        receive: to take in a result.
        open: to make a batch of a result.
        ahead: of the other thread, for a batch, in Python: the user's thread stands still meanwhile.
        read_per_byte: of the other thread in the kernel, for each byte, while the user's goes on.
    """

    draw: float = 0.0
    schedule: float = 0.0
    send: float = 0.0
    wake: float = 0.0
    wake_per_worker: float = 0.0
    receive: float = 0.0
    open: float = 0.0
    ahead: float = 0.0
    read_per_byte: float = 0.0


@dataclass(frozen=True)
class NodeLoss:
    """Workers that die together.

    Attributes:
        at: when, in seconds.
        workers: who.
        notice: seconds until the driver knows.
        restart: seconds from then until other processes are the workers.
    """

    at: float
    workers: Sequence[int]
    notice: float
    restart: float


@dataclass(frozen=True)
class Plan:
    """What is simulated.

    Attributes:
        workers: how many.
        batches: of the epoch.
        work: seconds that a worker takes for a batch.
        costs: of the user's thread.
        spread: standard deviation of the logarithm of `work`; 0: all batches take the same.
        nbytes: of a batch.
        bandwidth: of the network link of the trainer's machine, bytes a second; infinite within one machine.
        latency: seconds that a message takes.
        step: seconds of the training step.
        prefetch_factor: torch's.
        automatic: the depth follows the workers' pace.
        in_order: deliver in task order.
        dynamic: any worker takes the next task.
        losses: nodes that die.
        seed: of the workers' times.
    """

    workers: int
    batches: int
    work: float
    costs: Costs = Costs()
    spread: float = 0.0
    nbytes: int = 0
    bandwidth: float = math.inf
    latency: float = 0.0
    step: float = 0.0
    prefetch_factor: int = 2
    automatic: bool = False
    in_order: bool = True
    dynamic: bool = False
    losses: Sequence[NodeLoss] = ()
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        delivered: when the user got each batch, in seconds.
        order: the batches' numbers, in that order.
        busy: seconds of the user's thread without the steps.
        handle_s: seconds of CPU time that the real schedule took on this machine, per batch.
    """

    delivered: list[float]
    order: list[int]
    busy: float
    handle_s: float = field(compare=False)

    @property
    def rate(self) -> float:
        """Batches a second in the middle half: the window fills before, and nothing is drawn after."""
        first, last = len(self.delivered) // 4, 3 * len(self.delivered) // 4
        return (last - first) / (self.delivered[last] - self.delivered[first])

    @property
    def longest_gap(self) -> float:
        """The longest time between two batches, in seconds."""
        return max(after - before for before, after in itertools.pairwise(self.delivered))


@dataclass
class _Worker:
    """A simulated worker process."""

    free_at: float = 0.0
    incarnation: int = 0
    lives: bool = True


class _Simulation:
    """One epoch, to be run once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        paced = plan.automatic or plan.dynamic
        self._schedule = Schedule(
            plan.workers,
            plan.prefetch_factor,
            in_order=plan.in_order,
            dynamic=plan.dynamic,
            elastic=plan.automatic,
            max_restarts=len(plan.losses) + 1,
            paces=[Pace(PREFETCH_BYTES / plan.workers, dynamic=plan.dynamic) for _ in range(plan.workers * paced)],
        )
        self._workers = [_Worker() for _ in range(plan.workers)]
        self._now = self._busy = self._handled = 0.0
        self._link_free_at = self._read_by = 0.0
        self._drawn = 0
        # Time, a number that keeps the order of what happens at one time, what happens, and to whom.
        self._to_come: list[tuple[float, int, str, Any]] = []
        self._number = 0
        for loss in plan.losses:
            self._will(loss.at, "dies", loss)

    def run(self) -> Outcome:
        plan, costs = self._plan, self._plan.costs
        delivered: list[float] = []
        order: list[int] = []
        for worker_id in range(plan.workers):
            self._handle(rules.WorkerReady(worker_id))
        self._handle(rules.Opened())
        self._draw_owed()
        while not self._schedule.finished:
            while not self._schedule.deliverable:
                self._receive()
            task = self._schedule.deliverable[0]
            self._spend(costs.open + costs.ahead)
            self._handle(rules.BatchTaken(task.task_id))
            self._draw_owed()
            delivered.append(self._now)
            order.append(task.task_id)
            self._now += plan.step
        return Outcome(delivered, order, self._busy, self._handled / max(1, len(delivered)))

    def _spend(self, seconds: float) -> None:
        self._now += seconds
        self._busy += seconds

    def _will(self, when: float, what: str, whom: Any) -> None:
        self._number += 1
        heapq.heappush(self._to_come, (when, self._number, what, whom))

    # ---- the user's thread

    def _handle(self, event: rules.Event) -> None:
        began = time.thread_time()
        commands = self._schedule.handle(event)
        self._handled += time.thread_time() - began
        for command in commands:
            match command:
                case rules.Submit(task):
                    self._spend(self._plan.costs.send)
                    self._give(task)
                case rules.Fail():
                    raise RuntimeError(f"the epoch failed: {command}")

    def _draw_owed(self) -> None:
        while self._schedule.owed_draws:
            if self._drawn == self._plan.batches:
                self._handle(rules.SamplerExhausted())
                return
            self._drawn += 1
            self._spend(self._plan.costs.draw + self._plan.costs.schedule)
            self._handle(rules.IndicesDrawn(None))

    def _receive(self) -> None:
        """Waits until something has come, and takes in all that has."""
        news = self._arrived()
        while not news:
            if not self._to_come:
                raise RuntimeError("nothing is under way, and the epoch is not finished")
            self._now = max(self._now, self._to_come[0][0])
            news = self._arrived()
        self._spend(self._plan.costs.wake + self._plan.costs.wake_per_worker * self._plan.workers)
        for what, whom in news:
            if what == "result":
                self._spend(self._plan.costs.receive)
                self._take(*whom)
            elif what == "notice":
                for worker_id in whom.workers:
                    self._handle(rules.WorkerLost(worker_id, "its node is gone"))
                self._will(self._now + whom.restart, "ready", whom)
            else:
                for worker_id in whom.workers:
                    self._workers[worker_id].lives = True
                    self._workers[worker_id].free_at = self._now
                    self._handle(rules.WorkerReady(worker_id))

    def _take(self, task: Task, incarnation: int, seconds: float) -> None:
        if incarnation == self._workers[task.worker_id].incarnation:  # else it was on its way when its node died
            self._handle(rules.TaskDone(task.task_id, nbytes=self._plan.nbytes, seconds=seconds))
            self._draw_owed()

    # ---- the rest of the world

    def _give(self, task: Task) -> None:
        """The worker will have built it, after what it was given before."""
        worker = self._workers[task.worker_id]
        if not worker.lives:  # the driver does not know yet
            return
        seconds = self._plan.work
        if self._plan.spread:
            seconds *= self._random.lognormvariate(-(self._plan.spread**2) / 2, self._plan.spread)
        worker.free_at = max(worker.free_at, self._now + self._plan.latency) + seconds
        self._will(worker.free_at, "built", (task, worker.incarnation, seconds))

    def _arrived(self) -> list[tuple[str, Any]]:
        """Lets the world go on until now; what has come to the user's thread by then."""
        news = []
        while self._to_come and self._to_come[0][0] <= self._now:
            when, _, what, whom = heapq.heappop(self._to_come)
            if what == "built":
                task, incarnation, _ = whom
                if incarnation == self._workers[task.worker_id].incarnation:
                    plan, costs = self._plan, self._plan.costs
                    self._link_free_at = max(self._link_free_at, when) + plan.nbytes / plan.bandwidth
                    self._read_by = max(self._read_by, self._link_free_at + plan.latency)
                    self._read_by += costs.ahead + costs.read_per_byte * plan.nbytes
                    self._will(self._read_by, "result", whom)
            elif what == "dies":
                for worker_id in whom.workers:
                    self._workers[worker_id].lives = False
                    self._workers[worker_id].incarnation += 1
                self._will(when + whom.notice, "notice", whom)
            else:
                news.append((what, whom))
        return news


def simulate(plan: Plan) -> Outcome:
    """What comes of a plan."""
    return _Simulation(plan).run()
