"""How deep a worker's tasks are under way, by what the worker reports."""

from __future__ import annotations

import math

import pytest

from rayloader.epoch.depth import MAX_TASKS_PER_TURN, TURN_SECONDS, TURNS_AHEAD, TURNS_UNDER_WAY, Pace


def settle(pace: Pace, seconds: float, nbytes: int = 0, *, tasks: int = 3000) -> int:
    """The depth after so many tasks that take so long."""
    for _ in range(tasks):
        pace.saw(seconds, nbytes)
    return pace.depth


@pytest.mark.parametrize(("parts", "tasks"), [(4, 4), (20, 20), (1e6, MAX_TASKS_PER_TURN)])
def test_three_turns_are_under_way(parts, tasks):
    reached = settle(Pace(math.inf), TURN_SECONDS / parts)
    assert tasks * 3 / 4 <= reached / TURNS_UNDER_WAY <= tasks


@pytest.mark.parametrize("parts", [0.5, 1])
def test_of_tasks_that_take_a_turn_each_torchs_depth_is_right(parts):
    pace = Pace(math.inf)
    assert settle(pace, TURN_SECONDS / parts) == 0
    assert pace.ahead == TURNS_AHEAD


def test_no_more_bytes_are_under_way_than_may_be():
    assert settle(Pace(3000), 1e-6, nbytes=300) == 9
    assert settle(Pace(3000), 1e-6, nbytes=5000) == 0


def test_where_any_worker_takes_any_task_memory_sets_the_depth():
    pace = Pace(10_000, dynamic=True)
    assert settle(pace, 1.0, nbytes=300) == 33
    assert pace.ahead == TURNS_AHEAD
    assert settle(pace, 1.0, nbytes=1_000_000) == 1
    assert settle(Pace(math.inf, dynamic=True), 1.0) == TURNS_UNDER_WAY * MAX_TASKS_PER_TURN


def test_the_depth_grows_at_most_twofold_a_turn():
    pace, depths = Pace(math.inf), []
    for tasks in (1, 2, 4, 8, 16, 32, 64):
        assert [pace.saw(0.0, 0) for _ in range(tasks)] == [False] * (tasks - 1) + [True]
        depths.append(pace.depth // TURNS_UNDER_WAY)
    assert depths == [2, 4, 8, 16, 32, 64, 128]


def test_one_slow_turn_changes_nothing():
    pace = Pace(math.inf)
    settle(pace, TURN_SECONDS / 8)
    assert not any(pace.saw(100.0, 0) for _ in range(8))


def test_slower_tasks_make_it_shallower():
    pace = Pace(math.inf)
    settle(pace, TURN_SECONDS / 50)
    assert settle(pace, 1.0) == 0


def test_batches_that_grow_make_it_shallower_at_once():
    pace = Pace(1 << 20)
    deep = settle(pace, 1e-6, nbytes=64)
    assert deep == TURNS_UNDER_WAY * MAX_TASKS_PER_TURN
    assert pace.saw(1e-6, 1 << 18)
    assert pace.depth <= 4
