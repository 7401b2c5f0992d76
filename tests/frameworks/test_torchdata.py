"""torchdata's StatefulDataLoader: where its import is changed to rayloader's DataLoader, the program stays as it is."""

import contextlib

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from framework_data import Numbers

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which its constructor calls
]

BOTH = (StatefulDataLoader, rayloader.DataLoader)


class Squares(Dataset):
    """One sample raises."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.bad:
            raise ZeroDivisionError
        return torch.tensor(index**2)


class Counting(IterableDataset):
    """Tells its state."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 10:
            self.position += 1
            yield self.position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


DATASETS = {
    "map": lambda: {"dataset": Squares(), "sampler": SequentialSampler(range(20))},
    "stream": lambda: {"dataset": Numbers(20)},
    "stream with a state": lambda: {"dataset": Counting()},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", DATASETS)
def test_states_lead_to_the_same_batches(case, num_workers):
    def run(loader_class, steps):
        def make():
            return loader_class(**DATASETS[case](), batch_size=3, num_workers=num_workers, snapshot_every_n_steps=steps)

        loader = make()
        states, found = [loader.state_dict()], []
        for batch in loader:
            found.append(batch.tolist())
            states.append(loader.state_dict())
        states.append(loader.state_dict())  # between two epochs
        for state in states:
            loader = make()
            loader.load_state_dict(state)
            found.append([batch.tolist() for batch in loader])
        loader = make()
        loader.load_state_dict({})
        found.append([batch.tolist() for batch in loader])
        return found

    theirs, ours = (run(loader_class, 1) for loader_class in BOTH)
    assert ours == theirs
    assert run(rayloader.DataLoader, 4) == ours


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
    for loader_class in BOTH:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            loader_class(dataset_class(), **arguments)
        types.append(caught.type)
    assert types[0] is types[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_sample_raises_arrives_in_its_batchs_turn(num_workers):
    def turns(loader_class):
        iterator = iter(loader_class(Squares(bad=7), 3, num_workers=num_workers, snapshot_every_n_steps=2))
        with contextlib.suppress(ZeroDivisionError):
            while True:
                yield next(iterator).tolist()

    theirs, ours = (list(turns(loader_class)) for loader_class in BOTH)
    assert ours == theirs == [[0, 1, 4], [9, 16, 25]]


@pytest.mark.parametrize("steps", [0, 1.5, True])
def test_its_own_argument_is_checked(steps):
    with pytest.raises(ValueError, match="snapshot_every_n_steps must be a whole number >= 1 or None"):
        rayloader.DataLoader(Squares(), snapshot_every_n_steps=steps)
    assert rayloader.DataLoader(Squares(), snapshot_every_n_steps=None).snapshot_every_n_steps is None


def test_a_state_of_its_own_is_refused():
    state = StatefulDataLoader(Squares()).state_dict()
    with pytest.raises(rayloader.StateError, match="not a state of a rayloader"):
        rayloader.DataLoader(Squares()).load_state_dict(state)
