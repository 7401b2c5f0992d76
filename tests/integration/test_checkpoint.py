"""`state_dict` and `load_state_dict`: what they leave alone, what is read again, and what goes on without workers.

That a loader goes on from every point of a run, with datasets and samplers of every kind, with other numbers of
workers, and after its workers have died, is told by the conformance tests, which disturb each of their cases so.
"""

import itertools
import os
import random

import pytest
import torch
from torch.utils.data import IterableDataset

import stateful
from checkpoint_data import batches, make, plain, read, resumed, save
from latches import Mail
from probes import Calls, oversubscribed
from rayloader import DataLoader, ReplayError, StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

CASES = {
    "augmented": lambda: {"dataset": stateful.Augmented(), "shuffle": True},
    "shuffled stream": lambda: {"dataset": stateful.Shuffled()},
    "stateful stream": lambda: {"dataset": stateful.StatefulStream()},
    "late stream": lambda: {"dataset": stateful.LateStream()},
}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("case", ["augmented", "stateful stream"])
def test_loading_acts_on_the_next_iter_and_leaves_a_live_iterator_and_the_state_alone(case, persistent):
    def fresh(seed=1):
        return make(CASES[case], seed=seed, persistent_workers=persistent)

    loader = fresh()
    epochs = [list(batches(loader)) for _ in range(2)]
    loader = fresh()
    before_all = loader.state_dict()
    iterator = batches(loader)
    found = [next(iterator), next(iterator)]
    state = loader.state_dict()
    as_it_was = plain(state)
    assert found + list(iterator) == epochs[0]
    iterator = batches(loader)
    found = [next(iterator)]
    loader.load_state_dict(before_all)
    loader.load_state_dict(state)  # the last one counts
    assert plain(loader.state_dict()) == as_it_was
    assert found + list(iterator) == epochs[1]
    assert [list(batches(loader)), list(batches(loader))] == [epochs[0][2:], epochs[1]]
    loader.load_state_dict(state)
    assert list(batches(loader)) == epochs[0][2:]
    assert plain(state) == as_it_was


BROKEN_OFF = [(case, taken) for case in ("augmented", "shuffled stream", "late stream") for taken in (0, 1, 3)]


@pytest.mark.parametrize(("case", "taken"), [*BROKEN_OFF, ("stateful stream", 0)])  # which goes on, and has few
def test_a_state_of_the_epoch_after_one_that_was_broken_off(case, taken):
    def fresh(seed):
        return make(CASES[case], 1, seed=seed, workers="fork", persistent_workers=True, batch_size=1)

    loader = fresh(seed=1)
    for _ in loader:
        break
    iterator = batches(iter(loader))  # at once
    found = list(itertools.islice(iterator, taken))
    saved = save(loader)
    rest, following = list(iterator), list(batches(loader))
    assert resumed(fresh(seed=2), saved) == [rest, following]
    if case == "late stream":
        assert [batch[1] for batch in found + rest] == [[number] for number in range(1, 5)]


def test_without_workers_a_state_from_before_the_first_batch_after_a_break_is_warned_of():
    loader = make(CASES["late stream"], 0)
    next(iter(loader))
    iterator = iter(loader)
    with pytest.warns(UserWarning, match="broken off"):
        loader.state_dict()
    next(iterator)
    loader.state_dict()


def test_a_map_style_dataset_is_read_again_from_the_last_snapshot_on(tmp_path):
    """Calls carry one task here, so that each worker's first snapshot is behind its first batch."""
    mail = Mail(tmp_path / "mail")

    def get(index):
        mail.send(index)
        return index

    def arguments():
        return {"dataset": Calls(get, 40), "batch_size": None, "prefetch_factor": 2}

    loader = make(arguments)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(25)] == list(range(25))
    saved = save(loader)
    rest = list(iterator)
    assert sorted(map(int, mail.receive(40))) == list(range(40))
    loader = make(arguments, 2)
    loader.load_state_dict(read(saved))
    assert list(loader) == rest == list(range(25, 40))
    again = sorted(map(int, mail.waiting()))
    assert again[-15:] == rest
    assert {22, 23, 24} <= set(again[:-15]) <= set(range(3, 25))  # of each worker the last one at least, to be compared
    mail.close()


class Known(stateful.Shuffled):
    """A stream that knows how long it is."""

    def __len__(self):
        return 4 + 9 + 14


def test_a_length_is_not_taken_for_too_small():
    """Of a length that is too small torch warns; here that would be an error."""
    loader, again = (make(lambda: {"dataset": Known(), "batch_size": None}) for _ in range(2))
    iterator = batches(loader)
    found = list(itertools.islice(iterator, 5))
    saved = save(loader)
    rest = list(iterator)
    assert len(found + rest) == len(again) == 27
    assert resumed(again, saved)[0] == rest


# ---- without workers


@pytest.mark.parametrize("counts", [(0, 2), (2, 0)])
def test_with_a_seed_for_each_batch_it_makes_no_difference_whether_there_are_workers(counts):
    arguments = {"dataset": stateful.Noise(), "shuffle": True, "seeding": "batch", "workers": "fork"}
    loader = make(lambda: arguments, counts[0])
    iterator = batches(loader)
    next(iterator)
    saved, rest = save(loader), [list(iterator), list(batches(loader))]
    assert resumed(make(lambda: arguments, counts[1], seed=2), saved) == rest


def test_num_workers_that_are_set_after_loading_are_refused_too():
    loader = make(CASES["augmented"], 0)
    loader.load_state_dict(loader.state_dict())
    loader.num_workers, loader.prefetch_factor = 2, 2
    with pytest.raises(StateError, match=r"num_workers=0.* this one has .*own random generators"):
        iter(loader)


class Reads(IterableDataset):
    """Each reading is what a function returns."""

    def __init__(self, read):
        self.read = read

    def __iter__(self):
        return iter(self.read())


EPOCHS = itertools.count()
UNLIKE = {
    "entropy": lambda: os.urandom(20),
    "counts epochs": lambda: random.Random(next(EPOCHS)).sample(range(10), 10),
    "draws from the program": lambda: iter(lambda: torch.rand(1).item(), None),
}


@pytest.mark.parametrize("read", UNLIKE.values(), ids=UNLIKE)
def test_a_stream_that_cannot_be_read_again_is_an_error(read):
    loader = DataLoader(Reads(read), 3)
    iterator = iter(loader)
    next(iterator), torch.rand(1), next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ReplayError, match=r"gave something else than before.*whatever else draws from the global"):
        iter(loader)
