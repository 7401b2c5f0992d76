"""`skip_steps`: what it names, when it is read, and what comes too late."""

import pytest

from rayloader.rebuild import AllBut
from rayloader.task import SkipSteps, steps_in


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (None, set()),
        ([], set()),
        ([3, (1, 4), [2, 5]], {(0, 3), (1, 4), (2, 5)}),
        (range(2), {(0, 0), (0, 1)}),
    ],
)
def test_numbers_are_steps_of_the_first_epoch_and_pairs_of_any(given, steps):
    assert steps_in(given) == steps


@pytest.mark.parametrize("given", [5, [1.5], ["3"], [(1, 2, 3)], [None], [True], [(1, True)]])
def test_what_is_no_step_is_refused(given):
    with pytest.raises(TypeError, match="skip_steps must hold numbers of steps, or pairs"):
        steps_in(given)


@pytest.mark.parametrize("given", [[-1], [(0, -1)], [(-1, 0)]])
def test_steps_and_epochs_count_from_0(given):
    with pytest.raises(ValueError, match="numbers of steps and epochs >= 0"):
        steps_in(given)


def test_what_a_state_has_is_skipped_too():
    skips = SkipSteps([7], known=[(0, 2)], at=(0, 5))
    assert skips.steps == {(0, 2), (0, 7)}
    assert [step for step in range(10) if skips.has((0, step))] == [2, 7]


def test_an_entry_that_comes_too_late_is_told_once_and_has_no_effect():
    with pytest.warns(
        UserWarning, match="names step 2 of epoch 0 and 1 more, but the run is at step 5 of epoch 0"
    ) as told:
        skips = SkipSteps([2, 3, 5], at=(0, 5))
    assert len(told) == 1
    assert skips.steps == {(0, 5)}
    assert not skips.has((0, 2))


def test_an_epoch_that_is_dealt_out_anew_forgets_its_steps():
    skips = SkipSteps([(0, 1), (1, 2)])
    with pytest.warns(UserWarning, match="the rest of epoch 0 is dealt out to another number of ranks"):
        skips.forget(0)
    assert skips.steps == {(1, 2)}


def test_what_is_not_needed_is_skipped():
    skips = AllBut({2, 4}, end=5, worker_id=1)
    assert [step for step in range(6) if not skips.has((3, step))] == [2, 4]
    assert (skips.end, skips.only_worker) == (5, 1)
    assert skips.steps == set()
