"""torchdata's StatefulDataLoader: where its import is changed to rayloader's DataLoader, the program stays as it is."""

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from framework_data import Numbers
from torchdata_cases import STATES, TURNS, Squares, run

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which its constructor calls
]

# What `make test` runs: without workers it takes no time, and with them the chief cases.
CHIEF = {"states, stream whose iterator has a state, 2", "turns, sample, 2"}
# Where torchdata's loader loses its place: the epoch after one that has ended is empty there.
LOST = {"states, its own sampler, 0": {"after 11"}}


def names(given):
    is_full = [name not in CHIEF and not name.endswith(", 0") for name in given]
    marked = [pytest.param(name, marks=[pytest.mark.full] * one) for name, one in zip(given, is_full, strict=True)]
    return pytest.mark.parametrize("name", marked)


@names(STATES)
def test_states_lead_to_the_same_batches(name, theirs):
    """And to those that followed in our own loader, also where torchdata's loses its place."""
    found, expected = run(name, rayloader.DataLoader), theirs[name]
    first, second = found["first"], found["second"]
    for taken in (0, 1, len(first) - 1, len(first)):
        assert found[f"after {taken}"] == [first[taken:], second], taken
    assert found[f"after {len(first) + 1}"][0] == second
    differs = {what for what in expected if found[what] != expected[what]}
    assert differs <= LOST.get(name, set()), (found, expected)
    assert run(name, rayloader.DataLoader, steps=4) == found


@names(TURNS)
def test_what_is_raised_arrives_in_its_turn(name, theirs):
    """A worker of torchdata's whose sample raised has an AssertionError for its next batch."""
    found, expected = run(name, rayloader.DataLoader), theirs[name]
    lost = [turn for turn, what in enumerate(expected) if what == "AssertionError"]
    assert len(lost) <= (name.endswith(", 2") and "ZeroDivisionError" in expected)
    for turn in lost:
        expected[turn] = found[turn]
        assert isinstance(found[turn], (list, int))
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "dataset"),
    [
        ({"num_workers": -1}, Squares()),
        ({"timeout": -1}, Squares()),
        ({"prefetch_factor": 2}, Squares()),  # without workers
        ({"persistent_workers": True}, Squares()),
        ({"sampler": range(3), "shuffle": True}, Squares()),
        ({"batch_sampler": [[1]], "batch_size": 2}, Squares()),
        ({"batch_size": None, "drop_last": True}, Squares()),
        ({"shuffle": True}, Numbers()),
        ({"sampler": range(3)}, Numbers()),
        ({"snapshot_every_steps": 1}, Squares()),
    ],
)
def test_wrong_arguments_are_the_same_errors(arguments, dataset):
    types = []
    for loader_class in (StatefulDataLoader, rayloader.DataLoader):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            loader_class(dataset, **arguments)
        types.append(caught.type)
    assert types[0] is types[1]


def fail(worker_id):
    raise LookupError(f"worker {worker_id}")


def test_a_worker_that_fails_to_start_is_told_of_in_its_batches_turns():
    """As by torch's loader; torchdata's waits in `iter()` for all workers, and raises there."""
    with rayloader.patch():
        loader = StatefulDataLoader(Squares(), 8, num_workers=2, worker_init_fn=fail)
    iterator = iter(loader)
    for worker in (0, 1):
        with pytest.raises(LookupError, match=f"worker {worker}"):
            next(iterator)
