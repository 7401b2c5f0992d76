"""One epoch of the engine on the fake fleet: what the stories (test_stories.py) can't show, and what users are told."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from fake_fleet import Epoch, Process, expected
from rayloader import BatchTimeoutError, RayloaderError, SkipLimitError, WorkerDiedError, WorkerStartError
from rayloader.epoch import engine as engine_module
from rayloader.epoch.ahead import AheadThread
from rayloader.epoch.engine import LOOK_S, REBUILDING_PATIENCE_S
from rayloader.epoch.schedule import DEATHS, KILLS
from rayloader.errors import RaySessionError
from rayloader.protocol import Answer, ResultKind
from rayloader.workers import fleet as fleet_module

THREAD = "rayloader-ahead"


def ahead() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture
def begin(monkeypatch):
    """Begins epochs, whose time is that of the first one's fleet, and proves that none leaves a thread."""
    made: list[Epoch] = []

    def make(*args: Any, works: bool = True, **options: Any) -> Epoch:
        epoch = Epoch(*args, **options)
        made.append(epoch)
        for module in (engine_module, fleet_module):
            monkeypatch.setattr(module, "time", epoch.world.clock)
        epoch.world.works = works
        return epoch.open()

    yield make
    for epoch in made:
        epoch.close()
    assert ahead() == []


class Interrupt(BaseException):
    """What a signal handler raises."""


def raising(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def drawing(error: BaseException):
    """The sampler of eleven batches, whose sixth draw raises."""
    drawn = iter([[0], [1], [2], [3], [4], error, [5], [6], [7], [8], [9], [10], None])

    def draw() -> Any:
        if (indices := next(drawn)) is error:
            raise error
        return indices

    return iter(draw, None)


# ---- drawing and waiting


@pytest.mark.parametrize(("error", "broken"), [(KeyError("as planned"), False), (Interrupt("as planned"), True)])
def test_what_a_draw_raises_comes_in_a_batchs_place_and_an_interrupt_there_breaks_the_epoch(begin, error, broken):
    epoch = begin(sampler=drawing(error))
    epoch.take()
    with pytest.raises(type(error), match="as planned"):
        epoch.take()
    assert epoch.engine.broken == broken
    if not broken:
        assert epoch.take_all() == [expected(11)[0], *expected(11)[2:]], "the error has taken the place of a batch"


def test_time_without_news_is_counted_and_apart_where_a_finished_batch_waits_for_an_earlier_one(begin):
    epoch = begin(works=False)
    epoch.await_one()  # the workers have begun
    epoch.await_one()
    assert (epoch.tally.blocked, epoch.tally.behind) == (LOOK_S, 0.0)
    epoch.work(1)
    epoch.world.came = False
    epoch.await_one()
    epoch.process(0).work()
    assert [epoch.take(), epoch.take()] == expected(2)
    assert (epoch.tally.blocked, epoch.tally.behind) == (2 * LOOK_S, LOOK_S)


# ---- losses


def test_a_worker_that_dies_goes_on_from_its_last_snapshot_which_is_told(begin, caplog):
    epoch = begin(1, 30)
    for _ in range(10):
        epoch.take()
    epoch.process(0).dies()
    assert epoch.take_all() == expected(30, 1)
    assert epoch.world.rebuilt == [9]
    assert "worker 0 is lost and gets another process: as planned" in caplog.text


def exits(process: Process) -> None:
    process.exits_at.add((0, 0))
    process.work()


@pytest.mark.parametrize(
    ("ends", "restarts", "times", "cause"),
    [
        (Process.dies, 99, DEATHS, "as planned"),
        (exits, 99, KILLS, "SystemExit in batch 0"),
        (Process.dies, 2, 3, "as planned"),
    ],
    ids=["dies at one task", "says that the task has ended it", "dies in a row"],
)
def test_an_epoch_that_cannot_go_on_gives_what_has_come_and_then_says_why(begin, ends, restarts, times, cause):
    epoch = begin(max_worker_restarts=restarts, works=False)
    for death in range(times):
        assert epoch.engine.failure is None, death
        process = epoch.process(0)
        while process.inbox and process.inbox[0][0] != "run":  # until it is at its oldest task
            process.step()
            epoch.hear()
            epoch.engine.flush()
        ends(process)
        epoch.await_one()
    assert epoch.tally.restarts == times - 1
    failure = epoch.engine.failure
    (note,) = failure.__notes__
    assert failure.worker_id == 0
    assert cause in str(failure)
    assert (note[:22], note[-11:]) == ("batch 0, worker 0 (pid", "indices [0]")
    for _ in range(2):
        with pytest.raises(WorkerDiedError):
            epoch.take()


@pytest.fixture
def rebuilding(begin):
    """A worker that has lost its process after ten batches, none of which a snapshot spares."""
    epoch = begin(1, 40)
    epoch.world.snapshot_every = 1000
    for _ in range(10):
        epoch.take()
    epoch.world.works, epoch.world.slice = False, 2
    epoch.process(0).dies()
    epoch.await_one()
    return epoch


def test_the_progress_of_a_long_rebuilding_is_told_and_less_and_less_often(rebuilding, caplog):
    told = []
    while rebuilding.world.workers[0].rebuilding is not None:
        rebuilding.world.clock.now += REBUILDING_PATIENCE_S
        rebuilding.work(0)
        told.append(sum("is rebuilding earlier batches" in message for message in caplog.messages))
    assert told[:2] == [0, 1]
    assert told[-1] < len(told) - 1
    assert "worker 0 is rebuilding earlier batches: 4 of 10 in 10 s, 0.2 a second" in caplog.text


def test_a_process_that_dies_while_it_rebuilds_blames_no_task(rebuilding):
    for _ in range(2):
        rebuilding.work(0)
        rebuilding.process(0).dies()
        rebuilding.await_one()
    assert rebuilding.schedule._kills == {10: 1}


def test_news_of_the_arena_reach_it_and_measurements_know_the_lane(begin):
    epoch = begin()
    epoch.world.news = {"full": True, "no_arena": "no file"}
    epoch.take()
    assert epoch.process(0).full
    assert set(epoch.process(0).refusals) == {"no file"}
    assert (epoch.tally.workers[0].lane, epoch.tally.workers[0].process) == ("line", "fork")


@pytest.mark.parametrize("pin", [None, lambda batch: batch], ids=["alone", "with a thread that works ahead"])
def test_a_process_that_waits_for_a_place_in_vain_is_an_error(begin, monkeypatch, pin):
    epoch = begin(pin=pin, works=False)
    epoch.await_one()
    epoch.world.new_runs = False
    epoch.process(0).dies()
    epoch.world.hopeless = WorkerStartError("as planned")
    monkeypatch.setattr(AheadThread, "wait", lambda self, timeout: False)  # it has waited, and nothing has come
    with pytest.raises(WorkerStartError, match="as planned"):
        epoch.take_all()  # what was built before comes first


@pytest.mark.parametrize(("what", "kind"), [("lend", WorkerStartError), ("check", RaySessionError)])
def test_where_there_was_no_other_process_to_be_had_or_no_session_there_may_be_one_later(begin, what, kind):
    epoch = begin(1)
    epoch.take()
    own = getattr(epoch.world, what)
    setattr(epoch.world, what, raising(kind("as planned")))
    epoch.process(0).dies()
    for _ in range(2):
        with pytest.raises(kind, match="as planned"):
            epoch.take_all()
    setattr(epoch.world, what, own)
    assert epoch.take_all() == expected(12, 1)


# ---- timeouts


@pytest.mark.parametrize(
    ("at", "happens", "waits"),
    [
        (0, Process.comes, 5),
        (4, Process.work, 9),  # any answer begins the time again
        (30, Process.comes, 35),  # the time for a process to start does not count
    ],
)
def test_a_batch_that_is_overdue_is_named_and_may_be_waited_for_again(begin, at, happens, waits):
    epoch = begin(timeout=5.0, works=False)
    epoch.world.new_runs = False
    if at == 30:
        epoch.process(0).dies()
    wait, count = epoch.world.wait, itertools.count(1)

    def waiting(timeout: float) -> bool:
        if next(count) == at:
            happens(epoch.process(at == 4))
        return wait(timeout)

    epoch.world.wait = waiting
    with pytest.raises(BatchTimeoutError, match=r"timed out after 5.0 seconds waiting for batch 0, worker 0"):
        epoch.take()
    assert waits < next(count) <= waits + 4
    epoch.world.works = True
    assert epoch.take_all() == expected(12)


def test_a_worker_that_hangs_is_replaced_if_that_was_asked_for(begin):
    epoch = begin(timeout=5.0, on_timeout="restart", works=False)
    hung, kill = epoch.process(0), epoch.world.kill

    def kill_and_work(process: Process) -> None:
        epoch.world.works = True
        kill(process)

    epoch.world.kill = kill_and_work
    assert epoch.take_all() == expected(12)
    assert epoch.world.killed == [hung]
    assert epoch.tally.restarts == 1


# ---- the next epoch


def test_a_process_that_exits_after_the_epoch_was_closed_blames_no_task_of_the_next(begin):
    first = begin(2, 30, works=False)
    process = first.process(0)
    process.exits_at = {(0, 2)}
    second = begin(2, 30, before=first, works=False)
    process.work(10)  # it goes on, also in the next epoch
    first.world.works = True
    assert second.take_all() == expected(30, epoch=1, first=2)
    assert first.world.killed == [process]
    assert second.schedule._kills == {}


def test_what_the_thread_that_works_ahead_hears_last_is_not_lost(begin, monkeypatch):
    options = {"pin": lambda batch: batch, "forks": True}
    first = begin(2, 8, **options)
    assert [batch[3] for batch in first.take_all()] == [*range(8)]
    process, close = first.process(0), AheadThread.close
    process.dies()

    def hear_and_close(self: AheadThread, **how: bool) -> None:
        """The thread takes in what has come when it is being ended."""
        first.hear()
        close(self, **how)

    monkeypatch.setattr(AheadThread, "close", hear_and_close)
    second = begin(2, 8, before=first, **options)
    assert first.world.killed == [process]
    assert [batch[3] for batch in second.take_all()] == [*range(8)]


@pytest.mark.parametrize("pin", [None, lambda batch: batch])
def test_workers_without_a_task_are_awaited_until_they_have_begun(begin, pin):
    first = begin(2, 1, pin=pin)
    assert len(first.take_all()) == 1
    second = begin(2, 1, before=first, pin=pin)
    second.engine.note_begins()
    assert [worker.journal.begun for worker in second.world.workers] == [True, True]


# ---- samples that were skipped


def test_skipped_samples_are_counted_and_too_many_are_an_error_whose_batch_counts_as_given(begin, caplog):
    epoch = begin(on_error="skip", max_skipped=2)
    skipped = (("7", "ValueError: bad"),)
    epoch.world.outcome = lambda task_id: (
        Answer(task_id, ResultKind.EMPTY, skipped=skipped) if task_id in (2, 3, 8) else None
    )
    with pytest.raises(SkipLimitError):
        epoch.take_all()
    assert [batch[-1] for batch in epoch.got] == [0, 1, 4, 5, 6, 7]
    assert epoch.tally.skipped == epoch.position.skipped == 3
    assert epoch.position.next_task == 9
    assert not epoch.engine.broken
    assert caplog.text.count("skipped sample 7: ValueError: bad") == 3
    assert [batch[-1] for batch in epoch.take_all()[6:]] == [9, 10, 11]


# ---- the thread that works ahead


def test_the_thread_begins_when_something_has_to_be_copied(begin):
    epoch = begin(length=30)
    epoch.take()
    assert (ahead(), epoch.world.read_count) == ([], 0)
    epoch.world.copies = epoch.world.uses_store = True
    assert epoch.take_all() == expected(30)
    assert epoch.engine._ahead is not None


def test_batches_are_pinned_in_the_thread_in_order_whoever_dies_and_what_that_raises_comes_in_its_turn(begin):
    pinned_in = set()

    def pin(batch: Any) -> Any:
        pinned_in.add(threading.current_thread().name)
        if batch[-1] == 7:
            raise KeyError("as planned")
        return ("pinned", batch)

    epoch = begin(pin=pin, length=30)
    for _ in range(3):
        epoch.take()
    with epoch.engine.lock:
        epoch.process(0).dies()
    with pytest.raises(KeyError, match="as planned"):
        epoch.take_all()
    assert len(epoch.got) == 7
    assert epoch.take_all() == [("pinned", batch) for batch in expected(30) if batch[-1] != 7]
    assert epoch.tally.restarts == 1
    assert pinned_in == {THREAD}


# ---- interrupts


def test_a_batch_remains_the_next_until_it_was_handed_over(begin):
    epoch = begin()
    task = epoch.engine.next()
    assert epoch.engine.next() is task
    assert epoch.position.next_task == 0
    epoch.position.handed = task
    assert epoch.engine.next() is not task
    assert epoch.position.next_task == 1


@pytest.mark.parametrize("where", ["wait", "_first", "_end_turn", "_draw_owed"])
def test_an_interrupt_outside_a_change_loses_no_batch(begin, where):
    epoch = begin()
    epoch.take()
    owner = epoch.world if where == "wait" else epoch.engine
    own = getattr(owner, where)

    def once(*args: Any) -> Any:
        setattr(owner, where, own)
        raise Interrupt

    setattr(owner, where, once)
    with pytest.raises(Interrupt):
        epoch.take_all()
    assert not epoch.engine.broken
    assert epoch.take_all() == expected(12)


@pytest.mark.parametrize(("error", "broken"), [(Interrupt(), True), (RaySessionError("as planned"), False)])
def test_an_interrupt_within_a_change_is_told_by_next_and_errors_of_ours_leave_it_whole(begin, error, broken):
    epoch = begin()
    epoch.take()
    receive, epoch.world.receive = epoch.world.receive, raising(error)
    with pytest.raises(type(error)):
        epoch.engine.receive(0.0)
    assert epoch.engine.broken == broken
    epoch.world.receive = receive
    if broken:
        with pytest.raises(RayloaderError, match="interrupted"):
            epoch.take()
        assert epoch.position.next_task == 1
    else:
        assert epoch.take_all() == expected(12)


@pytest.mark.parametrize(("was_interrupted", "error"), [(True, "interrupted"), (False, "a fault of rayloader")])
def test_where_something_was_lost_next_does_not_wait_for_ever(begin, was_interrupted, error):
    epoch = begin(works=False)
    for worker in epoch.schedule._workers:
        worker.unanswered.clear()
    epoch.engine.was_interrupted = was_interrupted
    with pytest.raises(RayloaderError, match=error):
        epoch.take()
