"""What the command line recommends, from given rates."""

import pytest

from rayloader.cli.rates import Rate, fastest, for_step, numbers_of_workers


def rates(**batches):
    return [Rate(int(name[1:]), 1.0, rate, 0.5) for name, rate in batches.items()]


@pytest.mark.parametrize(
    ("most", "numbers"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])]
)
def test_numbers_of_workers_double_up_to_the_most(most, numbers):
    assert list(numbers_of_workers(most)) == numbers


@pytest.mark.parametrize(
    ("measured", "number", "reason"),
    [
        (rates(n0=10.0), 0, "10.0 batches a second with no workers, the most of those tried"),
        (
            rates(n0=100.0, n1=90.0),
            0,
            "100.0 batches a second with no workers, the most of those tried",
        ),
        (rates(n0=10.0, n1=19.5, n2=20.0), 1, "19.5 batches a second with 1 worker, 98% of the rate with 2 workers"),
        (
            rates(n0=10.0, n1=20.0, n2=39.0),
            2,
            "39.0 batches a second with 2 workers, the most of those tried",
        ),
        (
            rates(n0=1.0, n4=50.0, n8=40.0),
            4,
            "50.0 batches a second with 4 workers, the most of those tried",
        ),
    ],
)
def test_the_fewest_workers_that_are_about_as_fast_as_any(measured, number, reason):
    assert fastest(measured) == (number, reason)


def test_for_a_step_the_fewest_workers_with_which_the_trainer_hardly_waits():
    measured = [Rate(0, 1.0, 10.0, 0.6), Rate(1, 1.0, 15.0, 0.1), Rate(2, 1.0, 20.0, 0.01)]
    assert for_step(measured, 0.05) == (2, "with 2 workers a trainer of 50 ms a step waits 1.0% of its time")
    assert for_step(measured[:2], 0.05) == (
        1,
        "even with 1 worker a trainer of 50 ms a step waits 10% of its time: try more workers, or make the samples "
        "cheaper",
    )
    assert for_step([*measured[:2], Rate(2, 1.0, 14.0, 0.2)], 0.05) == (
        1,
        "even with 1 worker a trainer of 50 ms a step waits 10% of its time: more workers did not help; make the "
        "samples cheaper",
    )
