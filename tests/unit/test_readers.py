"""States of loaders whose reader is a batch ahead of the program; tests/frameworks has the real ones."""

import gc
import importlib
import pickle
import sys
import types

import pytest
import torch
from torch.utils.data import IterableDataset

import rayloader

MODULES = {
    "ray.train.torch.train_loop_utils": "_WrappedDataLoader",
    "lightning.pytorch.loops.fetchers": "_PrefetchDataFetcher",
    "pytorch_lightning.loops.fetchers": "_PrefetchDataFetcher",
}


class Reader:
    """Draws the next batch before it hands one on."""

    length = None

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        self.iterator = iter(self.loader)
        self.held = [next(self.iterator, None)]
        return self

    def __next__(self):
        batch = self.held[-1]
        if batch is None:
            raise StopIteration
        self.held = [next(self.iterator, None)]
        return batch.tolist()


class Fails:
    """Raises once, in its fifth sample."""

    def __init__(self):
        self.failed = False

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 4 and not self.failed:
            self.failed = True
            raise KeyError(index)
        return index


class Stream(IterableDataset):
    """Cannot tell its state."""

    def __iter__(self):
        return iter(range(7))

    def state_dict(self):
        raise ValueError("none")

    def load_state_dict(self, state):
        pass


@pytest.fixture(params=MODULES.items(), ids=MODULES)
def reader(request, monkeypatch):
    module, name = request.param
    if module.startswith("ray."):
        importlib.import_module("ray")  # only where it was imported its module is looked for
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: Reader}))
    return Reader


def make(dataset=range(7)):
    return rayloader.DataLoader(dataset, 2, shuffle=None if isinstance(dataset, Stream) else True, seeding="batch")


def resumed(state):
    loader = make()
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


def test_a_state_counts_what_the_program_was_given(reader):
    loader = make()
    states, batches = [], []
    for batch in reader(loader):
        batches.append(batch)
        states.append(loader.state_dict())
    following = [batch.tolist() for batch in loader]
    assert len(batches) == 4
    for taken, state in enumerate(states[:-1], 1):
        assert resumed(state) == batches[taken:]
    assert resumed(states[-1]) == following  # the reader has found the end


def test_it_is_still_that_one_when_the_reader_is_gone_and_is_told_anew_each_time(reader):
    loader = make()
    iterator = iter(reader(loader))
    found = [next(iterator), next(iterator)]
    del iterator
    gc.collect()
    loader.state_dict().clear()
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    samples = [sample for batch in found + resumed(state) for sample in batch]
    assert sorted(samples) == list(range(7))
    assert pickle.loads(pickle.dumps(loader)).state_dict()["position"] is None


def test_a_loaded_state_and_an_iterator_of_the_programs_own_count_at_once(reader):
    loader = make()
    next(iter(reader(loader)))
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert loader.state_dict()["position"]["delivered"] == 1
    next(iter(loader))
    assert loader.state_dict()["position"]["delivered"] == 2
    late = iter(reader(loader))
    own = iter(loader)
    next(own)
    next(late)
    assert loader.state_dict()["position"]["delivered"] == 1


def test_what_a_reader_holds_while_it_meets_an_error_is_still_to_come_and_a_state_is_told_to_who_asks(reader):
    batches = iter(reader(loader := make(Stream())))
    assert next(batches) == [0, 1]
    with pytest.raises(rayloader.StateError, match="Stream could not save its state"):
        loader.state_dict()
    assert next(batches) == [2, 3]
    loader = rayloader.DataLoader(Fails(), 2)
    batches = iter(reader(loader))
    assert next(batches) == [0, 1]
    with pytest.raises(KeyError):
        next(batches)
    assert loader.state_dict()["position"]["delivered"] == 1
    assert [next(batches), loader.state_dict()["position"]["delivered"]] == [[2, 3], 3]


def test_a_reader_that_knows_the_length_is_not_ahead(monkeypatch):
    module = types.SimpleNamespace(_PrefetchDataFetcher=Reader)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loops.fetchers", module)
    monkeypatch.setattr(Reader, "length", 4)
    loader = make()
    iter(Reader(loader))
    assert loader.state_dict()["position"]["delivered"] == 1


class Loop:
    """Lightning's loop over epochs, with several loaders side by side; what it does not know of them has no length."""

    def __init__(self, loaders, length):
        self.loaders, self.length = loaders, length
        self.is_resuming, self._combined_loader_states_to_load = False, []
        self.epoch_loop = types.SimpleNamespace(batch_progress=types.SimpleNamespace(is_last_batch=False))

    def set_up(self):
        self.fetcher = Fetcher(self.loaders, self.length)
        self.fetcher.begin()

    def load(self, states, *, last=False):
        self.is_resuming, self._combined_loader_states_to_load = True, states
        self.epoch_loop.batch_progress.is_last_batch = last


class Fetcher:
    """Gives a batch of each loader, or None where one has no more; if it knows the length it never asks for the end."""

    def __init__(self, loaders, length):
        self.combined_loader = types.SimpleNamespace(flattened=loaders)
        self.length, self.fetched = length, 0

    def begin(self):
        self.iterators = [iter(loader) for loader in self.combined_loader.flattened]
        self.held = [] if self.length is not None else [self.draw()]

    def draw(self):
        drawn = [next(iterator, None) for iterator in self.iterators]
        return None if drawn == [None] * len(drawn) else [None if one is None else one.tolist() for one in drawn]

    def __iter__(self):
        return self

    def __next__(self):
        if self.fetched == self.length:
            raise StopIteration
        batch = self.held.pop() if self.held else self.draw()
        if batch is None:
            raise StopIteration
        self.held = [] if self.length is not None else [self.draw()]
        self.fetched += 1
        return batch


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def lightning(request, monkeypatch):
    for module, names in (("fetchers", {"_PrefetchDataFetcher": Fetcher}), ("fit_loop", {"_FitLoop": Loop})):
        monkeypatch.setitem(sys.modules, f"{request.param}.loops.{module}", types.SimpleNamespace(**names))


def two():
    """Of four batches and of two."""
    torch.manual_seed(1)
    return [rayloader.DataLoader(range(size), 2, shuffle=True) for size in (7, 4)]


def saved(taken, epochs=2):
    """The states after so many batches of the first epoch, and what comes after them."""
    loaders = two()
    loop, states, batches = Loop(loaders, 4), None, []
    for _ in range(epochs):
        loop.set_up()
        for batch in loop.fetcher:
            batches.append(batch)
            if len(batches) == taken:
                states = [loader.state_dict() for loader in loaders]
    return states, batches[taken:]


@pytest.mark.parametrize("taken", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [True, False], ids=["set up before it has the states", "set up with the states"])
def test_states_that_lightning_leaves_in_its_loop_are_loaded_before_the_first_batch(taken, before, lightning):
    """The shorter loader gives nothing more in its epoch, and all begin the next one once the longer has ended."""
    states, following = saved(taken)
    loaders = two()
    loop = Loop(loaders, 4)
    if before:
        loop.set_up()
        torch.rand(3)  # whatever the program draws in between
        loop.load(states)
    else:
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
        loop.set_up()
    loop.fetcher.fetched = taken % 4
    found = list(loop.fetcher)
    loop.is_resuming = False
    while len(found) < len(following):
        loop.set_up()
        found += list(loop.fetcher)
    assert found == following
    assert loop._combined_loader_states_to_load == []


def test_a_state_that_lightning_loads_after_its_first_batch_is_refused(lightning):
    loop = Loop([make()], None)
    loop.set_up()
    loop.load([make().state_dict()])
    with pytest.raises(rayloader.StateError, match=r"read trainer\.max_steps in place of"):
        list(loop.fetcher)


@pytest.mark.parametrize("last", [False, True])
def test_where_the_length_is_not_known_lightning_says_whether_the_epoch_is_over(last, lightning):
    """As where it ends with the first of several loaders: the state of the other one is in the middle."""
    loaders = two()
    iterators = [iter(loader) for loader in loaders]
    for _ in range(2):
        for iterator in iterators:
            next(iterator)
    next(iterators[1], None)
    states = [loader.state_dict() for loader in loaders]
    rest = [*iterators[0]]
    iterators = [iter(loader) for loader in loaders]
    following = [next(iterator).tolist() for iterator in iterators]
    again = two()
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    loop = Loop(again, None)
    loop.load([], last=last)
    loop.set_up()
    assert loop.fetcher.held == [following if last else [rest[0].tolist(), None]]


def test_lightning_is_told_what_skipped_steps_cost(monkeypatch):
    from rayloader.frameworks import readers

    class Loop:
        pass

    fetcher, loop = Loop(), Loop()
    loader = rayloader.DataLoader(range(4), skip_steps=[1])
    monkeypatch.setattr(readers, "find_reader", lambda: readers.LightningReader(fetcher, loop))
    with pytest.warns(UserWarning, match="Lightning counts the batches of an epoch, and one that skip_steps"):
        readers.read(loader)
    monkeypatch.setattr(readers, "find_reader", lambda: readers.LightningReader(fetcher, None))
    readers.read(loader)  # it works for something else than a training
