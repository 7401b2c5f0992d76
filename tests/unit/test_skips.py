"""`skip_steps`: what it names, when it is read, and what comes too late."""

import os

import pytest

from rayloader.resume.skips import AllBut, SkipSteps, steps_in


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


@pytest.mark.parametrize(
    ("content", "steps"),
    [
        ("", set()),
        ("3\n", {(0, 3)}),
        ("3", {(0, 3)}),
        ("# a spike\n 2:48213 # this one\n\n1 7\n0, 5\n", {(2, 48213), (1, 7), (0, 5)}),
    ],
)
def test_a_file_has_a_step_in_each_line(tmp_path, content, steps):
    (tmp_path / "skip.txt").write_text(content)
    assert steps_in(tmp_path / "skip.txt") == steps
    assert steps_in(str(tmp_path / "skip.txt")) == steps


@pytest.mark.parametrize("given", [5, [1.5], ["3"], [(1, 2, 3)], [None], [True], [(1, True)]])
def test_what_is_no_step_is_refused(given):
    with pytest.raises(TypeError, match="skip_steps must hold numbers of steps, or pairs"):
        steps_in(given)


@pytest.mark.parametrize("given", [[-1], [(0, -1)], [(-1, 0)]])
def test_steps_and_epochs_count_from_0(given):
    with pytest.raises(ValueError, match="numbers of steps and epochs >= 0"):
        steps_in(given)


@pytest.mark.parametrize("line", ["three", "1:2:3", "-4", "1.5"])
def test_a_line_that_is_no_step_is_named(tmp_path, line):
    (tmp_path / "skip.txt").write_text(f"3\n{line}\n")
    with pytest.raises(ValueError, match=f"got '{line}' in line 2"):
        steps_in(tmp_path / "skip.txt")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        steps_in(tmp_path / "skip.txt")


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


def test_a_growing_file_is_read_again(tmp_path):
    path = tmp_path / "skip.txt"
    path.write_text("1\n")
    skips = SkipSteps(path, follows=True)
    assert [skips.has((0, step)) for step in range(3)] == [False, True, False]
    with path.open("a") as file:
        file.write("4\n48")  # and somebody is about to write the rest of the line
    assert [skips.has((0, step)) for step in (3, 4, 48)] == [False, True, False]
    with path.open("a") as file:
        file.write("213\n2\n")
    with pytest.warns(UserWarning, match="names step 2 of epoch 0, but the run is at step 5"):
        assert not skips.has((0, 5))
    assert skips.has((0, 48213))


@pytest.mark.parametrize("spoil", ["a line that is no step", "no file"])
def test_a_file_that_is_spoiled_while_the_run_goes_on_is_told_and_stays_as_it_was(tmp_path, spoil):
    path = tmp_path / "skip.txt"
    path.write_text("4\n")
    skips = SkipSteps(path, follows=True)
    path.unlink() if spoil == "no file" else path.write_text("4\nfive\n")
    with pytest.warns(UserWarning, match="could not be read again, and stays as it was"):
        assert skips.has((0, 4))
    assert not skips.has((0, 5))
    path.write_text("4\n6\n")
    assert skips.has((0, 6))


def test_one_of_several_ranks_reads_a_file_only_at_the_start(tmp_path):
    path = tmp_path / "skip.txt"
    path.write_text("1\n")
    skips = SkipSteps(path, follows=False)
    path.write_text("1\n4\n")
    os.utime(path, (1, 1))
    assert not skips.has((0, 4))


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
