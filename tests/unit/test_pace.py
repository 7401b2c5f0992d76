"""How many tasks a call carries, by what the worker reports."""

from __future__ import annotations

import math

import pytest

from rayloader.pace import CALL_SECONDS, MAX_TASKS_PER_CALL, STEADY_CALLS, Pace


def settle(pace: Pace, seconds: float, nbytes: int = 0, *, publishes: bool = True, calls: int = 40) -> int:
    """The tasks per call after so many calls of tasks that take so long."""
    for _ in range(calls):
        count = pace.tasks_per_call
        pace.saw(count, count * seconds, count * nbytes, publishes=publishes)
    return pace.tasks_per_call


@pytest.mark.parametrize(("parts", "tasks"), [(0.5, 1), (1, 1), (4, 4), (20, 20), (1e6, MAX_TASKS_PER_CALL)])
def test_a_call_takes_its_time(parts, tasks):
    reached = settle(Pace(math.inf), CALL_SECONDS / parts)
    assert tasks * 3 / 4 <= reached <= tasks


def test_a_call_brings_no_more_bytes_than_it_may():
    assert settle(Pace(3000), 1e-6, nbytes=300) == 3
    assert settle(Pace(3000), 1e-6, nbytes=5000) == 1


def test_where_any_worker_takes_any_task_memory_sets_the_depth():
    pace = Pace(10_000, dynamic=True)
    settle(pace, 1.0, nbytes=300)
    assert (pace.tasks_per_call, pace.places) == (1, 33)
    settle(pace, 1.0, nbytes=1_000_000)
    assert pace.places == 1


def test_the_depth_is_three_calls_where_there_are_calls_of_several():
    pace = Pace(math.inf)
    assert settle(pace, 1.0) == 1
    assert pace.places == 0
    settle(pace, 1e-6)
    assert pace.places == 3 * MAX_TASKS_PER_CALL


def test_calls_grow_at_most_twofold_and_begin_with_one_task():
    pace, sizes = Pace(math.inf), []
    for _ in range(8):
        sizes.append(pace.tasks_per_call)
        assert pace.saw(sizes[-1], 0.0, 0, publishes=True) == (pace.tasks_per_call != sizes[-1])
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128]


def test_no_more_tasks_than_allowed():
    assert settle(Pace(math.inf, max_tasks=3), 1e-6) == 3


def test_one_slow_call_changes_nothing():
    pace = Pace(math.inf)
    before = settle(pace, CALL_SECONDS / 8)
    assert not pace.saw(before, 100.0, 0, publishes=True)


def test_slower_tasks_make_shorter_calls():
    pace = Pace(math.inf)
    settle(pace, CALL_SECONDS / 50)
    assert settle(pace, 1.0) == 1


def test_a_call_that_did_nothing_says_nothing():
    assert not Pace(math.inf).saw(0, 1.0, 0, publishes=True)


def test_who_cannot_publish_carries_one_task_until_its_times_are_steady():
    pace = Pace(math.inf)
    assert settle(pace, 1e-4, publishes=False, calls=STEADY_CALLS - 1) == 1
    assert settle(pace, 1e-4, publishes=False) > 1
    pace.saw(1, 1.0, 0, publishes=False)
    assert pace.tasks_per_call == 1
