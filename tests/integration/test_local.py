"""Without workers: states in the trainer's process, and Ray is not needed for any of them."""

import importlib
import itertools
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stateful as data
from checkpoint_data import CASES, SAMPLERS, batches, check, endless, make, plain, read, resumed, run, save, some
from probes import Calls, as_is, oversubscribed
from rayloader import DataLoader, ReplayError, SkipLimitError, StateError

LOCAL = {
    **{name: case for name, case in CASES.items() if name != "augmented, strict depth"},
    "shuffled by a generator": lambda: {"dataset": data.Augmented(), "shuffle": True, "generator": torch.Generator()},
    "collate_fn with a generator": lambda: {"dataset": data.Augmented(), "collate_fn": Jitter()},
    "own iterator": lambda: {"dataset": OwnIterator()},
    "draws as it begins": lambda: {"dataset": DrawsAsItBegins()},
}


class Jitter:
    def __init__(self):
        self.generator = np.random.default_rng(3)

    def __call__(self, samples):
        return [samples, self.generator.random()]


class OwnIterator(IterableDataset):
    """`iter()` begins anew; a state is to be loaded after it."""

    def __init__(self):
        self.epoch = -1
        self.position = 0

    def __iter__(self):
        self.position, self.epoch = 0, self.epoch + 1
        return self

    def __next__(self):
        if self.position == 10:
            raise StopIteration
        self.position += 1
        return [self.epoch, self.position, *data.noise()]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class DrawsAsItBegins(IterableDataset):
    def __iter__(self):
        return iter([[number, *data.noise()] for number in torch.randperm(10).tolist()])


def elsewhere(arguments, **options):
    """A loader for which nothing is as it was where the state was saved."""
    random.seed(2)
    np.random.seed(2)
    return make(arguments, 0, seed=2, **options)


# ---- from every point of a run


@some(1, 4)
@pytest.mark.parametrize("seeding", ["worker", pytest.param("batch", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", LOCAL)
def test_from_every_point_the_batches_are_those_of_the_undisturbed_run(case, seeding, which):
    epochs, points = run(make(LOCAL[case], 0, seeding=seeding), which)
    assert epochs[0]
    for point in points:
        check(epochs, point, elsewhere(LOCAL[case], seeding=seeding))


@some(2, 8)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_go_on(name, which):
    def arguments(seed):
        return lambda: {"dataset": data.Augmented(), **SAMPLERS[name](seed)}

    epochs, points = run(make(arguments(1), 0), which)
    assert epochs[0]
    for point in points:
        check(epochs, point, elsewhere(arguments(2)))


@pytest.mark.parametrize("case", LOCAL)
def test_states_that_are_taken_change_nothing_and_the_batches_are_torchs(case):
    def epochs(make_loader):
        for module in (torch, random, np.random):
            (module.manual_seed if module is torch else module.seed)(1)
        options = {"batch_size": 3, **LOCAL[case]()}
        loader = make_loader(options)
        return [list(batches(loader)) for _ in range(2)], random.random(), torch.rand(1).item(), np.random.rand()

    expected = epochs(lambda options: DataLoader(**options))
    assert epochs(lambda options: Saving(DataLoader(**options))) == expected
    if "on_error" not in LOCAL[case]():
        assert epochs(lambda options: torch.utils.data.DataLoader(**options)) == expected


class Saving:
    """A loader whose state is taken before and after each batch."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.loader.state_dict()
        self.iterator = iter(self.loader)
        return self

    def __next__(self):
        self.loader.state_dict()
        try:
            return next(self.iterator)
        finally:
            self.loader.state_dict()


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.full) for step in (1, 2, 5, 7))])
@pytest.mark.parametrize("case", ["augmented", "own generators", "stateful map", "shuffled stream", "own iterator"])
def test_a_chain_of_resumed_runs_is_the_undisturbed_run(case, step):
    epochs, (start,) = run(make(LOCAL[case], 0), slice(1))
    expected = [batch for epoch in epochs for batch in epoch]
    found, saved = [], start.saved
    for _ in range(len(expected) // step):
        loader = elsewhere(LOCAL[case])
        loader.load_state_dict(read(saved))
        found += itertools.islice(endless(loader), step)
        saved = save(loader)
    assert found == expected[: len(found)]


def test_an_epoch_that_was_broken_off_goes_on_too():
    expected = list(batches(make(CASES["augmented"], 0)))
    loader = make(CASES["stateful map"], 0)
    for _ in loader:
        break
    found = resumed(elsewhere(CASES["stateful map"]), save(loader))[0]
    random.seed(1), np.random.seed(1)
    loader = make(CASES["augmented"], 0)
    next(iter(loader))
    assert len(found) == len(resumed(elsewhere(CASES["augmented"]), save(loader))[0]) == len(expected) - 1


def test_a_list_of_all_ranks_states():
    def of_rank(rank, num_replicas):
        sampler = DistributedSampler(range(data.LENGTH), num_replicas, rank, seed=7)
        return make(lambda: {"dataset": data.Indices(), "sampler": sampler, "batch_size": 2}, 0)

    taken, states = [], []
    for rank in range(2):
        loader = of_rank(rank, 2)
        taken += itertools.islice(batches(loader), 3)
        states.append(read(save(loader)))
    loader = of_rank(0, 1)
    loader.load_state_dict(states)
    seen = [index for batch in [*taken, *batches(loader)] for index in batch]
    assert sorted(seen) == list(range(data.LENGTH))


# ---- what a state moves


def test_what_the_program_does_after_loading_counts():
    def arguments():
        return {"dataset": data.Augmented(), "shuffle": True}

    loader = make(arguments, 0)
    next(iter(loader))
    saved = save(loader)
    drawn = [random.random(), torch.rand(1).item(), np.random.rand()]
    other = elsewhere(arguments)
    other.load_state_dict(read(saved))
    assert [random.random(), torch.rand(1).item(), np.random.rand()] == drawn
    random.seed(5)
    state = torch.get_rng_state()
    iterator = iter(other)
    assert torch.equal(torch.get_rng_state(), state)
    first = next(batches(iterator))[1]
    random.seed(5)
    assert first[0] == random.random()


def test_reading_a_stream_again_leaves_the_programs_generators_alone():
    loader = make(CASES["shuffled stream"], 0)
    iterator = iter(loader)
    next(iterator)
    other = elsewhere(CASES["shuffled stream"])
    other.load_state_dict(read(save(loader)))
    random.seed(3)
    drawn = random.getstate()
    iter(other)
    assert random.getstate() == drawn


def test_between_load_and_iter_a_loader_has_the_loaded_state_and_the_programs_generators():
    loader = make(CASES["shuffled stream"], 0)
    stream = endless(loader)
    next(stream)
    other = elsewhere(CASES["shuffled stream"])
    other.load_state_dict(read(save(loader)))
    saved = save(other)
    expected = list(itertools.islice(stream, 4))
    assert resumed(elsewhere(CASES["shuffled stream"]), saved)[0] == expected


# ---- `seeding="batch"`: any number of workers, none included


@oversubscribed
@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_with_a_seed_for_each_batch_workers_make_no_difference(ray_session, num_workers):
    def loader(count, seed=1):
        return make(lambda: {"dataset": data.Noise(), "shuffle": True}, count, seed=seed, seeding="batch")

    epochs, points = run(loader(0), slice(0, None, 7))
    theirs, their_points = run(loader(num_workers), slice(0, None, 7))
    assert theirs == epochs
    for mine, their in zip(points, their_points, strict=True):
        check(epochs, mine, loader(num_workers, seed=2))
        check(epochs, their, loader(0, seed=2))


def test_seeding_by_batch_leaves_the_programs_generators_alone():
    loader = make(lambda: {"dataset": data.Noise()}, 0, seeding="batch")
    iterator = iter(loader)
    states = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    list(iterator)
    assert (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()) == states


@oversubscribed
def test_a_stream_seeded_by_batch_is_that_of_one_worker(ray_session):
    def epoch(count):
        return list(batches(make(lambda: {"dataset": DrawsAsItBegins()}, count, seeding="batch")))

    assert epoch(0) == epoch(1)


# ---- what does not fit


@pytest.mark.parametrize(("saved_with", "loaded_with"), [(0, 2), (2, 0)])
@pytest.mark.parametrize("case", ["augmented", "shuffled stream"])
def test_with_workers_and_without_the_streams_are_different_ones(case, saved_with, loaded_with, ray_session):
    """Before, in and after an epoch."""
    loader = make(CASES[case], saved_with)
    states = [loader.state_dict()]
    states += [loader.state_dict() for _ in loader]
    states += [loader.state_dict()]
    for state in states:
        with pytest.raises(StateError, match=r"num_workers=.* this one has .*own random generators"):
            make(CASES[case], loaded_with).load_state_dict(state)


@pytest.mark.parametrize("case", ["own generators", "stateful map", "shuffled stream"])
def test_what_a_seed_for_each_batch_does_not_reach_is_refused(case):
    loader = make(CASES[case], 0, seeding="batch")
    next(iter(loader))
    with pytest.raises(StateError, match="the dataset is a stream, or has a state or random generators of its own"):
        make(CASES[case], 2, seeding="batch").load_state_dict(loader.state_dict())


def test_num_workers_that_are_set_after_loading_are_refused_too():
    loader = make(CASES["augmented"], 0)
    loader.load_state_dict(loader.state_dict())
    loader.num_workers, loader.prefetch_factor = 2, 2
    with pytest.raises(StateError, match="num_workers"):
        iter(loader)


@pytest.mark.parametrize("dataset", [data.Entropy, data.Unseeded, data.CountsEpochs])
def test_a_stream_that_cannot_be_read_again_is_an_error(dataset):
    dataset = dataset()
    loader = make(lambda: {"dataset": dataset}, 0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(ReplayError, match="gave something else than before"):
        iter(loader)


class DrawsFromTheProgram(IterableDataset):
    def __iter__(self):
        while True:
            yield [torch.rand(1).item()]


def test_a_stream_that_shares_its_generator_with_the_program_is_an_error():
    loader = make(lambda: {"dataset": DrawsFromTheProgram()}, 0)
    iterator = iter(loader)
    next(iterator)
    torch.rand(1)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(ReplayError, match="whatever else draws from the global random generators"):
        iter(loader)


def test_another_dataset_is_refused():
    loader = make(CASES["own generators"], 0)
    next(iter(loader))
    with pytest.raises(
        StateError,
        match=r"random generators of dataset and collate_fn: dataset\.(python|torch|others).* is missing here",
    ):
        elsewhere(lambda: {"dataset": data.Augmented()}).load_state_dict(loader.state_dict())


class CannotTell(data.Indices):
    def state_dict(self):
        raise data.PlannedError("no state today")

    def load_state_dict(self, state):
        pass


class Unpicklable:
    def __init__(self, index):
        self.index = index

    def __reduce__(self):
        raise TypeError("not this one")


class OfUnpicklable:
    def __iter__(self):
        return map(Unpicklable, range(4))


def test_only_who_asks_for_a_state_pays_for_what_cannot_be_told():
    loader = make(lambda: {"dataset": CannotTell()}, 0)
    assert len(list(loader)) == 8
    with pytest.raises(StateError, match="no state today"):
        loader.state_dict()
    loader = DataLoader(
        Calls(lambda unpicklable: unpicklable.index, 4), None, sampler=OfUnpicklable(), collate_fn=as_is
    )
    iterator = iter(loader)
    assert next(iterator) == 0
    with pytest.raises(StateError, match="not this one"):
        loader.state_dict()
    assert list(iterator) == [1, 2, 3]


class OfUnpicklableBatches(IterableDataset):
    def __iter__(self):
        return iter([object(), lambda: os.getpid(), open(os.devnull)])


def test_batches_need_not_be_picklable():
    loader = DataLoader(OfUnpicklableBatches(), None, collate_fn=as_is)
    *_, file = loader
    file.close()


# ---- skipped samples


def test_samples_that_raise_are_left_out():
    loader = make(CASES["skipping map"], 0)
    found = [plain(batch)[0] for batch in loader]
    assert found == [[0, 2], [3, 4, 5], [9, 10, 11], [12, 14], [15, 16, 17], [18, 19, 20], [21]]
    assert loader.skipped == 5


def test_too_many_end_the_epoch():
    loader = make(CASES["skipping map"], 0, max_skipped=2)
    iterator = iter(loader)
    assert len([next(iterator), next(iterator)]) == 2
    for _ in range(2):
        with pytest.raises(SkipLimitError, match="4 samples have raised"):
            next(iterator)


# ---- beside torchdata's loader

SIDE_BY_SIDE = {
    "map": lambda: {"dataset": data.Indices()},
    "distributed": lambda: {"dataset": data.Indices(), "sampler": DistributedSampler(range(data.LENGTH), 2, 1)},
    "stateful sampler": lambda: {"dataset": data.Indices(), "sampler": data.StatefulSampler(1)},
    "stateful map": lambda: {"dataset": data.Counting()},
    "stateful stream": lambda: {"dataset": data.StatefulStream()},
    "stream of stateful iterators": lambda: {"dataset": data.StreamOfStatefulIterators()},
    "own iterator": lambda: {"dataset": OwnIterator()},
    "stream": lambda: {"dataset": Numbers()},
}


class Numbers(IterableDataset):
    def __iter__(self):
        yield from ([number] for number in range(20))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_it_goes_on_where_torchdatas_does(case, taken):
    """As far as torchdata's restores it: without what is drawn from the global generators."""

    def rest(make_loader):
        loader = make_loader(SIDE_BY_SIDE[case]())
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        state = loader.state_dict()
        expected = list(batches(iterator))
        loader = make_loader(SIDE_BY_SIDE[case]())
        loader.load_state_dict(state)
        return [batch[:1] for batch in batches(loader)], [batch[:1] for batch in expected]

    found, expected = rest(lambda options: DataLoader(batch_size=3, **options))
    assert found == expected
    assert rest(lambda options: StatefulDataLoader(batch_size=3, **options)) == (found, expected)


NAMING = """
import random
import numpy as np
import {name}_rngs as rngs
import {name}_package.rngs
from {name}_rngs import PYTHON

NUMPY = np.random.default_rng(3)

def helper():
    return NUMPY.random()

class Augment:
    def __call__(self):
        return PYTHON.random()

AUGMENT = Augment()

class Base:
    def __len__(self):
        return 24
    def __getitem__(self, index):
        from {name}_rngs import IMPORTED
        numbers = helper(), AUGMENT(), rngs.OF_MODULE.random(), {name}_package.rngs.OF_PACKAGE.random()
        return index, *numbers, IMPORTED.random(), self.drawn
    @property
    def drawn(self):
        return rngs.OF_PROPERTY.random()

class Data(Base):
    pass

LATE, HELD = None, {{"others": []}}

class MakesThemLate(Base):
    def __getitem__(self, index):
        global LATE
        if index == 8:
            LATE, HELD["late"], Augment.late = random.Random(11), random.Random(12), random.Random(13)
            AUGMENT.own = random.Random(14)
            HELD["others"].append(random.Random(15))
        late = [LATE, HELD["late"], Augment.late, AUGMENT.own, *HELD["others"]] if LATE else []
        return index, *[generator.random() for generator in late]
"""


@pytest.fixture
def naming(tmp_path, monkeypatch):
    """A module of the program's own whose functions draw from generators of its own and of other modules."""
    name = f"naming_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}_package").mkdir()
    for path in (f"{name}_rngs.py", f"{name}_package/__init__.py", f"{name}_package/rngs.py"):
        names = "PYTHON, OF_MODULE, OTHER, IMPORTED, OF_PROPERTY, OF_PACKAGE"
        (tmp_path / path).write_text(
            f"import random\n{names} = map(random.Random, range({len(path)}, {len(path)} + 6))\n"
        )
    (tmp_path / f"{name}.py").write_text(NAMING.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


def test_generators_that_the_datasets_code_names_are_restored(naming):
    """Those of its module, of modules that it names or imports, and of what its functions call."""
    loader = DataLoader(naming.Data(), 4, collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    later = list(loader)
    other = naming.rngs.OTHER.getstate()
    loader.load_state_dict(state)
    assert list(loader) == rest
    assert list(loader) == later
    assert naming.rngs.OTHER.getstate() == other
    naming.NUMPY = random.Random(7)
    with pytest.raises(StateError, match=r"dataset\.\S*:NUMPY is missing here or in the state, or of another kind"):
        loader.load_state_dict(state)


def test_generators_that_the_code_names_are_found_when_they_are_made_later(naming):
    loader = DataLoader(naming.MakesThemLate(), 4, collate_fn=list)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    for taken in (3, 4, 5):
        loader.load_state_dict(states[taken - 1])
        assert list(loader) == batches[taken:]
