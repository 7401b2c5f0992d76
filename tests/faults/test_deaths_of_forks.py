"""One table: the moment in the life of a forked worker at which it is killed x the kind of its dataset.

Whatever the moment, three epochs bring what they bring undisturbed. The workers are forks, persistent or not, at each
depth. Each death comes at a place in the dataset, or after something that the test has seen: nothing sleeps.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from fault_points import Faults
from inside import await_more, has_started, kill_worker, workers_are_idle
from rayloader import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

WORKERS = 2
STRUCK = 1
LENGTHS = (8, 4)  # batches of each worker's stream, and so 12 in all
LENGTH = sum(LENGTHS)
EPOCHS = 3
BROKEN_OFF = 5  # batches of an epoch that is not taken to its end


class Places:
    """Where a worker is struck."""

    def __init__(self, faults):
        self.faults = faults

    def at(self, place):
        if get_worker_info().id == STRUCK:
            self.faults.strike(place)

    def init(self, worker_id):
        self.at("start")


class Map(Places, Dataset):
    """Where any worker may build any sample, whoever comes to the place is struck."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        self.faults.strike({STRUCK: "first", LENGTH - 1: "last"}.get(index, "sample"))
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(Places, IterableDataset):
    place = None  # where its iterator is, if the dataset can be asked for it

    def __iter__(self):
        self.at("iter")
        worker_id = get_worker_info().id
        for number in range(self.place or 0, LENGTHS[worker_id]):
            self.at({0: "first", LENGTHS[worker_id] - 1: "last"}.get(number, "sample"))
            self.goes_to(number + 1)
            yield torch.tensor([100.0 * worker_id + number, float(torch.rand(()))])
        self.at("end")
        self.goes_to(None)

    def goes_to(self, place):
        pass


class Stateful(Stream):
    def goes_to(self, place):
        self.place = place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


BATCH_SEEDS = {"seeding": "batch"}
KINDS = {
    "map": (Map, {}),
    "dynamic": (Map, {**BATCH_SEEDS, "scheduling": "dynamic"}),
    "map, any order": (Map, {**BATCH_SEEDS, "in_order": False}),
    "stream": (Stream, {}),
    "stream with a state": (Stateful, {}),
    "stream, any order": (Stream, {**BATCH_SEEDS, "in_order": False}),
}
STREAMS = [kind for kind in KINDS if kind.startswith("stream")]
IN_ORDER = [kind for kind in KINDS if not kind.endswith("any order")]  # what was taken is the same each time


def at(place):
    """The worker will be struck there."""
    return lambda faults, iterator: faults.plan(place, "SIGKILL")


def killed(faults, iterator, *, workers=(STRUCK,), idle=False, heard=False):
    """`idle`: once all that they were given is answered; `heard`: the iterator has taken notice before it goes on."""
    while not all(has_started(iterator, worker_id) for worker_id in workers):
        await_more(iterator)
    while idle and not workers_are_idle(iterator):
        await_more(iterator)
    for worker_id in workers:
        with contextlib.suppress(ProcessLookupError):  # a fresh worker ends by itself once all tasks are answered
            kill_worker(iterator, worker_id)
    if heard:
        await_more(iterator)


now = functools.partial
both = now(killed, workers=range(WORKERS))
# When in the test: an epoch, and how many batches of it were taken; or "before" iter(), or "begun" by it.
MOMENTS = {
    "as it starts": (0, "before", at("start"), KINDS),
    "before its first answer": (0, "before", at("first"), KINDS),
    "in mid-epoch": (0, "before", at("sample"), KINDS),
    "both at once, in mid-epoch": (0, 3, both, KINDS),
    "before its last answer": (0, "before", at("last"), IN_ORDER),
    "as its stream ends": (0, "before", at("end"), STREAMS),
    "after its last answer": (0, LENGTH - 2, now(killed, idle=True), KINDS),
    "its stream has ended": (0, LENGTH - 1, killed, STREAMS),
    "its stream has ended, heard": (0, LENGTH - 1, now(killed, heard=True), STREAMS),
    "between two epochs": (0, LENGTH, killed, KINDS),
    "both at once, between two epochs": (0, LENGTH, both, KINDS),
    "one was broken off": (1, BROKEN_OFF, killed, IN_ORDER),
    "one was broken off, idle": (1, BROKEN_OFF, now(killed, idle=True), IN_ORDER),
    "as the next begins": (1, "before", at("iter"), STREAMS),
    "the next has begun": (1, "begun", killed, KINDS),
    "both at once, the next has begun": (1, "begun", both, KINDS),
    "before its first answer of the next": (1, "before", at("first"), KINDS),
}
OPTIONS = list(itertools.product([True, False], [9, 1, 2]))  # persistent_workers, prefetch_factor


def cases():
    """Each moment with one or two kinds, at some depth, and now and then with fresh workers; all, in a full run."""
    some = itertools.cycle([(True, 9), (True, 1), (True, 2), (False, 9), (True, 2), (True, 1), (False, 2)])
    pairs = [(moment, kind) for moment, (_, _, _, kinds) in MOMENTS.items() for kind in kinds]
    for number, pair in enumerate(pairs):
        chosen = next(some) if number % 3 == 0 else None
        for options in OPTIONS:
            yield pytest.param(*pair, *options, marks=() if options == chosen else pytest.mark.full)


def epochs(kind, folder, moment=None, broken_off=False, **options):
    """What the batches of each epoch hold."""
    dataset, more = KINDS[kind]
    faults = Faults(folder)
    torch.manual_seed(3)
    places = dataset(faults)
    loader = DataLoader(
        places, None, num_workers=WORKERS, workers="fork", worker_init_fn=places.init, **more, **options
    )
    strikes_in, when, strike, _ = MOMENTS[moment] if moment else (None, None, None, None)
    found = []
    for number in range(EPOCHS):
        happens = {when: strike} if number == strikes_in else {}
        happens.get("before", nothing)(faults, None)
        iterator = iter(loader)
        happens.get("begun", nothing)(faults, iterator)
        found.append([])
        for taken, batch in enumerate(iterator, 1):
            found[-1].append(batch.tolist())
            happens.get(taken, nothing)(faults, iterator)
            if broken_off and number == 1 and taken == BROKEN_OFF:
                break
        del iterator
    return found if more.get("in_order", True) else [sorted(batches) for batches in found]


def nothing(*_):
    pass


@functools.cache
def undisturbed(kind, broken_off, folder, **options):
    return epochs(kind, folder, broken_off=broken_off, **options)


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("no faults")


@pytest.mark.parametrize(("moment", "kind", "persistent", "depth"), list(cases()))
def test_a_killed_fork_is_replaced_or_not_missed(moment, kind, persistent, depth, empty, tmp_path):
    options = {"persistent_workers": persistent, "prefetch_factor": depth}
    broken_off = "broken off" in moment
    assert epochs(kind, tmp_path, moment, broken_off, **options) == undisturbed(kind, broken_off, empty, **options)
    assert [path.name for path in tmp_path.iterdir() if path.name != "struck"] == [], "it did not come to that place"
