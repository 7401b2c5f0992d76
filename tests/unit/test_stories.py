"""Schedule and engine in random stories on the fake fleet: whatever happens, each batch comes once and in its order.

The stories have several epochs, of map-style datasets and streams, with errors, skipped steps and empty batches.
Processes die, exit, can't start, come late, repeat their answers, and refuse their lines. What must hold between any
two events is an invariant here, a rule of the schedule (`check_rules`), or an assertion of the fleet: that each
worker's random stream goes on where an undisturbed one's would, and that a batch is rebuilt as it was.

A story that fails is shown as it was found, within seconds. To have it told by fewer steps, which may take minutes:

    SHORTEN=1 pytest tests/unit/test_stories.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_fleet import Epoch, Process, check_rules
from rayloader import WorkerDiedError
from rayloader.epoch import engine as engine_module
from rayloader.epoch.messages import Closed, Command, Event, Fail, ReplaceWorker, TaskDone, WorkerExhausted, WorkerLost
from rayloader.epoch.schedule import AHEAD, DEATHS, KILLS, Schedule
from rayloader.errors import RaySessionError
from rayloader.protocol import Answer, ResultKind, Up
from rayloader.task import OUTSTANDING
from rayloader.workers import fleet as fleet_module

EPOCHS = 4
going_on = precondition(lambda self: not self.is_over)


class Watched(Schedule):
    """A schedule that is held to its rules, and to books of who is to blame for which death."""

    def __init__(self, num_workers: int, *arguments: int, max_restarts: int, **options: bool) -> None:
        super().__init__(num_workers, *arguments, max_restarts=max_restarts, **options)
        self.restarts, self.most = [0] * num_workers, max_restarts
        self.deaths: Counter[int] = Counter()  # by task
        self.exhausted: set[int] = set()  # workers
        self.failed = False
        self.replaced = 0  # processes

    def handle(self, event: Event) -> list[Command]:
        tasks = {task.task_id: task for task in self.tasks}
        follows: type | None = None
        if isinstance(event, WorkerLost) and self.matters(event.worker_id):
            follows = self.end_of(event)
        if isinstance(event, WorkerExhausted) and event.task_id in tasks:
            self.exhausted.add(tasks[event.task_id].worker_id)
        if isinstance(event, TaskDone) and event.task_id in tasks and tasks[event.task_id].state is OUTSTANDING:
            self.restarts[tasks[event.task_id].worker_id] = 0
        commands, finished = super().handle(event), self.finished
        check_rules(self)
        assert not self.closed or not commands or isinstance(event, Closed)
        if isinstance(event, WorkerLost):
            assert [type(command) for command in commands] == ([follows] if follows else [])
        assert super().handle(TaskDone(-1)) == [], "news of what is not in the table"
        assert self.finished == finished
        return commands

    def matters(self, worker_id: int) -> bool:
        """Whether the loss of a worker does."""
        owes = any(task.worker_id == worker_id for task in self.outstanding)
        return not self.closed and not self.failed and (worker_id not in self.exhausted or owes)

    def end_of(self, lost: WorkerLost) -> type:
        """What a loss must lead to, see NOTE [blame]."""
        self.restarts[lost.worker_id] += not lost.blameless
        if lost.suspect is not None:
            self.deaths[lost.suspect] += 1
        limit = KILLS if lost.admitted else DEATHS
        self.failed = self.restarts[lost.worker_id] > self.most or self.deaths[lost.suspect] >= limit
        self.replaced += not (lost.blameless or self.failed)
        return Fail if self.failed else ReplaceWorker


class Stories(RuleBasedStateMachine):
    """What may happen to a loader, and what its user gets."""

    @initialize(
        num_workers=st.integers(1, 4),
        kind=st.sampled_from(["map", "map", "stream", "dynamic"]),
        in_order=st.sampled_from([True, True, True, False]),
        prefetch_factor=st.sampled_from([1, 2, 2, 9]),
        max_restarts=st.sampled_from([10_000, 10_000, 2, 0]),
        length=st.sampled_from([30, 60, 7, 1, 0]),
        lengths=st.lists(st.sampled_from([5, 12, 1, 0]), min_size=4, max_size=4),
        skips=st.sets(st.integers(0, 20), max_size=4),
        odd=st.dictionaries(st.integers(0, 20), st.sampled_from([ResultKind.ERROR, ResultKind.EMPTY]), max_size=4),
        forks=st.booleans(),
        rebuilt_at_once=st.sampled_from([100, 3, 1]),
        snapshot_every=st.sampled_from([5, 2, 1, 1000]),
        seed=st.integers(0, 999),
    )
    def begin(self, num_workers, kind, in_order, length, lengths, skips, odd, forks, seed, **options):
        self.num_workers, self.kind, self.in_order = num_workers, kind, in_order
        self.lengths = lengths[:num_workers]  # of streams
        self.length = sum(self.lengths) if kind == "stream" else length
        self.skips = () if kind == "stream" else tuple(sorted(skips))
        self.odd = odd if kind == "dynamic" or (kind == "map" and in_order) else {}
        self.window = num_workers * options["prefetch_factor"]
        self.options = {
            "iterable": kind == "stream",
            "in_order": in_order,
            "prefetch_factor": options["prefetch_factor"],
            **({"seeding": "batch", "scheduling": "dynamic"} if kind == "dynamic" else {}),
            "max_worker_restarts": options["max_restarts"],
            "skips": self.skips,
            "schedule_class": Watched,
        }
        self.epoch = Epoch(num_workers, self.length, forks=forks, **self.options)
        self.world = self.epoch.world
        self.world.random, self.world.slice = random.Random(seed), options["rebuilt_at_once"]
        self.world.snapshot_every = options["snapshot_every"]
        self.world.outcome = self.outcome
        if kind == "stream":
            self.world.length = self.lengths.__getitem__
        if kind == "dynamic":
            self.world.batch = lambda worker_id, epoch, position, indices: [None, epoch, None, *indices]
        # Of each worker, where its random stream may be at the start of the epoch: from the first to the second number.
        self.positions = [(0, 0)] * num_workers
        self.number = 0
        self.is_over = False  # the story
        self.forget()
        self.patches = [mock.patch.object(module, "time", self.world.clock) for module in (engine_module, fleet_module)]
        for patch in self.patches:
            patch.start()
        self.epoch.open()
        self.nothing_is_held_back()

    def forget(self):
        self.taken: list[int] = []  # indices, or of streams numbers of batches
        self.from_worker = Counter()  # batches
        self.has_ended = False  # the epoch

    def outcome(self, task_id):
        kind = self.odd.get(task_id)
        return None if kind is None else Answer(task_id, kind, text=f"bad {task_id}", digest=7)

    # ---- what may happen

    @going_on
    @rule(times=st.integers(1, 12))
    def take(self, times):
        for _ in range(times):
            if not self.has_ended and not self.is_over:
                self.take_one()

    @going_on
    @rule(worker_id=st.integers(0, 3), count=st.integers(1, 4))
    def work(self, worker_id, count):
        self.epoch.engine.flush()
        self.process(worker_id).work(count)

    @going_on
    @rule()
    def hear(self):
        self.epoch.hear()

    @going_on
    @rule(data=st.data())
    def an_answer_comes_again(self, data):
        answers = [mail for mail in self.world.mail if isinstance(mail[1], tuple) and mail[1][0] == Up.ANSWER]
        if answers:
            self.world.mail.append(data.draw(st.sampled_from(answers)))

    @going_on
    @rule(worker_ids=st.lists(st.integers(0, 3), min_size=1, max_size=2), sent=st.integers(0, 2))
    def dies(self, worker_ids, sent):
        for process in dict.fromkeys(map(self.process, worker_ids)):
            if not process.is_dead:
                process.work(sent)
                process.dies()

    @precondition(lambda self: not self.is_over and self.length)
    @rule(worker_id=st.integers(0, 3), task_id=st.integers(0, 59))
    def a_task_will_exit(self, worker_id, task_id):
        self.process(worker_id).exits_at.add((self.number, task_id))

    @precondition(lambda self: not self.is_over and not self.world.forks)
    @rule(worker_id=st.integers(0, 3))
    def a_line_is_refused(self, worker_id):
        if not self.process(worker_id).is_dead:
            self.process(worker_id).refuses_line()

    @going_on
    @rule(stillborn=st.integers(0, 2))
    def the_next_processes_come_late_or_never(self, stillborn):
        self.world.new_runs, self.world.stillborn = False, stillborn

    @going_on
    @rule()
    def processes_come(self):
        self.world.new_runs = True
        for process in self.world.hosts:
            process.runs = True
            if process.may_come and not process.is_dead:
                process.comes()

    @precondition(lambda self: not self.is_over and self.number < EPOCHS and not self.epoch.schedule.failed)
    @rule(rarely=st.integers(0, 5), k=st.integers(0, 3), between=st.sampled_from(["", "dies", "work", "work dies"]))
    def the_next_epoch_begins(self, rarely, k, between):
        """`between`: what happens at each moment between the two."""
        if rarely != 3 and not self.has_ended:
            return

        def meanwhile():
            for happens in between.split():
                self.dies([k], 1) if happens == "dies" else self.process(k).work(2)

        meanwhile()
        built = map(self.built, range(self.num_workers))
        self.positions = [
            (low + least, high + most) for (low, high), (least, most) in zip(self.positions, built, strict=True)
        ]
        self.number += 1
        self.forget()
        self.epoch = Epoch(self.num_workers, self.length, before=self.epoch, meanwhile=meanwhile, **self.options).open()

    @going_on
    @rule(rarely=st.integers(0, 15))
    def it_is_closed(self, rarely):
        if rarely != 7:  # for 0 is not rare
            return
        finished = self.epoch.schedule.finished
        self.epoch.close()
        self.work(0, 3)
        self.epoch.engine._take()
        assert self.epoch.engine.finished == finished
        assert (self.epoch.schedule.untaken, self.epoch.schedule.tasks) == ([], ())
        self.is_over = True
        self.it_is_asked_again()

    @precondition(lambda self: self.is_over)
    @rule()
    def it_is_asked_again(self):
        if self.epoch.schedule.finished and not self.epoch.schedule.failed:
            assert self.epoch.engine.next() is None
        else:
            with pytest.raises(WorkerDiedError if self.epoch.schedule.failed else RaySessionError):
                self.epoch.take()

    # ---- what the user gets

    def process(self, worker_id: int) -> Process:
        return self.epoch.process(worker_id % self.num_workers)

    def take_one(self):
        self.processes_come()
        wanted = [n for n in range(self.length) if n not in self.skips and self.odd.get(n) != ResultKind.EMPTY]
        left = [n for n in wanted if n not in self.taken]
        try:
            batch = self.epoch.take()
        except StopIteration:
            assert left == []
            self.has_ended = True
            return
        except WorkerDiedError:
            assert self.epoch.schedule.failed
            assert not self.epoch.schedule.deliverable
            self.is_over = True
            return
        except RuntimeError as error:
            index = int(str(error).removeprefix("bad "))
            assert self.odd[index] == ResultKind.ERROR
        else:
            index = self.checked(batch)
        assert index in (left[:1] if self.in_order else left)
        self.nothing_is_held_back()
        self.taken.append(index)

    def nothing_is_held_back(self):
        assert not any(process.queue for process in self.world.hosts), "what workers may be given is sent at once"

    def checked(self, batch) -> int:
        """The index of a batch, or of a stream its number."""
        worker_id, epoch, position, index = batch
        assert epoch == self.number
        before, self.from_worker[worker_id] = self.from_worker[worker_id], self.from_worker[worker_id] + 1
        if self.kind == "dynamic":
            return index
        if self.kind == "stream":
            rounds = [(n, k) for n in range(max(self.lengths)) for k in range(self.num_workers) if n < self.lengths[k]]
            index = len(self.taken)
            assert not self.in_order or worker_id == rounds[index][1]
        elif self.in_order:
            assert worker_id == index % self.num_workers
            before = self.built_before(worker_id, index)
        low, high = self.positions[worker_id]
        assert low <= position - before <= high
        self.positions[worker_id] = position - before, position - before
        return index

    def built_before(self, worker_id: int, end: int) -> int:
        """How many batches of a map-style dataset a worker builds of the first ones, in order."""
        return len([n for n in range(worker_id, end, self.num_workers) if n not in self.skips])

    def built(self, worker_id: int) -> tuple[int, int]:
        """How many batches torch's worker has built by now, at least and at most."""
        least = self.from_worker[worker_id]
        if self.kind == "map" and self.in_order:
            return (self.built_before(worker_id, self.epoch.drawn),) * 2
        if self.has_ended:
            return least, least
        return least, self.lengths[worker_id] if self.kind == "stream" else self.length

    # ---- what must hold

    @invariant()
    def the_books_agree(self):
        self.epoch.check()
        assert self.epoch.tally.restarts == self.epoch.schedule.replaced

    @invariant()
    def the_window_holds_and_indices_are_drawn_when_torch_draws_them(self):
        if self.epoch.schedule.failed or self.is_over:
            return
        schedule, drawn = self.epoch.schedule, self.epoch.drawn
        assert len(schedule.tasks) <= self.window
        assert self.kind == "stream" or drawn == min(self.length, schedule.taken + self.window)
        for k in range(self.num_workers):
            assert self.kind != "dynamic" or len(schedule.unanswered(k)) <= AHEAD
            if self.kind != "dynamic" and self.in_order and not self.skips:
                mine = [task for task in schedule.tasks if task.worker_id == k]
                assert len(mine) <= self.options["prefetch_factor"]

    def teardown(self):
        try:
            while not (self.is_over or self.has_ended):
                self.take_one()
                self.the_books_agree()
            self.epoch.close()
        finally:
            for patch in self.patches:
                patch.stop()


Stories.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.reuse, Phase.generate, *([Phase.shrink] if "SHORTEN" in os.environ else [])],
    report_multiple_bugs=False,
)
TestStories = Stories.TestCase
