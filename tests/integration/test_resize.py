"""`resize`: other numbers of actors host the same workers, and the batches stay the same."""

import itertools
import os

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import checkpoint_data as data
from checkpoint_data import batches, endless, hosted, make, read, save
from inside import live_actor_pids
from probes import Calls, as_is, oversubscribed
from rayloader import DataLoader, ReplayError

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

CASES = {
    "map": lambda: {"dataset": data.Augmented(60), "shuffle": True},
    "map with generators of its own": lambda: {"dataset": data.OwnGenerators()},
    "map with a generator of its module": lambda: {"dataset": data.OfTheModule(60)},
    "stateful map": lambda: {"dataset": data.Counting()},
    "stream": lambda: {"dataset": data.Shuffled()},
    "stateful stream": lambda: {"dataset": data.StatefulStream()},
}


def in_turn(loader, resizes, count):
    """So many batches of epoch after epoch; before batch i there are `resizes[i]` actors from then on."""
    found = []
    iterator = endless(loader)
    for number in range(count):
        if number in resizes:
            loader.resize(resizes[number])
        found.append(next(iterator))
    return found


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize("resizes", [{2: 1, 5: 3}, full({1: 2, 2: 1, 12: 2}), full({0: 1, 7: 5})], ids=str)
@pytest.mark.parametrize("persistent", [False, full(True)])
@pytest.mark.parametrize("seeding", ["worker", full("batch")])
@pytest.mark.parametrize("case", CASES)
def test_the_batches_stay_the_same(case, seeding, persistent, resizes):
    """Over more than two epochs."""
    options = {"seeding": seeding, "persistent_workers": persistent}
    expected = in_turn(make(CASES[case], **options), {}, 30)
    assert in_turn(make(CASES[case], **options), resizes, 30) == expected


@pytest.mark.parametrize("case", ["map", *map(full, ["map with generators of its own", "stateful map"]), "stream"])
def test_a_state_after_a_resize(case):
    expected = in_turn(make(CASES[case], persistent_workers=True), {}, 24)
    loader = make(CASES[case], persistent_workers=True)
    found = in_turn(loader, {2: 1, 4: 2}, 5)
    saved = save(loader)
    loader = hosted(CASES[case], 2, persistent_workers=True)
    loader.load_state_dict(read(saved))
    assert found + in_turn(loader, {0: 1, 3: 3}, 19) == expected


def test_dynamic_scheduling():
    def arguments():
        return {"dataset": data.Indices(90), "seeding": "batch", "scheduling": "dynamic"} | {
            "collate_fn": lambda samples: [samples, *map(float, data.noise())]
        }

    expected = in_turn(make(arguments), {}, 60)
    assert in_turn(make(arguments), {3: 1, 20: 2, 35: 3}, 60) == expected


class Processes(Calls):
    """Tells a state: that a batch built again comes from another process is no error."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_as_many_actors_as_were_asked_for():
    dataset = Processes(lambda index: os.getpid(), 40)
    loader = DataLoader(dataset, None, num_workers=3, prefetch_factor=1, collate_fn=as_is)
    for actors in (3, 1, 2):
        iterator = iter(loader)
        next(iterator)
        loader.resize(actors)
        last = list(itertools.islice(iterator, 36))[-12:]
        assert len(set(last)) == actors
        assert len({*loader}) == actors
        assert {*last} <= live_actor_pids()


class CountsInWorkerOne(Dataset):
    """What worker 1 gives depends on how much it has given, which nobody can see."""

    calls = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.calls += get_worker_info().id
        return index, self.calls


def in_the_second_epoch(taken):
    """A loader with persistent workers, its iterator, and the batches that were taken; all workers have begun."""
    loader = DataLoader(
        CountsInWorkerOne(), None, num_workers=2, persistent_workers=True, prefetch_factor=2, collate_fn=as_is
    )
    assert list(loader)[-1] == (11, 6)
    iterator = iter(loader)
    return loader, iterator, list(itertools.islice(iterator, taken))


@pytest.mark.parametrize("taken", [0, 3])
def test_a_worker_that_moves_proves_its_state(taken):
    """Also where it has built nothing of its epoch that the driver knows of."""
    loader, iterator, _ = in_the_second_epoch(taken)
    loader.state_dict()
    loader.resize(1)
    with pytest.raises(ReplayError):
        list(iterator)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_worker_that_is_resumed_proves_its_state(taken):
    """Also where the user had taken nothing of its epoch."""
    loader, _, found = in_the_second_epoch(taken)
    saved = save(loader)
    loader, _, _ = in_the_second_epoch(0)
    loader.load_state_dict(read(saved))
    with pytest.raises(ReplayError):
        found.extend(loader)
    assert found == [(0, 0), (1, 7), (2, 0), (3, 8)][: max(taken, 1)]


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_workers_is_refused(num_workers):
    loader = DataLoader(torch.arange(6), num_workers=2)
    with pytest.raises((ValueError, TypeError), match="num_workers"):
        loader.resize(num_workers)
    assert list(batches(loader)) == [[number] for number in range(6)]
