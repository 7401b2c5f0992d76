"""Streams of Hugging Face's `datasets`: their own states lead to the rest, and each epoch is whole after any one.

That rows and streams give torch's batches is in `test_trainings.py`.
"""

import itertools

import datasets
import pytest
from torch.utils.data import IterableDataset

import rayloader
from framework_data import seed
from inside import kill_worker

full = pytest.mark.full
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("default")]
SETTINGS = {"0": {"num_workers": 0}, "2": {"num_workers": 2}, "2p": {"num_workers": 2, "persistent_workers": True}}
settings = pytest.mark.parametrize("setting", ["0", *(pytest.param(name, marks=full) for name in ("2", "2p"))])


def stream():
    return datasets.Dataset.from_dict({"number": list(range(26))}).to_iterable_dataset(num_shards=4)


class Holds(IterableDataset):
    """The user's own, which holds two streams, and passes its state on to them at once, or when it is iterated."""

    def __init__(self, late=False):
        self.streams, self.late, self.state = {"first": stream(), "second": stream()}, late, None

    def __iter__(self):
        self.pass_on()
        yield from itertools.chain(*self.streams.values())

    def state_dict(self):
        return {name: inner.state_dict() for name, inner in self.streams.items()}

    def load_state_dict(self, state):
        self.state = state
        if not self.late:
            self.pass_on()

    def pass_on(self):
        for name, inner in self.streams.items() if self.state is not None else ():
            inner.load_state_dict(self.state[name])
        self.state = None


def at_a_position():
    """The program has loaded it, and it counts in each epoch."""
    position, there = stream(), stream()
    next(iter(position))
    there.load_state_dict(position.state_dict())
    return there


CASES = {
    "stream": stream,
    "at a position": at_a_position,
    "held": Holds,
    "held, passed on late": lambda: Holds(late=True),
    # Drawn at random from two; each worker reads some shards of both, and draws other numbers than its neighbour.
    "interleaved": lambda: datasets.interleave_datasets([stream(), stream()], probabilities=[0.5, 0.5], seed=7),
    "joined": lambda: datasets.concatenate_datasets([stream(), stream()]),
}
SAMPLE = ("stream", "at a position", "held")
cases = pytest.mark.parametrize("case", [pytest.param(one, marks=[full] * (one not in SAMPLE)) for one in CASES])


def make(case, setting):
    """The loader, from the same seed each time."""
    seed(1)
    return rayloader.DataLoader(CASES[case](), 3, **SETTINGS[setting])


def plain(batches):
    return [batch["number"].tolist() for batch in batches]


@cases
@settings
@pytest.mark.parametrize("is_told", [True, False])
def test_states_lead_to_the_rest_of_an_epoch_and_to_whole_ones_after_it(case, setting, is_told):
    """Also where no epoch is told: the dataset begins at the position that was loaded until the epoch is another."""

    def epoch(loader, number):
        if is_told and hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(number)
        return loader

    loader = make(case, setting)
    states, batches = [], []
    for number in range(2):
        iterator = iter(epoch(loader, number))
        states.append(loader.state_dict())
        batches.append([])
        for batch in iterator:
            batches[-1] += plain([batch])
            states.append(loader.state_dict())
    if case == "at a position":
        assert batches[0] != plain(make("stream", setting))
    length = len(batches[0])
    for place in (0, 2, length, length + 1, length + 3):
        again = make(case, setting)
        again.load_state_dict(states[place])
        number, taken = divmod(place, length + 1)
        assert plain(epoch(again, number)) == batches[number][taken:], place
        assert plain(epoch(again, 1)) == batches[1], place


@cases
def test_epochs_in_which_workers_are_killed_are_whole_though_no_epoch_is_told(case):
    expected = plain(make(case, "2p"))
    loader = make(case, "2p")
    for number in range(4):
        iterator = iter(loader)
        found = plain(next(iterator) for _ in range(3))
        if number % 3 == 0:  # the ones in between are whole too
            kill_worker(iterator, number % 2)
        assert found + plain(iterator) == expected, number


@full
def test_the_position_at_which_the_program_has_left_a_dataset_is_not_that_of_its_workers():
    """It has looked at the first samples."""
    whole = plain(make("stream", "2"))
    loader = make("stream", "2")
    next(iter(loader.dataset))
    iterator = iter(loader)
    state = loader.state_dict()
    assert plain(iterator) == whole
    loader.load_state_dict(state)
    assert plain(loader) == whole
