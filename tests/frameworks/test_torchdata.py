"""torchdata's StatefulDataLoader: where its import is changed to rayloader's DataLoader, the program stays as it is."""

import itertools

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from framework_data import Numbers, written_by
from torchdata_cases import DATASETS, NUM_WORKERS, Squares, run, turns

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which its constructor calls
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What torchdata's loader gives for each case, made in a process without Ray: its workers are forks."""
    return written_by("torchdata_cases.py", tmp_path_factory.mktemp("torchdata"))


@pytest.mark.parametrize(
    ("case", "num_workers"),
    [
        pytest.param(case, number, marks=pytest.mark.full if number and case != "stream with a state" else ())
        for case, number in itertools.product(DATASETS, NUM_WORKERS)
    ],
)
def test_states_lead_to_the_same_batches(case, num_workers, theirs):
    assert run(rayloader.DataLoader, case, num_workers, 1) == theirs["states"][f"{case}-{num_workers}"]
    assert run(rayloader.DataLoader, case, num_workers, 4) == theirs["states"][f"{case}-{num_workers}"]


WRONG = {
    "workers": ({"num_workers": -1}, Squares),
    "timeout": ({"timeout": -1}, Squares),
    "depth without workers": ({"prefetch_factor": 2}, Squares),
    "persistent without workers": ({"persistent_workers": True}, Squares),
    "sampler and shuffle": ({"sampler": range(3), "shuffle": True}, Squares),
    "batch sampler and size": ({"batch_sampler": [[1]], "batch_size": 2}, Squares),
    "drop_last without batches": ({"batch_size": None, "drop_last": True}, Squares),
    "shuffled stream": ({"shuffle": True}, Numbers),
    "sampled stream": ({"sampler": range(3)}, Numbers),
    "unknown": ({"snapshot_every_steps": 1}, Squares),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_the_same_errors(case):
    arguments, dataset_class = WRONG[case]
    types = []
    for loader_class in (StatefulDataLoader, rayloader.DataLoader):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            loader_class(dataset_class(), **arguments)
        types.append(caught.type)
    assert types[0] is types[1]


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_what_a_sample_raises_arrives_in_its_batchs_turn(num_workers, theirs):
    assert turns(rayloader.DataLoader, num_workers) == theirs["turns"][str(num_workers)] == [[0, 1, 4], [9, 16, 25]]


@pytest.mark.parametrize("steps", [0, 1.5, True])
def test_its_own_argument_is_checked(steps):
    with pytest.raises(ValueError, match="snapshot_every_n_steps must be a whole number >= 1 or None"):
        rayloader.DataLoader(Squares(), snapshot_every_n_steps=steps)
    assert rayloader.DataLoader(Squares(), snapshot_every_n_steps=None).snapshot_every_n_steps is None


def test_a_state_of_its_own_is_refused():
    state = StatefulDataLoader(Squares()).state_dict()
    with pytest.raises(rayloader.StateError, match="not a state of a rayloader"):
        rayloader.DataLoader(Squares()).load_state_dict(state)
