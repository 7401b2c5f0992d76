"""What a state holds, and what it doesn't fit: a table of loaders that refuse it, and nothing is changed by that."""

import functools
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

import stateful
from checkpoint_data import INDICES, batches, make, read, resumed, save
from probes import oversubscribed
from rayloader import DataLoader, StateError
from stateful import LENGTH

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]


def small(seed=1, **options):
    return make(lambda: {"dataset": stateful.Augmented(), **options}, 2, seed=seed, workers="fork")


# ---- what a state is


def test_a_state_of_eight_workers_is_small():
    """All their generators have moved."""
    loader = make(lambda: {"dataset": stateful.Augmented(400), "shuffle": True, "workers": "fork"}, 8)
    iterator = batches(loader)
    workers = {next(iterator)[-3][0] for _ in range(70)}
    assert workers == set(range(8))
    assert len(save(loader)) < 150_000  # three generators of 5 kB, 3 kB and 2.5 kB each, and what names them


def test_a_state_holds_no_sample():
    loader = DataLoader(torch.rand(40, 100_000), 2, num_workers=2)
    next(iter(loader))
    assert len(save(loader)) < 80_000


# ---- what it does not fit


REFUSED = {  # the arguments where it is loaded, and what the error says
    "batch_size": ({"batch_size": 4}, "batch_size"),
    "no batch_size": ({"batch_size": None}, "batch_size"),
    "length": ({"dataset": stateful.Augmented(23)}, "length"),
    "kind": ({"dataset": stateful.Shuffled()}, "iterable"),
    "drop_last": ({"drop_last": True}, "drop_last"),
    "in_order": ({"in_order": False}, "in_order"),
    "seeding": ({"seeding": "batch"}, "seeding"),
    "other indices": ({"shuffle": True}, "sampler|indices"),
    "another sampler": ({"sampler": stateful.StatefulSampler(1)}, "sampler|indices"),
    "another rank's": ({"sampler": DistributedSampler(range(2 * LENGTH), 2, 1, shuffle=False)}, "sampler|indices"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_of_another_loader_is_refused(case):
    there, what_differs = REFUSED[case]
    loader = small()
    iterator = batches(loader)
    for _ in range(3):
        next(iterator)
    saved, rest = save(loader), list(iterator)
    with pytest.raises(StateError, match=f"(?i){what_differs}"):
        resumed(small(**there), saved)
    assert resumed(small(seed=2), saved)[0] == rest


NO_STATES = {
    "None": (lambda state: None, None),
    "a list": (lambda state: [], None),
    "text": (lambda state: "state", None),
    "torchdata's": (lambda state: {"_snapshot": {"_main_snapshot": {}}, "_num_yielded": 3}, None),
    # Accelerate lowers the count where batches were fetched for other processes, and not dispatched yet.
    "ahead": (
        lambda state: {**state, "_num_yielded": 1},
        "says that 2 batches were taken, and _num_yielded=1 dispatched",
    ),
    "no count": (lambda state: without(state, ["_num_yielded"]), "lacks _num_yielded"),
}


def generators():
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("case", NO_STATES)
def test_what_is_no_state_is_refused_and_changes_nothing(case):
    change, text = NO_STATES[case]
    loader = small()
    iterator = batches(loader)
    found = [next(iterator), next(iterator)]
    state = loader.state_dict()
    rest = list(iterator)
    loader = small()
    before = generators()
    with pytest.raises(StateError, match=text):
        loader.load_state_dict(change(state))
    assert generators() == before
    assert list(batches(loader)) == found + rest
    loader.load_state_dict({**state, "_iterator_finished": False, "step": 7})  # as Accelerate, and the program, adds
    assert list(batches(loader)) == rest


class Holds(stateful.Indices):
    """Holds a generator; a dataset, or a sampler."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("holder", ["dataset", "sampler"])
def test_a_state_of_other_generators_is_refused_and_changes_nothing(holder):
    def loader_with(generator):
        return make(lambda: {"dataset": INDICES, "sampler": INDICES, holder: Holds(generator)}, 0)

    saved = save(loader_with(random.Random(1)))
    for other in (np.random.default_rng(1), np.random.RandomState(1), torch.Generator(), None):
        loader = loader_with(other)
        torch.manual_seed(3)
        before = generators()
        with pytest.raises(StateError, match="generators"):
            loader.load_state_dict(read(saved))
        assert generators() == before


DAMAGED = {
    "map-style": lambda: {"dataset": stateful.Augmented(), "shuffle": True},
    "iterable with a state": lambda: {"dataset": stateful.StatefulStream()},
    "without workers": lambda: {"dataset": stateful.OwnGenerators(), "shuffle": True, "num_workers": 0},
    "distributed": lambda: {"dataset": stateful.Noise(), "sampler": DistributedSampler(INDICES, 2, 1)},
}


def fields_in(part, way=()):
    """The way to each field of a state's records."""
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if type(part) is tuple else ():
        if isinstance(part, dict):
            yield (*way, key)
        if key not in ("python", "numpy", "others", "held", "attributes", "state", "told", "dataset"):
            yield from fields_in(inner, (*way, key))


def without(part, way):
    """The state without the field at this place."""
    key, *rest = way
    if not rest:
        return {name: value for name, value in part.items() if name != key}
    inner = without(part[key], rest)
    return {**part, key: inner} if isinstance(part, dict) else (*part[:key], inner, *part[key + 1 :])


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_state_that_lacks_a_field_is_refused_and_changes_nothing(kind):
    loader = make(DAMAGED[kind], 2)
    iterator = batches(loader)
    next(iterator), next(iterator)
    state = read(save(loader))
    rest = list(iterator)
    loader = make(DAMAGED[kind], 2, seed=2)
    before = generators()
    for way in fields_in(state):
        with pytest.raises(StateError):
            loader.load_state_dict(without(state, way))
        assert generators() == before, way
    loader.load_state_dict(state)
    assert list(batches(loader)) == rest


# ---- what a dataset tells


class Telling(stateful.Indices):
    """Tells what it was given, and shows it, and what it has loaded."""

    def __init__(self, told=None, show=lambda told: 0):
        super().__init__()
        self.told, self.show = told, show

    def __getitem__(self, index):
        return [index, self.show(self.told)]

    def state_dict(self):
        return {"told": self.told}

    def load_state_dict(self, state):
        self.told = state["told"]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_tells_holds_not_itself(workers):
    told = []
    told.append([told])
    loader = make(lambda: {"dataset": Telling(told)}, workers)
    iterator = iter(loader)
    for _ in range(8):  # until both workers have told
        next(iterator)
    with pytest.raises(StateError, match=r"must not hold itself, nor be nested more than 100 levels deep"):
        loader.state_dict()


TOLD = {  # also of types that a file of plain data can't hold
    "by name": OrderedDict(second=0, first=0),
    "counts": Counter("aab"),
    "last": np.zeros(3, np.int16),
    "number": np.float32(0.5),
    "dtype": torch.bfloat16,
}
HUGE = 1 << 20000  # which torch's files can't hold


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("told", "show"), [(TOLD, repr), (HUGE, hex)], ids=["types", "huge"])
def test_what_a_dataset_tells_is_loaded_as_it_was(told, show, workers):
    datasets = Telling(told, show), Telling(0, show)
    loader, again = (make(functools.partial(dict, dataset=dataset), workers) for dataset in datasets)
    iterator = batches(loader)
    for _ in range(6):  # until the worker has told
        next(iterator)
    again.load_state_dict(loader.state_dict() if told is HUGE else read(save(loader)))
    rest = list(iterator)
    assert rest[-1][1] == [show(told)]
    assert list(batches(again)) == rest
