"""The global random generators, captured, put back, and rewound over tasks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rayloader.random_state import RandomState, Rewind

DRAWS = {"python": random.random, "torch": lambda: torch.rand(1).item(), "numpy": np.random.rand}


@pytest.fixture(autouse=True)
def same_after():
    before = RandomState.capture()
    yield
    before.restore()


def draw_all():
    return [draw() for draw in DRAWS.values()] + [random.gauss(0, 1), np.random.randn()]


def test_what_was_captured_comes_again():
    draw_all()
    state = RandomState.capture()
    first = draw_all()
    state.restore()
    assert draw_all() == first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_makes_another_state(draw):
    before = RandomState.capture()
    assert before == RandomState.capture()
    draw()
    assert before != RandomState.capture()


def run(rewind, calls, noise):
    """What the tasks drew, by task; calls are lists of tasks."""
    drawn = {}
    for tasks in calls:
        for task in tasks:
            rewind.task_begins(task)
            if noise:
                drawn[task] = draw_all()
        rewind.call_ends()
    return drawn


@pytest.mark.parametrize("undo_from", [0, 2, 4, 5, 6, 8, 10, 12])
def test_tasks_are_undone(undo_from):
    rewind = Rewind(100)
    drawn = run(rewind, [[0], [2, 4], [6, 8, 10]], noise=True)
    here = RandomState.capture()
    rewind.undo_from(undo_from)
    undone = [task for task in drawn if task >= undo_from]
    if undone:
        assert draw_all() == drawn[undone[0]]
    else:
        assert here == RandomState.capture()


def test_without_noise_there_is_nothing_to_undo():
    rewind = Rewind(100)
    here = RandomState.capture()
    run(rewind, [[0], [1, 2, 3], [4, 5]], noise=False)
    rewind.undo_from(2)
    assert here == RandomState.capture()


def test_it_begins_anew():
    rewind = Rewind(100)
    run(rewind, [[0], [1]], noise=True)
    rewind.undo_from(None)
    here = RandomState.capture()
    rewind.undo_from(0)
    assert here == RandomState.capture()
