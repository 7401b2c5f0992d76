"""What a state holds and whom it fits: samplers of every kind, its size, and loaders that refuse it."""

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import checkpoint_data as data
from checkpoint_data import batches, check, hosted, make, read, resumed, run, save, some
from probes import as_is, oversubscribed
from rayloader import DataLoader, StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

# ---- samplers: `seed` differs between the run and who goes on


def generator(seed):
    return torch.Generator().manual_seed(seed)


def one_generator_for_both(seed):
    both = generator(seed)
    return {"sampler": RandomSampler(INDICES, generator=both), "generator": both}


INDICES = range(data.LENGTH)
SAMPLERS = {
    "global generator": lambda seed: {"shuffle": True},
    "generator": lambda seed: {"shuffle": True, "generator": generator(seed)},
    "generator of the sampler's": lambda seed: {"sampler": RandomSampler(INDICES, generator=generator(seed))},
    "one generator for both": one_generator_for_both,
    "with replacement": lambda seed: {"sampler": RandomSampler(INDICES, True, 50, generator=generator(seed))},
    "weighted": lambda seed: {"sampler": WeightedRandomSampler([1.0] * data.LENGTH, 20)},
    "subset, unbatched": lambda seed: {"sampler": SubsetRandomSampler(range(3, 15)), "batch_size": None},
    "batches of a sampler": lambda seed: {"batch_sampler": BatchSampler(RandomSampler(INDICES), 4, True)},
    "batches of the user's": lambda seed: {"batch_sampler": data.GrowingBatches()},
    "batches in a list": lambda seed: {"batch_sampler": [[0, 1], [2], [], [3, 4, 5]], "collate_fn": as_is},
    "stateful": lambda seed: {"sampler": data.StatefulSampler(seed)},
    "stateful, unbatched": lambda seed: {"sampler": data.StatefulSampler(seed), "batch_size": None},
    "stateful batches": lambda seed: {"batch_sampler": data.StatefulBatchSampler(seed)},
    "stateful iterators": lambda seed: {"sampler": data.SamplerOfStatefulIterators()},
}


NOT_SAMPLED = "generator of the sampler's", "with replacement", "weighted", "stateful, unbatched"  # much like others


@some(2, 22)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in NOT_SAMPLED else ()) for n in SAMPLERS]
)
def test_samplers_go_on(name, which):
    def arguments(seed):
        return lambda: {"dataset": data.Augmented(), **SAMPLERS[name](seed)}

    epochs, points = run(make(arguments(1), 2), which)
    assert epochs[0]
    for point in points:
        check(epochs, point, hosted(arguments(2), 1, of=2))


@pytest.mark.parametrize("epoch_is_set", [False, True])
def test_a_distributed_sampler_gets_its_epoch_back(epoch_is_set):
    def arguments():
        return {"dataset": data.Augmented(), "sampler": DistributedSampler(range(data.LENGTH), 2, 1, seed=7)}

    loader = make(arguments, 2)
    epochs, saved = [], []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for batch in batches(loader):
            epochs[-1].append(batch)
            saved.append((epoch, len(epochs[-1]), save(loader)))
    for epoch, taken, state in saved[1:-4:3]:
        loader = hosted(arguments, 1, of=2)
        loader.load_state_dict(read(state))
        if epoch_is_set:
            loader.sampler.set_epoch(epoch)
        assert list(batches(loader)) == epochs[epoch][taken:]
        assert loader.sampler.epoch == epoch
        loader.sampler.set_epoch(epoch + 1)
        assert list(batches(loader)) == epochs[epoch + 1]


# ---- what a state is


def test_a_state_of_eight_workers_is_small():
    """All their generators have moved."""
    loader = make(lambda: {"dataset": data.Augmented(400), "shuffle": True, "workers": "fork"}, 8)
    iterator = batches(loader)
    workers = {next(iterator)[-3][0] for _ in range(70)}
    assert workers == set(range(8))
    assert len(save(loader)) < 150_000  # three generators of 5 kB, 3 kB and 2.5 kB each, and what names them


def test_a_state_holds_no_sample():
    loader = DataLoader(torch.rand(40, 100_000), 2, num_workers=2)
    next(iter(loader))
    assert len(save(loader)) < 80_000


def small(**options):
    return make(lambda: {"dataset": data.Augmented(), **options}, 2)


REFUSED = {
    "batch_size": ({"batch_size": 4}, "batch_size"),
    "no batch_size": ({"batch_size": None}, "batch_size"),
    "length": ({"dataset": data.Augmented(23)}, "length"),
    "kind": ({"dataset": data.Shuffled()}, "iterable"),
    "drop_last": ({"drop_last": True}, "drop_last"),
    "in_order": ({"in_order": False}, "in_order"),
    "seeding": ({"seeding": "batch"}, "seeding"),
    "other indices": ({"shuffle": True}, "sampler|indices"),
    "another sampler": ({"sampler": data.StatefulSampler(1)}, "sampler|indices"),
    "another rank's": ({"sampler": DistributedSampler(range(2 * data.LENGTH), 2, 1, shuffle=False)}, "sampler|indices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_another_loader_is_refused(name):
    options, what_differs = REFUSED[name]
    loader = small()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(StateError, match=f"(?i){what_differs}"):
        resumed(small(**options), save(loader))


def test_an_order_that_nobody_can_draw_again_is_refused():
    def arguments():
        return {"dataset": data.Augmented(), "sampler": data.UnseededSampler()}

    loader = make(arguments, 2)
    next(iter(loader))
    with pytest.raises(StateError, match=r"sampler|indices"):
        resumed(make(arguments, 2), save(loader))


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_indices_in_tensors_and_arrays_are_compared_too(kind):
    def arguments(seed):
        return lambda: {"dataset": data.Augmented(), "batch_sampler": data.TensorBatches(seed, kind)}

    loader = make(arguments(1), 2)
    expected = list(batches(loader))
    torch.manual_seed(1)
    next(iter(loader))
    saved = save(loader)
    assert resumed(make(arguments(1), 2), saved)[0] == expected[1:]
    with pytest.raises(StateError, match="indices"):
        resumed(make(arguments(2), 2), saved)


@pytest.mark.parametrize("state", [None, [], "state", {"_snapshot": {"_main_snapshot": {}}, "_num_yielded": 3}])
def test_what_is_no_state_is_refused_and_changes_nothing(state):
    expected = list(batches(small()))
    loader = small()
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    assert list(batches(loader)) == expected


def test_a_state_of_an_unknown_version_is_refused():
    loader = small()
    state = loader.state_dict()
    assert isinstance(state["version"], int)
    with pytest.raises(StateError, match="version"):
        loader.load_state_dict({**state, "version": state["version"] + 1})


def generators():
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


def test_what_the_program_puts_beside_a_states_own_parts_is_left_alone():
    loader = small()
    expected = list(batches(loader))
    loader.load_state_dict({**small().state_dict(), "step": 7})
    assert list(batches(loader)) == expected


class Holds(data.Sized):
    """Holds a generator; a dataset, or a sampler."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def __getitem__(self, index):
        return index

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("holder", ["dataset", "sampler"])
def test_a_state_of_other_kinds_of_generators_is_refused_and_changes_nothing(holder):
    def loader_with(generator):
        return make(lambda: {"dataset": INDICES, "sampler": INDICES, holder: Holds(generator)}, 0)

    saved = save(loader_with(random.Random(1)))
    for other in (np.random.default_rng(1), np.random.RandomState(1), torch.Generator()):
        loader = loader_with(other)
        torch.manual_seed(3)
        before = generators()
        with pytest.raises(StateError, match="generators"):
            loader.load_state_dict(read(saved))
        assert generators() == before


def test_a_state_that_is_ahead_of_what_was_dispatched_is_refused():
    """Accelerate lowers the count where batches were fetched for other processes, and not dispatched yet."""
    loader = small()
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    with pytest.raises(StateError, match="says that 2 batches were taken, and _num_yielded=1 dispatched"):
        small().load_state_dict({**state, "_num_yielded": 1})
    with pytest.raises(StateError, match="lacks _num_yielded"):
        small().load_state_dict({name: part for name, part in state.items() if name != "_num_yielded"})
    rest = list(batches(iterator))
    loader = small()
    loader.load_state_dict({**state, "_iterator_finished": False})  # which Accelerate adds
    assert list(batches(loader)) == rest


# ---- what the user's objects tell


class TellsAll(data.Indices):
    """Tells what it is given."""

    def __init__(self, told=None):
        super().__init__()
        self.told = told

    def state_dict(self):
        return self.told

    def load_state_dict(self, state):
        self.told = state


def tells_all():
    told = {1: (2, 3), "generator": random.Random(1).getstate(), "bytes": b"\xff", "array": np.arange(3), "set": {4}}
    return {"dataset": TellsAll(told), "sampler": data.StatefulSampler(5)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_goes_through_a_file_with_all_types_that_the_users_parts_have(num_workers):
    loader = make(tells_all, num_workers)
    iterator = batches(loader)
    next(iterator)
    file = save(loader)
    rest = list(iterator)
    loader = make(lambda: {**tells_all(), "dataset": TellsAll(), "sampler": data.StatefulSampler(6)}, num_workers)
    loader.load_state_dict(read(file))
    if not num_workers:
        told = loader.dataset.told
        assert told.pop("array").tolist() == [0, 1, 2]
        assert told == {name: value for name, value in tells_all()["dataset"].told.items() if name != "array"}
    assert list(batches(loader)) == rest


# ---- what a dataset tells


class Telling(data.Indices):
    """Tells what a function gives."""

    def __init__(self, tell):
        super().__init__()
        self.tell, self.loaded = tell, None

    def state_dict(self):
        return {"told": self.tell()}

    def load_state_dict(self, state):
        self.loaded = state["told"]


def cycle():
    told = []
    told.append([told])
    return told


def deep(levels):
    return lambda: functools.reduce(lambda told, _: [told], range(levels), 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tell", [cycle, deep(200), deep(9000)], ids=["cycle", "200 levels", "9000 levels"])
def test_what_a_dataset_tells_has_no_cycle_and_is_not_too_deep(tell, workers):
    loader = make(lambda: {"dataset": Telling(tell)}, num_workers=workers)
    iterator = iter(loader)
    for _ in range(8):  # until both workers have told
        next(iterator)
    with pytest.raises(StateError, match=r"must not hold itself, nor be nested more than 100 levels deep"):
        loader.state_dict()


DAMAGED = {
    "map-style": lambda: {"dataset": data.Augmented(), "shuffle": True},
    "iterable": lambda: {"dataset": data.Shuffled()},
    "iterable with a state": lambda: {"dataset": data.StatefulStream()},
    "without workers": lambda: {"dataset": data.OwnGenerators(), "shuffle": True, "num_workers": 0},
    "seeded by batch": lambda: {"dataset": data.Noise(), "shuffle": True, "seeding": "batch"},
    "distributed": lambda: {"dataset": data.Noise(), "sampler": DistributedSampler(INDICES, 2, 1), "shuffle": None},
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


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_of_any_size_may_be_told(workers):
    loader = make(lambda: {"dataset": Telling(lambda: 1 << 20000)}, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    loader = make(lambda: {"dataset": Telling(int)}, num_workers=workers)
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest
    assert workers or loader.dataset.loaded == 1 << 20000
