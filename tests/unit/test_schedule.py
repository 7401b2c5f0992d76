"""The schedule by exact command lists, and by random event sequences."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayloader.epoch.messages import (
    ANY_WORKER,
    TRANSITIONS,
    BatchTaken,
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
    TaskDone,
    TaskState,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)
from rayloader.epoch.schedule import AHEAD, DEATHS, KILLS, Schedule


def in_words(commands: list[Command]) -> list[tuple[object, ...]]:
    """Commands as plain tuples that a test can write down."""
    words: list[tuple[object, ...]] = []
    for command in commands:
        match command:
            case DrawIndices(count):
                words.append(("draw", count))
            case Submit(task):
                words.append(("submit", task.worker_id, (task.task_id, task.indices)))
            case Deliver(task):
                words.append(("deliver", task.task_id))
            case Forget(task_ids):
                words.append(("forget", *task_ids))
            case Drop(worker_id, first_task_id):
                words.append(("drop", worker_id, first_task_id))
            case ReplaceWorker(worker_id, cause):
                words.append(("replace", worker_id, cause))
            case Fail(worker_id, cause, lost):
                words.append(("fail", worker_id, cause, None if lost is None else lost.task_id))
    return words


def opened(num_workers: int, prefetch_factor: int, *, in_order: bool = True, draw: int | None = None) -> Schedule:
    """An opened schedule whose window is filled with indices 'i0', 'i1', ..."""
    schedule = Schedule(num_workers, prefetch_factor, in_order=in_order)
    assert in_words(schedule.handle(Opened())) == [("draw", num_workers * prefetch_factor)]
    for i in range(num_workers * prefetch_factor if draw is None else draw):
        (submit,) = schedule.handle(IndicesDrawn(f"i{i}"))
        assert in_words([submit]) == [("submit", i % num_workers, (i, f"i{i}"))]
    return schedule


def done(schedule: Schedule, *task_ids: int) -> list[Command]:
    """The commands of answers that bring these tasks."""
    return [command for task_id in task_ids for command in schedule.handle(TaskDone(task_id))]


def test_fills_the_window_round_robin_when_opened():
    schedule = opened(num_workers=3, prefetch_factor=2)
    assert [(task.task_id, task.worker_id) for task in schedule.outstanding] == [
        (0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2),
    ]  # fmt: skip


def test_delivers_in_task_order_whatever_comes_first():
    schedule = opened(num_workers=2, prefetch_factor=2)
    assert done(schedule, 1) == []
    assert done(schedule, 3) == []
    assert in_words(done(schedule, 0)) == [("deliver", 0), ("deliver", 1)]
    assert in_words(done(schedule, 2)) == [("deliver", 2), ("deliver", 3)]


def test_one_call_may_answer_several_tasks():
    schedule = opened(num_workers=2, prefetch_factor=2)
    assert in_words(done(schedule, 0, 2)) == [("deliver", 0)]
    assert in_words(done(schedule, 1)) == [("deliver", 1), ("deliver", 2)]


def test_draws_one_for_each_batch_taken():
    schedule = opened(num_workers=2, prefetch_factor=1)
    done(schedule, 0, 1)
    assert in_words(schedule.handle(BatchTaken(0))) == [("draw", 1)]
    assert in_words(schedule.handle(IndicesDrawn("next"))) == [("submit", 0, (2, "next"))]
    assert in_words(schedule.handle(BatchTaken(1))) == [("draw", 1)]
    assert schedule.handle(SamplerExhausted()) == []
    assert not schedule.finished
    assert in_words(done(schedule, 2)) == [("deliver", 2)]
    assert schedule.handle(BatchTaken(2)) == []
    assert schedule.finished


def test_an_empty_sampler_finishes_at_once():
    schedule = opened(num_workers=2, prefetch_factor=2, draw=0)
    assert not schedule.finished
    assert schedule.handle(SamplerExhausted()) == []
    assert schedule.finished
    assert schedule.head is None


def test_a_failing_sampler_leaves_a_smaller_window_and_ends_with_it():
    schedule = opened(num_workers=1, prefetch_factor=2)
    done(schedule, 0, 1)
    assert in_words(schedule.handle(BatchTaken(0))) == [("draw", 1)]
    assert schedule.handle(SamplerFailed()) == []
    assert not schedule.finished
    assert in_words(schedule.handle(BatchTaken(1))) == [("draw", 1)]
    assert not schedule.finished
    assert schedule.handle(SamplerFailed()) == []
    assert schedule.finished


def test_fewer_batches_than_workers():
    schedule = opened(num_workers=4, prefetch_factor=2, draw=1)
    schedule.handle(SamplerExhausted())
    assert in_words(done(schedule, 0)) == [("deliver", 0)]
    assert schedule.handle(BatchTaken(0)) == []
    assert schedule.finished


def test_an_exhausted_worker_leaves_the_rotation_with_its_tasks():
    schedule = opened(num_workers=3, prefetch_factor=2)
    assert in_words(schedule.handle(WorkerExhausted(0))) == [("forget", 0, 3)]
    assert in_words(done(schedule, 1)) == [("deliver", 1)]
    assert in_words(schedule.handle(BatchTaken(1))) == [("draw", 1)]
    assert in_words(schedule.handle(IndicesDrawn(None))) == [("submit", 1, (6, None))]
    assert in_words(done(schedule, 2)) == [("deliver", 2)]
    schedule.handle(BatchTaken(2))
    assert in_words(schedule.handle(IndicesDrawn(None))) == [("submit", 2, (7, None))]


def test_exhaustion_that_is_told_before_an_earlier_answer_loses_nothing():
    schedule = opened(num_workers=2, prefetch_factor=3)
    assert in_words(schedule.handle(WorkerExhausted(4))) == [("forget", 4)]
    assert in_words(schedule.handle(WorkerExhausted(2))) == [("forget", 2)]
    assert in_words(done(schedule, 0)) == [("deliver", 0)]
    assert in_words(done(schedule, 1)) == [("deliver", 1)]
    assert in_words(done(schedule, 3)) == [("deliver", 3)]


def test_exhaustion_of_the_head_delivers_what_was_ready_behind_it():
    schedule = opened(num_workers=2, prefetch_factor=1)
    assert done(schedule, 1) == []
    assert in_words(schedule.handle(WorkerExhausted(0))) == [("forget", 0), ("deliver", 1)]


def test_finishes_when_every_worker_is_exhausted():
    schedule = opened(num_workers=2, prefetch_factor=2)
    schedule.handle(WorkerExhausted(0))
    assert not schedule.finished
    schedule.handle(WorkerExhausted(1))
    assert schedule.finished


def test_without_order_delivers_what_comes():
    schedule = opened(num_workers=2, prefetch_factor=1, in_order=False)
    assert in_words(done(schedule, 1)) == [("deliver", 1)]
    assert in_words(schedule.handle(BatchTaken(1))) == [("draw", 1)]
    # worker 0 is next in the cycle, but it holds its share of the window
    assert in_words(schedule.handle(IndicesDrawn("i2"))) == [("submit", 1, (2, "i2"))]
    assert in_words(done(schedule, 0)) == [("deliver", 0)]


def test_without_order_an_exhausted_workers_places_are_drawn_anew():
    schedule = opened(num_workers=2, prefetch_factor=2, in_order=False)
    assert in_words(schedule.handle(WorkerExhausted(0))) == [("forget", 0, 2), ("draw", 2)]
    assert in_words(schedule.handle(IndicesDrawn(None))) == [("submit", 1, (4, None))]


@pytest.mark.parametrize("in_order", [True, False])
def test_indices_that_come_when_every_worker_is_exhausted_stand_for_nothing(in_order):
    schedule = opened(num_workers=2, prefetch_factor=2, in_order=in_order)
    done(schedule, 0)
    assert in_words(schedule.handle(BatchTaken(0))) == [("draw", 1)]
    schedule.handle(WorkerExhausted(2))
    schedule.handle(WorkerExhausted(1))
    while schedule.owed_draws:
        assert schedule.handle(IndicesDrawn(None)) == []
    assert schedule.finished


def test_a_lost_worker_fails_the_epoch_and_names_its_first_lost_task():
    schedule = opened(num_workers=2, prefetch_factor=2)
    done(schedule, 1)
    assert in_words(schedule.handle(WorkerLost(1, "killed"))) == [("fail", 1, "killed", 3)]
    assert schedule.handle(WorkerLost(1, "killed")) == []


def test_the_loss_of_an_exhausted_worker_does_not_matter():
    schedule = opened(num_workers=2, prefetch_factor=1)
    schedule.handle(WorkerExhausted(0))
    assert schedule.handle(WorkerLost(0, "killed")) == []


def test_an_exhausted_workers_loss_matters_while_an_earlier_task_is_unanswered():
    schedule = opened(num_workers=1, prefetch_factor=2)
    schedule.handle(WorkerExhausted(1))
    assert in_words(schedule.handle(WorkerLost(0, "killed"))) == [("fail", 0, "killed", 0)]


def test_news_of_dropped_or_answered_tasks_is_passed_over():
    schedule = opened(num_workers=2, prefetch_factor=1)
    schedule.handle(WorkerExhausted(0))
    assert done(schedule, 0) == []
    assert in_words(done(schedule, 1)) == [("deliver", 1)]
    assert done(schedule, 1) == []


def test_closing_forgets_everything_and_ends_all_news():
    schedule = opened(num_workers=2, prefetch_factor=1)
    done(schedule, 0)
    assert in_words(schedule.handle(Closed())) == [("forget", 0, 1)]
    assert schedule.closed
    assert done(schedule, 1) == []
    assert schedule.handle(Closed()) == []


def test_closing_moves_each_task_to_gone_whatever_its_state():
    schedule = Schedule(2, 4, dynamic=True, max_restarts=1)
    schedule.handle(Opened())
    draw(schedule, 8)
    done(schedule, 0, 2)
    schedule.handle(WorkerLost(1, "killed"))
    tasks = schedule.tasks
    assert {task.state for task in tasks} == set(TaskState) - {TaskState.GONE}
    schedule.handle(Closed())
    assert {task.state for task in tasks} == {TaskState.GONE}
    assert schedule.tasks == ()
    schedule.validate()


def test_closed_and_finished_are_different_answers():
    schedule = opened(num_workers=1, prefetch_factor=1, draw=1)
    schedule.handle(SamplerExhausted())
    done(schedule, 0)
    schedule.handle(Closed())
    assert schedule.closed
    assert not schedule.finished  # the last batch was not taken
    schedule = opened(num_workers=1, prefetch_factor=1, draw=0)
    schedule.handle(SamplerExhausted())
    schedule.handle(Closed())
    schedule.handle(Closed())
    assert schedule.closed
    assert schedule.finished


def draw(schedule: Schedule, count: int) -> list[tuple[object, ...]]:
    """The commands of so many draws of nothing in particular."""
    return [word for _ in range(count) for word in in_words(schedule.handle(IndicesDrawn(None)))]


def paced(worker_id: int, depth: int, ahead: int = AHEAD) -> Paced:
    return Paced(worker_id, depth, ahead)


def test_an_elastic_window_follows_the_pace():
    schedule = Schedule(2, 2, elastic=True)
    assert in_words(schedule.handle(Opened())) == [("draw", 4)]
    draw(schedule, 4)
    assert in_words(schedule.handle(paced(0, 12))) == [("draw", 20)]
    assert schedule.window == 24
    assert schedule.handle(paced(1, 9)) == []
    draw(schedule, 20)
    assert schedule.handle(paced(0, 9)) == []  # 6 too many now: so many batches are not replaced
    done(schedule, *range(8))
    drawn = [bool(schedule.handle(BatchTaken(task_id))) for task_id in range(8)]
    assert drawn == [False] * 6 + [True] * 2


def test_a_fixed_window_does_not_follow_the_pace():
    schedule = opened(num_workers=2, prefetch_factor=2)
    assert schedule.handle(paced(0, 6)) == []
    assert schedule.window == 4


def test_workers_that_go_on_finish_what_torchs_would_have():
    schedule = Schedule(2, 2, elastic=True)
    schedule.handle(Opened())
    draw(schedule, 4)
    done(schedule, 0, 1)
    schedule.handle(paced(0, 9))
    schedule.handle(BatchTaken(0))
    assert draw(schedule, 14)[0] == ("submit", 0, (4, None))
    assert schedule.torch_draws == 5
    # Of worker 0 torch's loader would have submitted 0 (taken), 2 and 4; of worker 1: 1 and 3.
    assert in_words(schedule.handle(Closed(resuming=True)))[:2] == [("drop", 0, 6), ("drop", 1, 5)]


def test_a_fixed_window_holds_just_what_torchs_would():
    schedule = opened(num_workers=2, prefetch_factor=2)
    assert in_words(schedule.handle(Closed(resuming=True))) == [("forget", 0, 1, 2, 3)]


def test_any_worker_takes_the_next_task():
    schedule = Schedule(2, 3, dynamic=True)
    schedule.handle(Opened())
    assert draw(schedule, 6) == [("submit", w, (task, None)) for task, w in enumerate([0, 1, 0, 1])]
    assert schedule.head is not None
    # Worker 1 is quick: what queues goes to it, and comes in order all the same.
    assert in_words(done(schedule, 1)) == [("submit", 1, (4, None))]
    assert in_words(done(schedule, 3)) == [("submit", 1, (5, None))]
    assert in_words(done(schedule, 0)) == [("deliver", 0), ("deliver", 1)]


def test_a_quick_worker_is_given_more_of_the_tasks_for_any_before_it_has_answered():
    schedule = Schedule(2, 4, dynamic=True)
    schedule.handle(Opened())
    draw(schedule, 8)
    assert in_words(schedule.handle(paced(1, 0, ahead=5))) == [("submit", 1, (task, None)) for task in (4, 5, 6)]
    assert in_words(done(schedule, 0)) == [("deliver", 0), ("submit", 0, (7, None))]


def test_a_task_that_is_nobodys_yet_is_not_lost_with_a_worker():
    schedule = Schedule(1, 4, dynamic=True)
    schedule.handle(Opened())
    draw(schedule, 4)
    assert in_words(schedule.handle(WorkerLost(0, "killed"))) == [("fail", 0, "killed", 0)]
    states = [(task.worker_id, task.state) for task in schedule.outstanding]
    assert states == [(0, TaskState.LOST)] * 2 + [(ANY_WORKER, TaskState.QUEUED)] * 2


def test_a_lost_worker_is_replaced_and_its_tasks_go_with_its_calls():
    schedule = Schedule(2, 2, max_restarts=1)
    schedule.handle(Opened())
    draw(schedule, 4)
    done(schedule, 1)
    assert in_words(schedule.handle(WorkerLost(1, "killed"))) == [("replace", 1, "killed")]
    assert schedule.handle(WorkerReady(1)) == []
    assert in_words(done(schedule, 0, 3)) == [("deliver", 0), ("deliver", 1)]
    assert in_words(schedule.handle(WorkerLost(1, "killed"))) == [("replace", 1, "killed")]  # it had finished one
    assert in_words(schedule.handle(WorkerLost(1, "killed"))) == [("fail", 1, "killed", None)]


@pytest.mark.parametrize(("admitted", "times"), [(True, KILLS), (False, DEATHS)])
def test_a_task_that_kills_its_worker_again_and_again_alone_is_at_fault(admitted, times):
    schedule = Schedule(2, 2, max_restarts=100)
    schedule.handle(Opened())
    draw(schedule, 4)
    for _ in range(times - 1):
        lost = WorkerLost(0, "killed", suspect=2, admitted=admitted)
        assert in_words(schedule.handle(lost)) == [("replace", 0, "killed")]
        schedule.handle(WorkerReady(0))
    assert in_words(schedule.handle(lost)) == [("fail", 0, "killed", 2)]


def test_two_kills_from_outside_do_not_blame_the_batch_that_they_strike():
    schedule = Schedule(1, 2, max_restarts=3)
    schedule.handle(Opened())
    draw(schedule, 2)
    for _ in range(3):
        assert in_words(schedule.handle(WorkerLost(0, "killed", suspect=0))) == [("replace", 0, "killed")]
        schedule.handle(WorkerReady(0))
    assert in_words(done(schedule, 0)) == [("deliver", 0)]


def test_whoever_is_blameless_may_be_lost_ever_so_often():
    schedule = Schedule(1, 2, max_restarts=0)
    schedule.handle(Opened())
    draw(schedule, 2)
    for _ in range(5):
        assert in_words(schedule.handle(WorkerLost(0, "moved", blameless=True))) == [("replace", 0, "moved")]
        assert schedule.handle(WorkerReady(0)) == []


def test_a_worker_without_a_process_gets_none_of_the_tasks_for_any():
    schedule = Schedule(2, 2, dynamic=True, max_restarts=3)
    schedule.handle(Opened())
    draw(schedule, 4)
    schedule.handle(WorkerLost(0, "killed"))
    done(schedule, 1, 3)
    assert schedule.handle(WorkerReady(0)) == []
    done(schedule, 0)
    schedule.handle(BatchTaken(0))
    assert draw(schedule, 1) == [("submit", 1, (4, None))]


def deep(num_workers: int = 2, **options: bool) -> Schedule:
    """One that has drawn further ahead than torch would, and submitted all of that one by one."""
    schedule = Schedule(num_workers, 1, elastic=True, **options)
    schedule.handle(Opened())
    draw(schedule, num_workers)
    for worker_id in range(num_workers):
        schedule.handle(paced(worker_id, 4))
    draw(schedule, 3 * num_workers)
    return schedule


def test_draws_that_are_put_off_come_when_torch_would_draw():
    schedule = deep()
    done(schedule, *range(8))
    assert in_words(schedule.handle(BatchTaken(0))) == [("draw", 1)]
    assert schedule.handle(DrawsPutOff()) == []
    assert (schedule.owed_draws, schedule.window) == (0, 2)
    for task_id in range(1, 6):
        assert schedule.handle(BatchTaken(task_id)) == []
    assert schedule.torch_draws == 8
    assert in_words(schedule.handle(BatchTaken(6))) == [("draw", 1)]
    assert schedule.handle(paced(0, 12)) == []  # it does not grow again


def test_draws_undone_are_gone_whatever_their_state_and_come_again_at_torchs_moments():
    schedule = deep()
    done(schedule, 0, 1, 2, 4, 5)  # 0 to 2 delivered, 4 and 5 ready, 3, 6 and 7 outstanding
    schedule.handle(WorkerLost(1, "killed", blameless=True))
    schedule.handle(BatchTaken(0))
    assert in_words(schedule.handle(DrawsUndone(2))) == [("forget", 2, 3, 4, 5, 6, 7), ("draw", 1)]
    assert [task.task_id for task in schedule.tasks] == [1]
    assert schedule.handle(WorkerReady(1)) == []
    assert schedule.handle(WorkerLost(0, "moved", blameless=True)) != []
    assert schedule.handle(WorkerReady(0)) == []
    assert draw(schedule, 1) == [("submit", 0, (2, None))]
    assert in_words(schedule.handle(BatchTaken(1))) == [("draw", 1)]
    assert draw(schedule, 1) == [("submit", 1, (3, None))]


def test_draws_undone_are_drawn_again_though_the_sampler_had_ended():
    schedule = deep(1, dynamic=True)
    schedule.handle(SamplerExhausted())
    done(schedule, 0)
    schedule.handle(BatchTaken(0))
    assert in_words(schedule.handle(DrawsUndone(1))) == [("forget", 1, 2, 3), ("draw", 1)]
    assert not schedule.finished


def test_a_stream_that_ended_in_a_draw_that_is_undone_has_not_ended():
    schedule = deep()
    done(schedule, 0, 1)
    schedule.handle(WorkerExhausted(2))
    schedule.handle(BatchTaken(0))
    assert in_words(schedule.handle(DrawsUndone(2))) == [("forget", 3, 5, 7), ("draw", 1)]
    schedule.handle(WorkerLost(0, "moved", blameless=True))
    schedule.handle(WorkerReady(0))
    assert draw(schedule, 1) == [("submit", 0, (2, None))]


def test_an_epoch_goes_on_where_another_was_and_leaves_out_what_is_done():
    schedule = Schedule(2, 1, first_task_id=5, first_worker_id=1)
    assert in_words(schedule.handle(Opened())) == [("draw", 2)]
    assert draw(schedule, 1) == [("submit", 1, (5, None))]
    assert in_words(schedule.handle(IndicesSkipped())) == [("draw", 1)]
    assert draw(schedule, 1) == [("submit", 0, (7, None))]
    assert schedule.torch_draws == 8  # six batches are taken and two are under way


def test_an_impossible_event_is_refused():
    schedule = opened(num_workers=1, prefetch_factor=1)
    with pytest.raises(RuntimeError, match="cannot happen"):
        schedule.handle(BatchTaken(0))


@pytest.mark.parametrize("event", [IndicesDrawn(None), IndicesSkipped(), SamplerFailed()])
def test_a_draw_that_was_not_asked_for_is_refused(event):
    schedule = opened(num_workers=1, prefetch_factor=1)
    with pytest.raises(RuntimeError, match="not asked for"):
        schedule.handle(event)
    schedule.validate()


@pytest.mark.parametrize("event", [IndicesDrawn(None), IndicesSkipped(), SamplerFailed()])
def test_a_draw_that_was_under_way_when_the_epoch_failed_is_passed_over(event):
    """Another thread may report the loss while the user's draws."""
    schedule = opened(num_workers=1, prefetch_factor=2, draw=1)
    assert in_words(schedule.handle(WorkerLost(0, "killed"))) == [("fail", 0, "killed", 0)]
    assert schedule.handle(event) == []
    assert schedule.owed_draws == 0
    assert [task.task_id for task in schedule.tasks] == [0]


def test_an_error_tells_what_happened_before():
    schedule = opened(num_workers=1, prefetch_factor=1)
    with pytest.raises(RuntimeError, match=r"the last events: Opened\(\), IndicesDrawn\(indices='i0'\), BatchTaken"):
        schedule.handle(BatchTaken(0))
    with pytest.raises(RuntimeError, match="not in the table"):
        schedule.handle(BatchTaken(7))


@pytest.mark.parametrize(
    ("attribute", "value", "rule"),
    [
        ("owed_draws", -1, "draws are owed"),
        ("_head_id", 3, "below the head"),
        ("_tasks", {}, "holds its tasks"),
        ("_num_active", 1, "are counted"),
    ],
)
def test_a_schedule_that_has_broken_its_rules_says_which(attribute, value, rule):
    schedule = opened(num_workers=2, prefetch_factor=2)
    schedule.validate()
    setattr(schedule, attribute, value)
    with pytest.raises(RuntimeError, match=rule):
        schedule.validate()


def test_the_table_of_transitions_names_events_and_steps_that_exist():
    steps = {*Event.__args__, Submit, Deliver}  # type: ignore[attr-defined]
    assert {step for row in TRANSITIONS.values() for step in row} <= steps
    assert set(TRANSITIONS) == set(TaskState)


@dataclasses.dataclass
class WorkerModel:
    """A worker that answers its tasks in the order they came, as an actor does."""

    length: int | None  # batches until it is exhausted; None: map-style
    queue: list[int] = dataclasses.field(default_factory=list)
    given: int = 0  # tasks, ever
    away: bool = False
    restarts: int = 0  # since it last finished a task


class AnyOrder(RuleBasedStateMachine):
    """Random interleavings of draws, answers, takings, deaths and closings, against what must hold whatever happens."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule | None = None

    @precondition(lambda self: self.schedule is None)
    @rule(
        num_workers=st.integers(1, 4),
        prefetch_factor=st.integers(1, 3),
        in_order=st.booleans(),
        elastic=st.booleans(),
        dynamic=st.booleans(),
        num_batches=st.integers(0, 25),
        lengths=st.none() | st.lists(st.integers(0, 6), min_size=4, max_size=4),
        max_restarts=st.sampled_from([0, 2, 100]),
        first=st.integers(0, 5),
        skips=st.sets(st.integers(0, 10)),
    )
    def open(
        self, num_workers, prefetch_factor, in_order, elastic, dynamic, num_batches, lengths, max_restarts, first, skips
    ):
        self.schedule = Schedule(
            num_workers,
            prefetch_factor,
            in_order=in_order,
            elastic=elastic and in_order,
            dynamic=dynamic and lengths is None,
            max_restarts=max_restarts,
            first_task_id=first,
            first_worker_id=first % num_workers,
        )
        self.first = self.drawn = first
        self.max_restarts = max_restarts
        self.deepest = prefetch_factor
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
        self.act(Opened())

    def act(self, event: Event) -> None:
        assert self.schedule is not None
        closed = self.schedule.closed
        commands = self.schedule.handle(event)
        self.schedule.validate()
        assert not closed or not commands
        for command in commands:
            match command:
                case DrawIndices(count):
                    self.owed += count
                case Submit(task):
                    worker = self.workers[task.worker_id]
                    self.origin[task.task_id] = task.worker_id, worker.given
                    worker.given += 1
                    if not worker.away:
                        worker.queue.append(task.task_id)
                case Deliver(task):
                    self.deliverable.append(task.task_id)
                case ReplaceWorker(worker_id):
                    self.workers[worker_id].away = True
                case Fail():
                    self.failed = True
                    self.owed = 0
        assert self.schedule.owed_draws == self.owed

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

    @precondition(lambda self: self.schedule and self.schedule.elastic and not self.iterable)
    @rule(depth=st.integers(0, 15))
    def put_draws_off(self, depth):
        """What torch would have drawn by now is drawn before; samplers of streams may always be asked early."""
        self.deepest = max(self.deepest, depth)
        self.act(Paced(0, depth, AHEAD))
        while self.owed and self.drawn < self.schedule.torch_draws:
            self.draw_next()
        if self.owed:
            self.owed = 0
            self.act(DrawsPutOff())

    @precondition(lambda self: self.schedule and self.schedule.elastic and not self.failed and not self.schedule.closed)
    @rule(data=st.data())
    def undo_draws(self, data):
        """The program has changed its sampler: workers forget what was drawn early, and are given other indices."""
        assert self.schedule is not None
        known = [*self.taken, *(task_id for task_id in self.skips if task_id < self.drawn)]
        earliest, latest = max([self.first - 1, *known]) + 1, min(self.drawn, self.schedule.torch_draws) - 1
        if earliest > latest:
            return
        from_task = data.draw(st.integers(earliest, latest))
        self.left_in_sampler += self.drawn - from_task
        self.drawn, self.owed = from_task, 0
        self.deliverable = [task_id for task_id in self.deliverable if task_id < from_task]
        told = {self.origin.pop(task_id)[0]: None for task_id in list(self.origin) if task_id >= from_task}
        for k in told:
            self.workers[k].given = sum(worker_id == k for worker_id, _ in self.origin.values())
            self.workers[k].queue.clear()
        self.answers = [answer for answer in self.answers if answer[0] not in told]
        self.act(DrawsUndone(from_task))
        for k in told:
            self.act(WorkerLost(k, "it was given what was not to come", blameless=True))

    @precondition(lambda self: self.schedule and any(worker.queue for worker in self.workers))
    @rule(data=st.data())
    def build(self, data):
        self.build_next(data.draw(st.sampled_from([k for k, worker in enumerate(self.workers) if worker.queue])))

    def build_next(self, k: int) -> None:
        task_id = self.workers[k].queue.pop(0)
        length = self.workers[k].length
        self.answers.append((k, task_id, length is not None and self.origin[task_id][1] >= length))

    @precondition(lambda self: self.schedule and self.answers)
    @rule(data=st.data())
    def answer(self, data):
        self.tell(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    def tell(self, answer: tuple[int, int, bool]) -> None:
        k, task_id, exhausted = answer
        if any(task.task_id == task_id for task in self.schedule.outstanding) and not exhausted:
            self.workers[k].restarts = 0
        self.act(WorkerExhausted(task_id) if exhausted else TaskDone(task_id))

    @precondition(lambda self: self.schedule)
    @rule(k=st.integers(0, 3), depth=st.integers(0, 15), ahead=st.integers(1, 10))
    def pace(self, k, depth, ahead):
        if k < len(self.workers):
            if self.schedule.elastic:
                self.deepest = max(self.deepest, depth)
            self.act(Paced(k, depth, ahead))

    @precondition(lambda self: self.schedule and self.deliverable)
    @rule()
    def take(self):
        task_id = self.deliverable.pop(0)
        self.taken.append(task_id)
        self.act(BatchTaken(task_id))

    @precondition(lambda self: self.schedule)
    @rule(task_id=st.integers(0, 30))
    def hear_again_of_what_was_taken(self, task_id):
        if task_id in self.taken:
            assert self.schedule.handle(TaskDone(task_id)) == []
            assert self.schedule.handle(WorkerExhausted(task_id)) == []
            self.schedule.validate()

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
        if rarely or k >= len(self.workers):
            return
        worker = self.workers[k]
        suspect = worker.queue[0] if alone and worker.queue and not blameless else None
        had_work = any(t.worker_id == k and t.state is not TaskState.QUEUED for t in self.schedule.outstanding)
        worker.queue.clear()
        self.answers = [answer for answer in self.answers if answer[0] != k]
        worker.restarts += not blameless
        if suspect is not None:
            self.kills[suspect] = self.kills.get(suspect, 0) + 1
        hopeless = worker.restarts > self.max_restarts or self.kills.get(suspect, 0) >= (KILLS if admitted else DEATHS)
        self.act(WorkerLost(k, "killed", suspect, admitted, blameless))
        assert self.failed == hopeless or not had_work
        assert self.failed or worker.away or not had_work

    @precondition(lambda self: self.schedule and any(worker.away for worker in self.workers))
    @rule(data=st.data())
    def replace(self, data):
        self.revive(data.draw(st.sampled_from([k for k, worker in enumerate(self.workers) if worker.away])))

    def revive(self, k: int) -> None:
        """What it had to do it is told again."""
        worker = self.workers[k]
        worker.away = False
        mine = [t for t in self.schedule.outstanding if t.worker_id == k and t.state is not TaskState.QUEUED]
        worker.queue = [task.task_id for task in mine]
        self.act(WorkerReady(k))

    @precondition(lambda self: self.schedule)
    @rule(rarely=st.integers(0, 30), resuming=st.booleans())
    def close(self, rarely, resuming):
        """Whatever is under way, and again and again; the news that is on its way still comes."""
        if rarely:
            return
        assert self.schedule is not None
        finished, tasks = self.schedule.finished, self.schedule.tasks
        self.owed, self.deliverable = 0, []
        self.act(Closed(resuming))
        assert self.schedule.finished == finished
        assert self.schedule.tasks == ()
        assert all(task.state is TaskState.GONE for task in tasks)

    @invariant()
    def the_window_holds(self):
        if self.schedule is not None:
            tasks = self.schedule._tasks.values()
            assert len(tasks) + self.owed <= self.deepest * len(self.workers)
            if self.schedule.in_order and not self.schedule.elastic and not self.schedule.dynamic:
                for k in range(len(self.workers)):
                    assert sum(task.worker_id == k for task in tasks) <= self.prefetch_factor

    @invariant()
    def order_holds_and_nothing_comes_twice(self):
        if self.schedule is not None:
            delivered = self.taken + self.deliverable
            assert len(set(delivered)) == len(delivered)
            if self.schedule.in_order:
                assert delivered == sorted(delivered)

    @invariant()
    def it_never_sticks(self):
        if self.schedule is not None and not (self.schedule.finished or self.schedule.closed or self.failed):
            busy = any(worker.queue or worker.away for worker in self.workers)
            assert self.deliverable or self.answers or busy or self.owed

    def teardown(self):
        """Drain: everything that was built must come out, and then the epoch is finished."""
        if self.schedule is None or self.failed or self.schedule.closed:
            return
        while not self.schedule.finished:
            if self.deliverable:
                self.take()
            elif self.owed:
                self.draw_next()
            else:
                for k, worker in enumerate(self.workers):
                    if worker.away:
                        self.revive(k)
                    if worker.queue:
                        self.build_next(k)
                while self.answers:
                    self.tell(self.answers.pop())
        assert not self.deliverable
        if self.iterable:
            for k, worker in enumerate(self.workers):
                mine = [self.origin[task_id][1] for task_id in self.taken if self.origin[task_id][0] == k]
                assert sorted(mine) == list(range(len(mine) if self.sampler_failed else worker.length or 0))
        else:
            assert sorted(self.taken) == [i for i in range(self.first, self.drawn) if i not in self.skips]
            assert self.left_in_sampler == 0 or self.sampler_failed
            for task_id in self.taken:
                if self.schedule.in_order and not self.schedule.dynamic and not self.skips:
                    assert self.origin[task_id][0] == task_id % len(self.workers)


AnyOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestAnyOrder = AnyOrder.TestCase


def test_the_window_may_shrink_when_a_worker_is_exhausted_whose_tasks_wait_for_the_head():
    schedule = Schedule(1, 1, elastic=True)
    schedule.handle(Opened())
    draw(schedule, 1)
    schedule.handle(paced(0, 3, 1))
    draw(schedule, 2)
    schedule.handle(WorkerExhausted(2))
    assert schedule.handle(paced(0, 0, 1)) == []
    schedule.validate()
