"""The schedule by random event sequences: what must hold whatever happens, in whatever order.

The model around it is a crew of workers that build what they were submitted, in order, and whose answers may be
reported in any order. It keeps its own books of what was submitted, answered, lost and taken.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
from rayloader.epoch.schedule import AHEAD, DEATHS, KILLS, Schedule
from rayloader.task import GONE, LOST, Task
from schedule_rules import check_rules


@dataclasses.dataclass
class WorkerModel:
    """A worker that builds its tasks in the order in which they came, as an actor does.

    Attributes:
        length: batches until it is exhausted; None: map-style.
        away: it has no process that may be given tasks.
        told: what it was submitted and has not answered, as the schedule has to see it.
        queue: what its process has to build, which does not know what the schedule has dropped meanwhile.
        ready: bytes of those of its batches that were not taken, by task.
        given: number of tasks, ever.
        restarts: since it last finished a task.
        exhausted_at: the task at which it was exhausted.
    """

    length: int | None
    away: bool = True
    told: list[int] = dataclasses.field(default_factory=list)
    queue: list[int] = dataclasses.field(default_factory=list)
    ready: dict[int, int] = dataclasses.field(default_factory=dict)
    given: int = 0
    restarts: int = 0
    exhausted_at: int | None = None


class AnyOrder(RuleBasedStateMachine):
    """Draws, answers, takings, deaths and closings in random order."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule | None = None

    @precondition(lambda self: self.schedule is None)
    @rule(
        num_workers=st.integers(1, 4),
        prefetch_factor=st.integers(1, 3),
        dynamic=st.booleans(),
        in_order=st.booleans(),
        num_batches=st.integers(0, 60),
        lengths=st.none() | st.lists(st.integers(0, 20), min_size=4, max_size=4),
        max_restarts=st.sampled_from([0, 2, 100]),
        first=st.integers(0, 5),
        skips=st.sets(st.integers(0, 10)),
        late=st.sets(st.integers(0, 3)),
    )
    def open(
        self,
        num_workers,
        prefetch_factor,
        dynamic,
        in_order,
        num_batches,
        lengths,
        max_restarts,
        first,
        skips,
        late,
    ):
        dynamic = dynamic and lengths is None
        self.schedule = Schedule(
            num_workers,
            prefetch_factor,
            in_order=in_order,
            dynamic=dynamic,
            max_restarts=max_restarts,
            first_task_id=first,
            first_worker_id=first % num_workers,
        )
        self.first = self.drawn = first
        self.max_restarts = max_restarts
        self.iterable = lengths is not None
        self.skips = set() if self.iterable else skips
        self.workers = [WorkerModel(lengths[k] if lengths else None) for k in range(num_workers)]
        self.prefetch_factor = prefetch_factor
        self.left_in_sampler = num_batches
        self.owed = 0  # draws
        self.sampler_failed = False
        self.deliverable: list[int] = []
        self.taken: list[int] = []
        self.answers: list[tuple[int, int, bool]] = []  # (worker, task, exhausted), on their way
        self.origin: dict[int, tuple[int, int]] = {}  # task -> (worker, which of its tasks that is)
        self.kills: dict[int, int] = {}
        self.failed = False
        for k in range(num_workers):
            if k not in late:
                self.revive(k)
        self.act(Opened())

    def act(self, event: Event) -> None:
        assert self.schedule is not None
        closed = self.schedule.closed
        commands = self.schedule.handle(event)
        check_rules(self.schedule)
        assert not closed or not commands
        for command in commands:
            match command:
                case Submit(task):
                    self.submitted(task)
                case ReplaceWorker(worker_id):
                    self.workers[worker_id].away = True
                case Fail(worker_id):
                    self.failed = True
                    self.workers[worker_id].away = True
        self.owed = self.schedule.owed_draws
        known = {*self.deliverable, *self.taken}
        self.deliverable += [task.task_id for task in self.schedule.deliverable if task.task_id not in known]

    def submitted(self, task: Task) -> None:
        k, worker = task.worker_id, self.workers[task.worker_id]
        assert not worker.away, "it has no process"
        assert task.task_id not in worker.told, "it has it already"
        again = task.task_id in self.origin  # it was lost, and was allowed before
        if not again:
            assert not self.schedule.dynamic or len(worker.told) < AHEAD
            self.origin[task.task_id] = k, worker.given
            worker.given += 1
        assert self.origin[task.task_id][0] == k, "it was another worker's"
        worker.told.append(task.task_id)
        worker.queue.append(task.task_id)

    @precondition(lambda self: self.schedule and not self.schedule.closed)
    @rule(times=st.integers(1, 5), nbytes=st.sampled_from([10, 30, 0]))
    def go_on(self, times, nbytes):
        """What usually happens: so random events strike in the middle of an epoch too."""
        for _ in range(times):
            self.draw_all()
            for k, worker in enumerate(self.workers):
                if worker.queue:
                    self.build_next(k)
            while self.answers:
                self.tell(self.answers.pop(0), nbytes)
            if self.deliverable:
                self.take()

    @precondition(lambda self: self.schedule and self.owed)
    @rule()
    def draw_all(self):
        while self.owed:
            self.draw_next()

    @precondition(lambda self: self.schedule and self.owed)
    @rule(fails=st.integers(0, 3))
    def draw_one(self, fails):
        if fails:
            self.draw_next()
        else:
            self.sampler_failed = True
            self.owed -= 1
            self.act(SamplerFailed())

    def draw_next(self) -> None:
        if self.left_in_sampler == 0 and not self.iterable:
            self.owed = 0
            self.act(SamplerExhausted())
            return
        self.owed -= 1
        self.left_in_sampler -= 1
        self.drawn += 1
        self.act(IndicesSkipped() if self.drawn - 1 in self.skips else IndicesDrawn(None))

    @precondition(lambda self: self.schedule and any(worker.queue for worker in self.workers))
    @rule(data=st.data())
    def build(self, data):
        self.build_next(data.draw(st.sampled_from([k for k, worker in enumerate(self.workers) if worker.queue])))

    def build_next(self, k: int) -> None:
        task_id = self.workers[k].queue.pop(0)
        length = self.workers[k].length
        self.answers.append((k, task_id, length is not None and self.origin[task_id][1] >= length))

    @precondition(lambda self: self.schedule and self.answers)
    @rule(data=st.data(), nbytes=st.integers(0, 30))
    def answer(self, data, nbytes):
        self.tell(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))), nbytes)

    def tell(self, answer: tuple[int, int, bool], nbytes: int) -> None:
        k, task_id, exhausted = answer
        worker = self.workers[k]
        if exhausted:
            if task_id in [task.task_id for task in self.schedule.tasks]:
                worker.exhausted_at = task_id
            worker.told = [told for told in worker.told if told < task_id]
            self.act(WorkerExhausted(task_id))
            return
        if self.schedule.closed or task_id not in worker.told:  # it was dropped
            self.act(TaskDone(task_id, nbytes=nbytes))
            return
        worker.told.remove(task_id)
        worker.restarts = 0
        worker.ready[task_id] = nbytes
        self.act(TaskDone(task_id, nbytes=nbytes))

    @precondition(lambda self: self.schedule and self.deliverable)
    @rule()
    def take(self):
        task_id = self.deliverable.pop(0)
        self.taken.append(task_id)
        del self.workers[self.origin[task_id][0]].ready[task_id]
        self.act(BatchTaken(task_id))

    @precondition(lambda self: self.schedule and self.taken)
    @rule(data=st.data())
    def hear_again_of_what_was_taken(self, data):
        task_id = data.draw(st.sampled_from(self.taken))
        assert self.schedule.handle(TaskDone(task_id)) == []
        assert self.schedule.handle(WorkerExhausted(task_id)) == []
        check_rules(self.schedule)

    @precondition(lambda self: self.schedule and any(worker.ready for worker in self.workers))
    @rule(data=st.data())
    def hear_again_of_what_has_come(self, data):
        task_id = data.draw(st.sampled_from([task_id for worker in self.workers for task_id in worker.ready]))
        assert self.schedule.handle(TaskDone(task_id, nbytes=1000)) == []
        check_rules(self.schedule)

    @precondition(lambda self: self.schedule and not self.failed)
    @rule(
        k=st.integers(0, 3),
        rarely=st.integers(0, 5),
        blameless=st.booleans(),
        alone=st.booleans(),
        admitted=st.booleans(),
    )
    def lose(self, k, rarely, blameless, alone, admitted):
        """Its process, and every answer that has not come."""
        if rarely or k >= len(self.workers) or self.schedule.closed:
            return
        worker = self.workers[k]
        suspect = worker.queue[0] if alone and worker.queue and not blameless else None
        if suspect is not None and suspect not in worker.told:
            suspect = None  # it was exhausted before
        matters = worker.exhausted_at is None or any(task.worker_id == k for task in self.schedule.outstanding)
        self.process_is_gone(k)
        if matters:
            worker.restarts += not blameless
            if suspect is not None:
                self.kills[suspect] = self.kills.get(suspect, 0) + 1
        deaths = self.kills.get(suspect, 0)
        hopeless = matters and (worker.restarts > self.max_restarts or deaths >= (KILLS if admitted else DEATHS))
        self.act(WorkerLost(k, "killed", suspect, admitted, blameless))
        assert self.failed == hopeless
        assert worker.away or not matters

    def process_is_gone(self, k: int) -> None:
        self.workers[k].told.clear()
        self.workers[k].queue.clear()
        self.answers = [answer for answer in self.answers if answer[0] != k]

    @precondition(lambda self: self.schedule and any(worker.away for worker in self.workers))
    @rule(data=st.data())
    def replace(self, data):
        self.revive(data.draw(st.sampled_from([k for k, worker in enumerate(self.workers) if worker.away])))

    def revive(self, k: int) -> None:
        lost = [task.task_id for task in self.schedule.tasks if task.worker_id == k and task.state is LOST]
        self.workers[k].away = False
        self.act(WorkerReady(k))
        assert self.workers[k].told[: len(lost)] == lost, "what was lost is submitted again, and first"

    @precondition(lambda self: self.schedule)
    @rule(rarely=st.integers(0, 15), resuming=st.booleans())
    def close(self, rarely, resuming):
        """Whatever is under way, and again and again; the news that is on its way still comes."""
        if rarely != 7:  # for 0 is not rare
            return
        assert self.schedule is not None
        finished, tasks = self.schedule.finished, self.schedule.tasks
        commands = self.schedule.handle(Closed(resuming))
        check_rules(self.schedule)
        for k, worker in enumerate(self.workers):
            mine = [task for task in tasks if task.worker_id == k]
            told = {
                *worker.told,
                *(c.task.task_id for c in commands if isinstance(c, Submit) and c.task.worker_id == k),
            }
            if resuming:
                assert {task.task_id for task in mine} <= {*told, *worker.ready}, "torch's would have built it"
            worker.told, worker.ready = [], {}
        self.owed, self.deliverable = 0, []
        assert self.schedule.finished == finished
        assert self.schedule.tasks == ()
        assert all(task.state is GONE for task in tasks)

    @invariant()
    def the_window_holds(self):
        if self.schedule is not None:
            tasks = self.schedule.tasks
            assert len(tasks) + self.owed <= self.prefetch_factor * len(self.workers)
            if self.schedule.in_order and not self.schedule.dynamic:
                for k in range(len(self.workers)):
                    mine = sum(task.worker_id == k for task in tasks)
                    assert mine <= (len(self.workers) * self.prefetch_factor if self.skips else self.prefetch_factor)

    @invariant()
    def order_holds_and_nothing_comes_twice(self):
        if self.schedule is not None:
            assert [task.task_id for task in self.schedule.deliverable] == self.deliverable
            delivered = self.taken + self.deliverable
            assert len(set(delivered)) == len(delivered)
            if self.schedule.in_order:
                assert delivered == sorted(delivered)

    @invariant()
    def what_a_worker_was_given_and_has_not_answered_is_written_down(self):
        for k, worker in enumerate(self.workers if self.schedule is not None else ()):
            assert [task.task_id for task in self.schedule.unanswered(k)] == worker.told
        if self.schedule is not None:
            untaken = {task.task_id: task.nbytes for task in self.schedule.untaken}
            assert untaken == {task_id: nbytes for worker in self.workers for task_id, nbytes in worker.ready.items()}

    @invariant()
    def it_never_sticks(self):
        if self.schedule is not None and not (self.schedule.finished or self.schedule.closed or self.failed):
            building = any(worker.queue for worker in self.workers)
            starting = any(
                self.workers[task.worker_id].away if task.is_assigned else any(worker.away for worker in self.workers)
                for task in self.schedule.outstanding
            )
            assert self.deliverable or self.answers or self.owed or building or starting

    def teardown(self):
        """Drain: everything that was built must come out, and then the epoch is finished."""
        if self.schedule is None or self.failed or self.schedule.closed:
            return
        while not self.schedule.finished:
            self.it_never_sticks()
            for k, worker in enumerate(self.workers):
                if worker.away:
                    self.revive(k)
            self.go_on(1, 5)
        assert not self.deliverable
        if self.iterable:
            for k, worker in enumerate(self.workers):
                mine = [self.origin[task_id][1] for task_id in self.taken if self.origin[task_id][0] == k]
                assert sorted(mine) == list(range(len(mine) if self.sampler_failed else worker.length or 0))
        else:
            assert sorted(self.taken) == [i for i in range(self.first, self.drawn) if i not in self.skips]
            assert self.left_in_sampler == 0 or self.sampler_failed
            for task_id in self.taken:
                if self.schedule.in_order and not self.schedule.dynamic:
                    assert self.origin[task_id][0] == task_id % len(self.workers)


AnyOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestAnyOrder = AnyOrder.TestCase
