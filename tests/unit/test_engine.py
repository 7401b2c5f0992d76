"""One epoch of the engine, with a fleet that works when a test says so: no Ray, no processes, no sleeping."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from fake_fleet import FakeFleet, Process
from rayloader import (
    BatchTimeoutError,
    DataLoader,
    RayloaderError,
    SkipLimitError,
    WorkerDiedError,
    WorkerStartError,
)
from rayloader._compat import ExceptionWrapper
from rayloader.epoch import engine as engine_module
from rayloader.epoch.ahead import AheadThread
from rayloader.epoch.engine import LOOK_S, REBUILDING_PATIENCE_S, Engine
from rayloader.epoch.schedule import DEATHS, KILLS, Schedule
from rayloader.errors import RaySessionError
from rayloader.gpu.to_device import PINNED_AHEAD, PinOrMove
from rayloader.observe.recorder import Tally
from rayloader.options import Options
from rayloader.protocol import Answer, ResultKind, Up
from rayloader.resume.journal import Resumed
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.task import TaskState
from rayloader.workers import fleet as fleet_module
from schedule_rules import check_rules

MB = 1 << 20
PREFETCH_FACTOR = 2
OPTIONS = Options(
    prefetch_factor=PREFETCH_FACTOR,
    in_order=True,
    timeout=0.0,
    seeding="worker",
    scheduling="static",
    max_worker_restarts=3,
    on_timeout="raise",
    on_error="raise",
    max_skipped=0,
    arenas=True,
    workers="auto",
    fresh_processes=False,
    ray_remote_args={},
    needs_actors=False,
)


HANG_LIMIT = 20.0  # seconds; on expiry the test fails


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Workers put their own length in."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("only workers read it")


class Epoch:
    """An epoch of `length` batches, and what its user does.

    Args:
        fleet: of an earlier epoch.
        position: of that.
        meanwhile: called at each moment between that one and this.
    """

    def __init__(
        self,
        num_workers: int = 2,
        length: int = 12,
        *,
        iterable: bool = False,
        sampler: Any = None,
        loader: Any = None,
        pin: Any = None,
        before: Epoch | None = None,
        forks: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        if loader is None and before is not None:
            loader = before.loader
        self.loader = loader if loader is not None else DataLoader(Endless() if iterable else range(length), 1)
        self.options = dataclasses.replace(OPTIONS, **options)
        self.before, self.pin, self.iterable = before, pin, iterable
        self.drawn_after: list[int] = []  # how many batches were taken when each draw was made
        self.got: list[Any] = []
        if before is None:
            self.position = Position(Samplers(self.loader), 7, num_workers, iterable=iterable)
            self.position.begins(False)
            self.fleet = FakeFleet(num_workers, self.position.journals, forks=forks)
        else:
            self.position, self.fleet = before.position, before.fleet
        self.sampler = self._noting(sampler if sampler is not None else iter(self.loader._index_sampler))
        if before is not None:
            self._follow(before, meanwhile)
        self.schedule = Schedule(
            num_workers,
            self.options.prefetch_factor,
            in_order=self.options.in_order,
            dynamic=self.options.dynamic,
            max_restarts=self.options.max_worker_restarts,
        )
        self.tally = Tally(num_workers, self.options.prefetch_factor)
        self.engine = Engine(
            self.fleet,  # type: ignore[arg-type]
            self.schedule,
            self.sampler,
            self.options,
            position=self.position,
            delivery=PinOrMove(pin, ahead=PINNED_AHEAD),
            tally=self.tally,
        )

    def _follow(self, before: Epoch, meanwhile: Callable[[], object]) -> None:
        """The workers of an epoch are told that another begins, as by `EpochIterator`."""
        before.engine.close(resuming=True)
        meanwhile()
        self.position.begins(True)
        for worker in self.fleet.workers:
            resumed = Resumed(self.position.begin.epoch, None)
            worker.journal.begins(resumed)
            if not worker.away:
                worker.resume(resumed)
        meanwhile()

    def _noting(self, sampler: Iterator[Any]) -> Iterator[Any]:
        return _Noted(self, sampler)

    def open(self, **how: Any) -> Epoch:
        self.engine.open(fresh=self.before is None, **how)
        return self

    def take(self) -> Any:
        """The next batch, as `EpochIterator` takes it; `StopIteration` after the last."""
        task = self.engine.next()
        if task is None:
            raise StopIteration
        batch, task.data = task.data, None
        if isinstance(batch, ExceptionWrapper):
            self.position.handed = task
            batch.reraise()
        self.position.handed = task
        self.got.append(batch)
        return batch

    def take_all(self) -> list[Any]:
        while True:
            try:
                self.take()
            except StopIteration:
                return self.got

    def work(self, worker_id: int, count: int = 1) -> int:
        """A worker's process sends so many answers, which arrive."""
        sent = self.fleet.process(worker_id).work(count)
        self.hear()
        return sent

    def hear(self) -> None:
        """What was sent arrives."""
        self.engine._take()

    def await_one(self) -> None:
        """As `next` does while there is no batch."""
        self.engine._await(LOOK_S)

    def given(self, worker_id: int) -> list[int]:
        """The tasks that a worker's process was told to build, and has heard of."""
        process = self.fleet.process(worker_id)
        heard = len(process.log) - len(process.queue)
        return [task_id for kind, task_id in process.log[:heard] if kind == "run"]

    def check(self) -> None:
        """What must hold at any time: the schedule's rules, and that the journals say what the schedule says."""
        check_rules(self.schedule)
        assert not self.engine.broken
        if self.schedule.closed or self.engine.failure is not None:
            return
        for worker in self.fleet.workers:
            owed = [
                task.task_id
                for task in self.schedule.tasks
                if task.worker_id == worker.worker_id and task.state in (TaskState.OUTSTANDING, TaskState.LOST)
            ]
            entries = worker.journal.tasks
            assert [task.task_id for task in entries if task.digest is None] == owed
            assert [task.task_id for task in entries] == sorted(task.task_id for task in entries)

    def close(self) -> None:
        self.engine.close()
        self.engine.close()


class _Noted(Iterator[Any]):
    def __init__(self, epoch: Epoch, sampler: Iterator[Any]) -> None:
        self._epoch, self._sampler = epoch, iter(sampler)

    def __next__(self) -> Any:
        indices = next(self._sampler)
        self._epoch.drawn_after.append(len(self._epoch.got))
        return indices


def expected(length: int, num_workers: int = 2, *, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """The batches of an epoch that nothing disturbs; `first`: of each worker's random stream."""
    return [[n % num_workers, epoch, first + n // num_workers, n] for n in range(length)]


@pytest.fixture
def begin(monkeypatch):
    """Makes epochs, whose time is that of the first one's fleet, and proves that none leaves a thread."""
    made: list[Epoch] = []

    def make(*args: Any, **options: Any) -> Epoch:
        epoch = Epoch(*args, **options)
        made.append(epoch)
        for module in (engine_module, fleet_module):
            monkeypatch.setattr(module, "time", epoch.fleet.clock)
        return epoch

    yield make
    for epoch in made:
        epoch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


# ---- order, and torch's moments


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_every_batch_comes_once_and_in_order(begin, num_workers):
    epoch = begin(num_workers).open()
    assert epoch.take_all() == expected(12, num_workers)
    assert epoch.engine.finished
    with pytest.raises(StopIteration):
        epoch.take()
    epoch.check()


def test_whoever_is_quicker_the_order_is_that_of_the_tasks(begin):
    epoch = begin().open()
    assert epoch.work(1, 2) == 2
    assert not epoch.schedule.deliverable
    assert epoch.work(0) == 1
    assert [epoch.take(), epoch.take()] == expected(2)
    epoch.check()


def test_without_order_whoever_is_quicker_comes_first(begin):
    epoch = begin(in_order=False).open()
    epoch.fleet.works = False
    epoch.work(1, 2)
    epoch.work(0)
    assert [epoch.take()[-1] for _ in range(3)] == [1, 3, 0]


def test_any_worker_takes_the_next_task_if_batches_do_not_depend_on_it(begin):
    epoch = begin(scheduling="dynamic", length=20, prefetch_factor=8).open()
    epoch.fleet.batch = lambda worker_id, epoch, position, indices: (worker_id, indices)
    for _ in range(8):  # the first worker is stuck
        epoch.work(1)
        epoch.engine.flush()
    assert epoch.given(0) == [0, 2]
    assert len(epoch.given(1)) > 2
    assert [indices for _, indices in epoch.take_all()] == [[n] for n in range(20)]


def test_indices_are_drawn_when_torch_draws_them(begin):
    epoch = begin().open()
    assert epoch.drawn_after == [0] * 4
    assert epoch.given(0) == [0, 2]
    assert epoch.given(1) == [1, 3]
    epoch.take_all()
    # The place of a batch that is taken is drawn again before the user has it.
    assert epoch.drawn_after == [0] * 4 + list(range(8))


@pytest.mark.parametrize("in_order", [True, False])
def test_streams_end_one_by_one(begin, in_order):
    lengths = (3, 6)
    epoch = begin(iterable=True, in_order=in_order)
    epoch.fleet.length = lengths.__getitem__
    epoch.open()
    got = epoch.take_all()
    for worker_id, length in enumerate(lengths):
        assert [position for owner, _, position, *_ in got if owner == worker_id] == list(range(length))
    assert epoch.engine.finished


def test_what_a_draw_raises_comes_in_a_batchs_place_and_the_next_draw_goes_on(begin):
    class Odd(Iterator[Any]):
        drawn = 0

        def __next__(self) -> Any:
            self.drawn += 1
            if self.drawn == 6:
                raise KeyError("as planned")
            if self.drawn == 13:
                raise StopIteration
            return [self.drawn - 1 - (self.drawn > 6)]

    epoch = begin(length=11, sampler=Odd()).open()
    epoch.take()
    with pytest.raises(KeyError, match="as planned"):
        epoch.take()
    assert not epoch.engine.broken
    assert epoch.take_all() == [expected(11)[0], *expected(11)[2:]], "the error has taken the place of a batch"


def test_what_the_first_draws_raise_is_raised_by_open(begin):
    def fail() -> Iterator[Any]:
        yield [0]
        raise KeyError("as planned")

    epoch = begin(sampler=fail())
    with pytest.raises(KeyError):
        epoch.open()


def test_what_a_worker_raises_is_the_users_and_the_next_batch_follows(begin):
    epoch = begin()
    epoch.fleet.outcome = lambda task_id: Answer(task_id, ResultKind.ERROR, text="bad") if task_id == 1 else None
    epoch.open()
    epoch.take()
    with pytest.raises(RuntimeError, match="bad"):
        epoch.take()
    assert epoch.take_all() == [expected(12)[0], *expected(12)[2:]]


# ---- waiting


def test_time_without_news_is_counted_and_apart_where_a_finished_batch_waits_for_an_earlier_one(begin):
    epoch = begin().open()
    epoch.fleet.works = False
    epoch.await_one()  # the workers have begun
    epoch.await_one()
    assert (epoch.tally.blocked, epoch.tally.behind) == (LOOK_S, 0.0)
    epoch.work(1)
    epoch.fleet.came = False
    epoch.await_one()
    assert (epoch.tally.blocked, epoch.tally.behind) == (2 * LOOK_S, LOOK_S)
    epoch.work(0)
    assert [epoch.take(), epoch.take()] == expected(2)
    assert (epoch.tally.blocked, epoch.tally.behind) == (2 * LOOK_S, LOOK_S)


# ---- what is sent at once


def test_what_torchs_workers_would_have_been_given_is_sent_at_once(begin):
    epoch = begin().open()
    for taken in range(1, 6):
        epoch.take()
        assert sorted([*epoch.given(0), *epoch.given(1)]) == list(range(4 + taken))


# ---- losses


@pytest.mark.parametrize("built", [0, 1, 2])
def test_a_worker_that_dies_goes_on_in_another_process(begin, built, caplog):
    epoch = begin().open()
    epoch.work(0, built)
    victim = epoch.fleet.process(0)
    victim.dies()
    assert epoch.take_all() == expected(12)
    assert epoch.tally.restarts == 1
    assert epoch.fleet.killed == [victim]
    assert "worker 0 is lost and gets another process" in caplog.text
    assert [task for worker, task in epoch.fleet.rebuilt] == [0, 2][:built]
    epoch.check()


def test_what_it_sent_before_its_end_still_counts(begin):
    epoch = begin().open()
    process = epoch.fleet.process(0)
    process.work(2)
    process.dies()
    epoch.await_one()
    assert [task.task_id for task in epoch.schedule.untaken] == [0, 2]
    assert epoch.take_all() == expected(12)


def test_it_goes_on_from_its_last_snapshot(begin):
    epoch = begin(1, 30)
    epoch.fleet.snapshot_every = 4
    epoch.open()
    for _ in range(10):
        epoch.take()
    epoch.fleet.process(0).dies()
    assert epoch.take_all() == expected(30, 1)
    (first, *_) = [task for _, task in epoch.fleet.rebuilt]
    assert first % 4 == 0
    assert first >= 4


def at_work_on(epoch: Epoch, worker_id: int) -> None:
    """The worker's process has begun, and is at its oldest task."""
    process = epoch.fleet.process(worker_id)
    while process.inbox and process.inbox[0][:1] != ("run",):
        process.step()
        epoch.hear()
        epoch.engine.flush()


def test_a_task_that_was_running_at_so_many_deaths_ends_the_epoch(begin):
    epoch = begin(max_worker_restarts=99).open()
    epoch.fleet.works = False
    for death in range(DEATHS):
        assert epoch.engine.failure is None, death
        at_work_on(epoch, 0)
        epoch.fleet.process(0).dies()
        epoch.await_one()
    failure = epoch.engine.failure
    assert failure is not None
    assert failure.worker_id == 0
    assert any("batch 0, worker 0 (pid" in note and "indices [0]" in note for note in failure.__notes__)
    for _ in range(2):
        with pytest.raises(WorkerDiedError):
            epoch.take()


def test_a_task_that_has_admitted_it_ends_the_epoch_sooner(begin):
    epoch = begin(max_worker_restarts=99).open()
    epoch.work(1)
    epoch.fleet.process(0).exits_at = {(0, 2)}
    assert epoch.take() == expected(1)[0]
    while epoch.engine.failure is None:
        epoch.fleet.process(0).exits_at = {(0, 2)}
        epoch.await_one()
    assert len(epoch.fleet.killed) == KILLS
    assert "SystemExit in batch 2" in str(epoch.engine.failure)
    assert any("batch 2, worker 0" in note for note in epoch.engine.failure.__notes__)
    assert epoch.take() == expected(2)[1], "what has come is still given"
    with pytest.raises(WorkerDiedError):
        epoch.take()
    with pytest.raises(WorkerDiedError):
        epoch.take()


def test_more_deaths_in_a_row_than_allowed_end_the_epoch_whatever_it_was_doing(begin):
    epoch = begin(max_worker_restarts=2).open()
    epoch.fleet.works = False
    for death in range(3):
        assert epoch.engine.failure is None, death
        epoch.fleet.process(1).dies()
        epoch.await_one()
    assert epoch.engine.failure is not None
    assert epoch.tally.restarts == 2


def test_finishing_a_task_forgives_the_deaths_before(begin):
    epoch = begin(1, 20, max_worker_restarts=1).open()
    for _ in range(5):
        epoch.take()
        epoch.fleet.process(0).dies()
        epoch.await_one()
    assert epoch.take_all() == expected(20, 1)
    assert epoch.tally.restarts == 5


def test_a_process_that_cannot_start_is_replaced(begin):
    epoch = begin().open()
    epoch.fleet.works = epoch.fleet.new_runs = False
    first = epoch.fleet.process(0)
    first.dies()
    epoch.await_one()
    second = epoch.fleet.process(0)
    second.cannot_start = True
    epoch.fleet.works = epoch.fleet.new_runs = True
    assert epoch.take_all() == expected(12)
    assert epoch.fleet.killed == [first, second]


def test_a_successor_that_takes_its_time_is_awaited(begin):
    epoch = begin().open()
    epoch.fleet.works = False
    epoch.fleet.new_runs = False
    epoch.fleet.process(0).dies()
    epoch.await_one()
    successor = epoch.fleet.process(0)
    for _ in range(3):
        epoch.await_one()
    assert successor.log == []
    successor.comes()
    epoch.fleet.works = True
    assert epoch.take_all() == expected(12)


# ---- late answers


def test_after_a_task_that_has_ended_the_process_nothing_more_of_it_counts(begin):
    epoch = begin().open()
    epoch.fleet.works = False
    process = epoch.fleet.process(0)
    process.exits_at = {(0, 0)}
    assert process.work(2) == 2, "it goes on although it said that it would not"
    epoch.hear()
    assert not epoch.schedule.untaken
    assert [task.digest for task in epoch.fleet.workers[0].journal.tasks] == [None, None]
    epoch.hear()
    epoch.fleet.works = True
    assert epoch.take_all() == expected(12)


@pytest.mark.parametrize("together", [True, False])
def test_answers_after_the_end_are_ignored_however_they_arrive(begin, together):
    epoch = begin().open()
    epoch.fleet.works = False
    process = epoch.fleet.process(0)
    process.exits_at = {(0, 0)}
    process.work()
    if not together:
        epoch.hear()
    process.work()
    epoch.await_one()
    assert epoch.tally.restarts == 1
    epoch.fleet.works = True
    assert epoch.take_all() == expected(12)


def test_an_answer_that_comes_twice_counts_once(begin):
    epoch = begin().open()
    process = epoch.fleet.process(0)
    process.work(1)
    epoch.fleet.mail *= 3
    epoch.hear()
    assert [task.task_id for task in epoch.schedule.untaken] == [0]
    assert epoch.take_all() == expected(12)


def test_after_closing_nothing_counts(begin):
    epoch = begin().open()
    epoch.fleet.works = False
    epoch.fleet.process(0).work(2)
    epoch.engine.close()
    epoch.engine._take()
    assert epoch.schedule.untaken == []
    assert [task.digest for task in epoch.fleet.workers[0].journal.tasks] == [None, None]
    with pytest.raises(RaySessionError, match="ended"):
        epoch.take()
    assert not epoch.engine.finished


# ---- rebuilding


def rebuilding(begin, length=40):
    """A worker that has lost its process after ten batches, none of which a snapshot spares."""
    epoch = begin(1, length)
    epoch.fleet.snapshot_every = 1000
    epoch.open()
    for _ in range(10):
        epoch.take()
    epoch.fleet.works = False
    epoch.fleet.slice = 2
    epoch.fleet.process(0).dies()
    epoch.await_one()
    return epoch


def test_what_was_built_is_rebuilt_in_order_before_anything_new(begin):
    epoch = rebuilding(begin)
    epoch.fleet.works = True
    assert epoch.take_all() == expected(40, 1)
    rebuilt = [task_id for _, task_id in epoch.fleet.rebuilt]
    assert rebuilt[:10] == list(range(10))
    assert rebuilt == list(range(len(rebuilt)))
    (process,) = epoch.fleet.hosts
    kinds = [message[0] for message in process.log]
    assert kinds.index("run") > kinds.index("rebuild")


def test_the_progress_of_a_long_rebuilding_is_told_and_less_and_less_often(begin, caplog):
    epoch = rebuilding(begin)
    told = []
    while epoch.fleet.workers[0].rebuilding is not None:
        epoch.fleet.clock.now += REBUILDING_PATIENCE_S
        epoch.engine.flush()
        epoch.work(0)
        told.append(sum("is rebuilding earlier batches" in message for message in caplog.messages))
    assert told[0] == 0
    assert told[1] == 1
    assert told[-1] < len(told) - 1
    assert "worker 0 is rebuilding earlier batches: 4 of" in caplog.text


def test_a_process_that_dies_while_it_rebuilds_blames_no_task(begin):
    epoch = rebuilding(begin)
    assert epoch.schedule._kills == {10: 1}
    for _ in range(2):
        epoch.engine.flush()
        epoch.work(0)
        epoch.fleet.process(0).dies()
        epoch.await_one()
    assert epoch.schedule._kills == {10: 1}
    epoch.fleet.works = True
    assert epoch.take_all() == expected(40, 1)


def test_news_of_the_arena_reach_it(begin):
    epoch = begin()
    epoch.fleet.news = {"full": True, "no_arena": "no file"}
    epoch.open()
    epoch.take()
    assert epoch.fleet.process(0).full
    assert set(epoch.fleet.process(0).refusals) == {"no file"}


# ---- lines that are refused, processes that find no place


def test_where_a_line_is_refused_the_worker_begins_again_over_another_channel(begin):
    epoch = begin().open()
    epoch.work(0)
    process = epoch.fleet.process(0)
    process.refuses_line()
    assert epoch.take_all() == expected(12)
    assert process.no_line == "as planned"
    assert not epoch.fleet.killed
    assert epoch.tally.restarts == 0


@pytest.mark.parametrize("pin", [None, lambda batch: batch], ids=["alone", "with a thread that works ahead"])
def test_a_process_that_waits_for_a_place_in_vain_is_an_error(begin, monkeypatch, pin):
    epoch = begin(pin=pin).open()
    epoch.fleet.works = False
    epoch.await_one()
    epoch.fleet.new_runs = False
    epoch.fleet.process(0).dies()
    epoch.fleet.hopeless = WorkerStartError("as planned")
    monkeypatch.setattr(AheadThread, "wait", lambda self, timeout: False)  # it has waited, and nothing has come
    with pytest.raises(WorkerStartError, match="as planned"):
        epoch.take_all()  # what was built before comes first


# ---- timeouts


def test_a_batch_that_is_overdue_is_named(begin):
    epoch = begin(timeout=5.0).open()
    epoch.fleet.works = False
    with pytest.raises(BatchTimeoutError, match=r"timed out after 5.0 seconds waiting for batch 0, worker 0"):
        epoch.take()
    assert 5.0 <= sum(epoch.fleet.waits) < 5.0 + 2 * LOOK_S
    epoch.fleet.works = True
    assert epoch.take_all() == expected(12), "and it may be waited for again"


def test_any_answer_begins_the_time_again(begin):
    epoch = begin(timeout=5.0).open()
    epoch.fleet.works = False
    wait, waited = epoch.fleet.wait, []

    def noting(timeout: float) -> bool:
        waited.append(timeout)
        if len(waited) == 4:
            epoch.fleet.process(1).work()
        return wait(timeout)

    epoch.fleet.wait = noting
    with pytest.raises(BatchTimeoutError):
        epoch.take()
    assert sum(waited) >= 5.0 + 3 * LOOK_S


def test_the_time_for_a_process_to_start_does_not_count(begin):
    epoch = begin(timeout=5.0).open()
    epoch.fleet.works, epoch.fleet.new_runs = False, False
    epoch.fleet.process(0).dies()
    wait, waited = epoch.fleet.wait, []

    def noting(timeout: float) -> bool:
        waited.append(timeout)
        if len(waited) == 30:
            epoch.fleet.process(0).comes()
        return wait(timeout)

    epoch.fleet.wait = noting
    with pytest.raises(BatchTimeoutError):
        epoch.take()
    assert 34 <= len(waited) <= 38


@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_a_worker_that_hangs_is_replaced_if_that_was_asked_for(begin, scheduling):
    epoch = begin(timeout=5.0, on_timeout="restart", scheduling=scheduling).open()
    epoch.fleet.batch = lambda worker_id, epoch, position, indices: indices
    epoch.fleet.works = False
    hung = [epoch.fleet.process(0)] if scheduling == "static" else []
    wait = epoch.fleet.wait

    def noting(timeout: float) -> bool:
        epoch.fleet.works = bool(epoch.fleet.killed)
        return wait(timeout)

    epoch.fleet.wait = noting
    assert epoch.take_all() == [[n] for n in range(12)]
    assert not hung or epoch.fleet.killed == hung
    assert epoch.tally.restarts >= 1


# ---- the end of an epoch, and the next one


def test_closing_twice_does_no_harm_and_wakes_whoever_waits(begin):
    epoch = begin().open()
    for _ in range(2):
        epoch.engine.close()
        assert epoch.fleet.rung


def test_what_waits_is_in_the_journal_of_a_worker_that_is_away(begin):
    epoch = begin().open()
    epoch.fleet.works, epoch.fleet.new_runs = False, False
    epoch.fleet.process(0).dies()
    epoch.await_one()
    epoch.engine.close(resuming=True)
    assert [task.task_id for task in epoch.fleet.workers[0].journal.entries] == [0, 2]
    assert epoch.fleet.process(0).log == []


def stream_ends(length: int, taken: int, num_workers: int = 2, prefetch_factor: int = PREFETCH_FACTOR) -> list[int]:
    """How many batches each of torch's workers has built when an epoch ends after so many."""
    drawn = min(length, taken + prefetch_factor * num_workers)
    return [len(range(n, drawn, num_workers)) for n in range(num_workers)]


@pytest.mark.parametrize("taken", [0, 1, 5, 12, 30])
@pytest.mark.parametrize("dies", ["nobody", "before", "after"])
def test_the_next_epoch_continues_where_torchs_workers_would(begin, taken, dies):
    length = 30
    first = begin(2, length).open()
    first.fleet.random = random.Random(taken)
    for _ in range(taken):
        first.take()
    if dies == "before":
        first.fleet.process(0).dies()
    second = begin(2, length, before=first).open()
    if dies == "after":
        second.fleet.process(0).dies()
    ends = stream_ends(length, taken)
    assert second.take_all() == [[n % 2, 1, ends[n % 2] + n // 2, n] for n in range(length)]
    assert [batch[:3] for batch in first.got] == [[n % 2, 0, n // 2] for n in range(taken)]


@pytest.mark.parametrize("ends", ["exits", "dies"])
def test_a_process_whose_end_has_come_when_the_epoch_is_closed_has_no_part_in_the_next(begin, ends):
    first = begin(2, 30).open()
    first.fleet.works = False
    process = first.fleet.process(0)
    if ends == "exits":
        process.exits_at = {(0, 0)}
        process.work(2)
    else:
        process.dies()
    first.hear()
    second = begin(2, 30, before=first).open()
    assert first.fleet.killed == [process]
    second.fleet.works = True
    process.exits_at.clear()
    assert second.take_all() == [[n % 2, 1, 2 + n // 2, n] for n in range(30)]


@pytest.mark.parametrize("together", [False, True])
def test_a_process_that_exits_after_the_epoch_was_closed_is_replaced_in_the_next(begin, together):
    first = begin(2, 30).open()
    first.fleet.works = False
    process = first.fleet.process(0)
    process.exits_at = {(0, 2)}
    second = begin(2, 30, before=first).open()
    if together:
        process.work(10)  # it goes on, also in the next epoch
    second.fleet.works = True
    assert second.take_all() == [[n % 2, 1, 2 + n // 2, n] for n in range(30)]
    assert first.fleet.killed == [process]
    assert second.schedule._kills == {}, "no task of this epoch has ended it"


@pytest.mark.parametrize("scheduling", ["static", "dynamic"])
def test_what_the_thread_that_works_ahead_hears_last_is_not_lost(begin, monkeypatch, scheduling):
    options = {"pin": lambda batch: batch, "forks": True, "scheduling": scheduling}
    first = begin(2, 8, **options).open()
    assert [batch[3] for batch in first.take_all()] == [*range(8)]
    process = first.fleet.process(0)
    process.dies()
    monkeypatch.setattr(AheadThread, "close", hears(first, AheadThread.close))
    second = begin(2, 8, before=first, **options).open()
    assert first.fleet.killed == [process]
    assert [batch[3] for batch in second.take_all()] == [*range(8)]


def hears(epoch: Epoch, close: Callable[..., None]) -> Callable[..., None]:
    """The thread takes in what has come when it is being ended."""

    def hear_and_close(self: AheadThread, **how: bool) -> None:
        epoch.hear()
        close(self, **how)

    return hear_and_close


def test_the_thread_that_works_ahead_waits_for_workers_without_a_task_to_begin(begin):
    first = begin(2, 1, pin=lambda batch: batch).open()
    assert len(first.take_all()) == 1
    second = begin(2, 1, before=first, pin=lambda batch: batch).open()
    for _ in range(5):
        if not all(worker.journal.begun for worker in second.fleet.workers):
            second.await_one()
    assert [worker.journal.begun for worker in second.fleet.workers] == [True, True]


def test_where_there_was_no_other_process_to_be_had_there_may_be_one_later(begin, monkeypatch):
    epoch = begin(1).open()
    epoch.take()

    def refuse(worker: Any) -> bool:
        raise WorkerStartError("as planned")

    monkeypatch.setattr(epoch.fleet, "replace", refuse)
    epoch.fleet.process(0).dies()
    for _ in range(2):
        with pytest.raises(WorkerStartError, match="as planned"):
            epoch.take_all()
    monkeypatch.undo()
    monkeypatch.setattr(engine_module, "time", epoch.fleet.clock)
    monkeypatch.setattr(fleet_module, "time", epoch.fleet.clock)
    assert epoch.take_all() == expected(12, 1)


def test_late_answers_of_the_epoch_before_are_not_this_ones(begin):
    first = begin(2, 30).open()
    first.fleet.works = False
    second = begin(2, 30, before=first).open()
    for worker_id in (0, 1):
        first.fleet.process(worker_id).work(2)  # still of the first
    second.hear()
    assert not second.schedule.untaken
    assert [worker.journal.begun for worker in second.fleet.workers] == [False, False]
    second.fleet.works = True
    second.engine.note_begins()
    assert [worker.journal.begun for worker in second.fleet.workers] == [True, True]
    assert second.take_all() == [[n % 2, 1, 2 + n // 2, n] for n in range(30)]


# ---- samples that were skipped


def test_skipped_samples_are_counted_and_an_empty_batch_is_passed_over(begin, caplog):
    epoch = begin(on_error="skip", max_skipped=3)
    skipped = (("7", "ValueError: bad"),)
    epoch.fleet.outcome = lambda task_id: (
        Answer(task_id, ResultKind.EMPTY, skipped=skipped) if task_id in (2, 3, 8) else None
    )
    epoch.open()
    assert [batch[-1] for batch in epoch.take_all()] == [n for n in range(12) if n not in (2, 3, 8)]
    assert epoch.tally.skipped == epoch.position.skipped == 3
    assert epoch.position.next_task == 12
    assert caplog.text.count("skipped sample 7: ValueError: bad") == 3


def test_too_many_skipped_samples_are_an_error_and_the_batch_counts_as_given(begin):
    epoch = begin(on_error="skip", max_skipped=1)
    epoch.fleet.outcome = lambda task_id: (
        Answer(task_id, ResultKind.EMPTY, skipped=(("7", "bad"),)) if task_id in (2, 5) else None
    )
    epoch.open()
    for _ in range(4):
        epoch.take()
    with pytest.raises(SkipLimitError):
        epoch.take()
    assert epoch.position.next_task == 6
    assert not epoch.engine.broken


# ---- the thread that works ahead


def test_there_is_no_thread_where_nothing_is_to_be_prepared(begin):
    epoch = begin().open()
    epoch.take()
    assert not [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]
    assert epoch.engine._ahead is None
    assert epoch.fleet.read_count == 0


def test_the_thread_begins_when_something_has_to_be_copied(begin):
    epoch = begin(length=30).open()
    epoch.take()
    epoch.fleet.copies = True
    epoch.fleet.uses_store = True
    assert epoch.engine._ahead is None
    epoch.fleet.works = True
    assert epoch.take_all() == expected(30)
    assert epoch.engine._ahead is not None


def test_batches_are_pinned_in_the_thread_and_in_order(begin):
    pinned_in = set()

    def pin(batch: Any) -> Any:
        pinned_in.add(threading.current_thread().name)
        return ("pinned", batch)

    epoch = begin(pin=pin, length=30).open()
    assert epoch.take_all() == [("pinned", batch) for batch in expected(30)]
    assert pinned_in == {"rayloader-ahead"}


def test_what_pinning_raises_comes_in_its_turn(begin):
    def pin(batch: Any) -> Any:
        if batch[-1] == 3:
            raise KeyError("as planned")
        return batch

    epoch = begin(pin=pin).open()
    for number in range(3):
        assert epoch.take()[-1] == number
    with pytest.raises(KeyError, match="as planned"):
        epoch.take()
    assert epoch.take()[-1] == 4


def test_a_worker_that_dies_while_the_thread_receives_is_replaced_by_the_users_thread(begin):
    epoch = begin(pin=lambda batch: batch, length=30).open()
    for _ in range(3):
        epoch.take()
    with epoch.engine.lock:
        epoch.fleet.process(0).dies()
    assert epoch.take_all() == expected(30)
    assert epoch.tally.restarts == 1


# ---- interrupts


class Interrupt(BaseException):
    """What a signal handler raises."""


def raising(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_an_interrupt_within_a_change_breaks_the_epoch_and_one_outside_does_not(begin):
    epoch = begin().open()
    epoch.take()
    wait = epoch.fleet.wait
    epoch.fleet.wait = raising(Interrupt())
    with pytest.raises(Interrupt):
        epoch.take_all()
    assert not epoch.engine.broken
    epoch.fleet.wait = wait
    assert epoch.take_all() == expected(12)


def test_a_change_that_was_left_half_done_is_told_by_next(begin):
    epoch = begin().open()
    epoch.take()
    epoch.fleet.receive = raising(Interrupt())
    with pytest.raises(Interrupt):
        epoch.engine.receive(0.0)
    assert epoch.engine.broken
    assert epoch.position.next_task in (0, 1)
    with pytest.raises(RayloaderError, match="interrupted"):
        epoch.take()
    assert epoch.position.next_task == 1
    epoch.engine.close()


def test_errors_of_ours_within_a_change_leave_it_whole(begin):
    epoch = begin().open()
    epoch.fleet.receive = raising(RaySessionError("as planned"))
    with pytest.raises(RaySessionError):
        epoch.engine.receive(0.0)
    assert not epoch.engine.broken


def test_an_interrupt_while_the_sampler_draws_breaks_the_epoch(begin):
    class Interrupted(Iterator[Any]):
        drawn = 0

        def __next__(self) -> Any:
            self.drawn += 1
            if self.drawn == 6:
                raise Interrupt
            return [self.drawn - 1]

    epoch = begin(sampler=Interrupted()).open()
    epoch.take()
    with pytest.raises(Interrupt):
        epoch.take()
    assert epoch.engine.broken


def test_a_batch_remains_the_next_until_it_was_handed_over(begin):
    epoch = begin().open()
    task = epoch.engine.next()
    assert epoch.engine.next() is task
    assert epoch.position.next_task == 0
    epoch.position.handed = task
    assert epoch.engine.next() is not task
    assert epoch.position.next_task == 1


@pytest.mark.parametrize("where", ["_first", "_end_turn", "_draw_owed"])
def test_an_interrupt_before_the_batch_is_the_users_loses_none(begin, where):
    epoch = begin().open()
    epoch.take()
    own = getattr(epoch.engine, where)

    def once(*args: Any) -> Any:
        setattr(epoch.engine, where, own)
        raise Interrupt

    setattr(epoch.engine, where, once)
    with pytest.raises(Interrupt):
        epoch.take()
    assert not epoch.engine.broken
    assert epoch.take_all() == expected(12)


@pytest.mark.parametrize(("was_interrupted", "error"), [(True, "interrupted"), (False, "a fault of rayloader")])
def test_where_something_was_lost_next_does_not_wait_for_ever(begin, was_interrupted, error):
    epoch = begin().open()
    epoch.fleet.works = False
    for worker in epoch.schedule._workers:
        worker.unanswered.clear()
    epoch.engine.was_interrupted = was_interrupted
    with pytest.raises(RayloaderError, match=error):
        epoch.take()


def test_the_end_of_the_session_is_told(begin):
    epoch = begin().open()
    epoch.take()
    epoch.fleet.ended = "Ray was shut down"
    with pytest.raises(RaySessionError, match="shut down"):
        epoch.take_all()


# ---- everything at once


class Story:
    """Random builds, losses, refused lines and takes; whatever happens, each batch comes once and in order."""

    def __init__(self, begin, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.begin = begin
        self.num_workers = rng.choice([1, 2, 3, 4])
        self.kind = kind = rng.choice(["map", "map", "stream", "dynamic"])
        self.in_order = rng.random() < 0.8
        self.prefetch_factor = rng.choice([1, PREFETCH_FACTOR, PREFETCH_FACTOR, 9])
        self.lengths = [rng.choice([0, 1, 5, 12]) for _ in range(self.num_workers)]  # of streams
        self.length = sum(self.lengths) if kind == "stream" else rng.choice([1, 7, 30, 60])
        forks = rng.random() < 0.6
        self.options = {
            "iterable": kind == "stream",
            "in_order": self.in_order,
            "prefetch_factor": self.prefetch_factor,
            "scheduling": "dynamic" if kind == "dynamic" else "static",
            "max_worker_restarts": 10_000,
        }
        self.exited: set[tuple[int, int]] = set()  # a task that has ended a process does so once
        self.epoch = begin(
            self.num_workers,
            self.length,
            forks=forks,
            **self.options,
        )
        self.fleet = self.epoch.fleet
        self.fleet.random, self.fleet.slice = rng, rng.choice([1, 3, 100])
        self.fleet.snapshot_every = rng.choice([1, 2, 5, 1000])
        if kind == "stream":
            self.fleet.length = self.lengths.__getitem__
        if kind == "dynamic":
            self.fleet.batch = lambda worker_id, epoch, position, indices: [None, epoch, None, *indices]
        # Of each worker, where its random stream may be at the start of the epoch: from the first to the second number.
        self.positions = [(0, 0)] * self.num_workers
        self.number = 0
        self.epoch.open()

    def step(self) -> bool:
        """One thing happens; False after the last epoch."""
        kinds = {self.take: 30, self.work: 30, self.hear: 10, self.repeats: 3, self.dies: 3, self.exits: 2}
        kinds |= {self.refuses: 1, self.slow: 1, self.next_epoch: 0.7}
        (happens,) = self.rng.choices([*kinds], [*kinds.values()])
        goes_on = happens() is not False
        for actor in self.fleet.hosts:
            if actor.may_come and not actor.is_dead and self.rng.random() < 0.3:
                actor.comes()
        self.epoch.check()
        return goes_on

    def any_process(self) -> Process:
        return self.fleet.process(self.rng.randrange(self.num_workers))

    def work(self) -> None:
        self.epoch.engine.flush()
        self.any_process().work(self.rng.randint(1, 4))

    def hear(self) -> None:
        self.epoch.hear()

    def repeats(self) -> None:
        answers = [mail for mail in self.fleet.mail if isinstance(mail[1], tuple) and mail[1][0] == Up.ANSWER]
        if answers:
            self.fleet.mail.append(self.rng.choice(answers))

    def dies(self) -> None:
        """One process, or two at once. Not so often that a task becomes hopeless: it would end the epoch, rightly."""
        kills = max(self.epoch.schedule._kills.values(), default=0)
        exits = [actor for actor in self.fleet.hosts if actor.exits_at]
        if exits or kills > DEATHS - 3 or len(self.fleet.killed) > 60:
            return
        for process in dict.fromkeys(self.any_process() for _ in range(self.rng.choice([1, 1, 2]))):
            if not process.is_dead:
                process.work(self.rng.randint(0, 2))
                process.dies()

    def exits(self) -> None:
        waits = [actor for actor in self.fleet.hosts if actor.exits_at or actor.is_dead]
        if self.length and not waits and not self.epoch.schedule._kills:
            process = self.any_process()
            process.exits_at = {(self.number, self.rng.randrange(self.length))} - self.exited
            self.exited |= process.exits_at

    def refuses(self) -> None:
        if not self.fleet.forks:
            self.any_process().refuses_line()

    def slow(self) -> None:
        self.fleet.new_runs = not self.fleet.new_runs

    def take(self) -> bool:
        self.fleet.new_runs = True
        for actor in self.fleet.hosts:
            actor.runs = True
            if actor.may_come and not actor.is_dead:
                actor.comes()
        number = len(self.epoch.got)
        try:
            batch = self.epoch.take()
        except StopIteration:
            assert number == self.length
            return self.next_epoch()
        worker_id, epoch, position, index = batch
        assert epoch == self.number
        if self.kind == "stream":
            if self.in_order:
                rounds = [(n, k) for n in range(max(self.lengths)) for k in range(self.num_workers)]
                assert worker_id == [k for n, k in rounds if n < self.lengths[k]][number]
        else:
            assert index == number if self.in_order else [b[3] for b in self.epoch.got].count(index) == 1
        if self.kind != "dynamic":
            assert worker_id == index % self.num_workers if self.kind == "map" and self.in_order else True
            first = position - self.taken_of(worker_id) + 1
            low, high = self.positions[worker_id]
            assert low <= first <= high
            self.positions[worker_id] = first, first
        return True

    def taken_of(self, worker_id: int) -> int:
        return sum(batch[0] == worker_id for batch in self.epoch.got)

    def built(self, worker_id: int) -> tuple[int, int]:
        """How many batches torch's worker has built by now, at least and at most."""
        taken = self.taken_of(worker_id)
        if len(self.epoch.got) == self.length and (self.kind == "stream" or not self.in_order):
            return taken, taken
        if self.kind == "map" and self.in_order:
            ends = stream_ends(self.length, len(self.epoch.got), self.num_workers, self.prefetch_factor)
            return ends[worker_id], ends[worker_id]
        return taken, self.lengths[worker_id] if self.kind == "stream" else self.length

    def next_epoch(self) -> bool:
        if self.number == 3:
            return False
        self.meanwhile()
        built = map(self.built, range(self.num_workers))
        self.positions = [
            (low + least, high + most) for (low, high), (least, most) in zip(self.positions, built, strict=True)
        ]
        self.number += 1
        self.epoch = self.begin(
            self.num_workers, self.length, before=self.epoch, meanwhile=self.meanwhile, **self.options
        ).open()
        self.meanwhile()
        return True

    def meanwhile(self) -> None:
        """At some moment between two epochs."""
        for happens in self.rng.choices([self.dies, self.hear, self.work, lambda: None], k=2):
            if happens != self.hear or not self.epoch.schedule.closed:  # then nobody listens
                happens()


@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(40, 500))])
def test_whatever_happens_every_batch_comes_once_and_in_order(begin, seed):
    story = Story(begin, seed)
    for _ in range(3000):
        if not story.step():
            return
    while story.take():
        story.epoch.check()
