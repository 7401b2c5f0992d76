"""States of loaders whose reader is a batch ahead of the program; tests/frameworks has the real ones."""

import contextlib
import gc
import importlib
import pickle
import sys
import types

import pytest
from torch.utils.data import IterableDataset

import rayloader
from rayloader.frameworks import readers

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
    assert sorted(sample for batch in found + resumed(state) for sample in batch) == list(range(7))


def test_a_loaded_state_and_an_iterator_of_the_programs_own_count_at_once(reader):
    def delivered():
        return loader.state_dict()["position"]["delivered"]

    loader = make()
    next(iter(reader(loader)))
    loader.load_state_dict(loader.state_dict())
    assert delivered() == 1
    next(iter(loader))
    assert delivered() == 2
    late, own = iter(reader(loader)), iter(loader)
    next(own)
    next(late)
    assert delivered() == 1


def test_what_a_reader_holds_while_it_meets_an_error_is_still_to_come_and_a_state_is_told_to_who_asks(reader):
    batches = iter(reader(loader := make(Stream())))
    assert next(batches) == [0, 1]
    with pytest.raises(rayloader.StateError, match="Stream could not save its state"):
        loader.state_dict()
    assert next(batches) == [2, 3]
    dataset = {index: index for index in range(8) if index != 4}
    batches = iter(reader(loader := rayloader.DataLoader(dataset, 2)))
    assert next(batches) == [0, 1]
    with pytest.raises(KeyError):
        next(batches)
    assert loader.state_dict()["position"]["delivered"] == 1
    assert [next(batches), loader.state_dict()["position"]["delivered"]] == [[2, 3], 3]


def test_lightning_is_told_what_skipped_steps_cost(monkeypatch):
    loader, loop = rayloader.DataLoader(range(4), skip_steps=[1]), type("Loop", (), {})()
    for found in (None, loop):  # None: it works for something else than a training
        monkeypatch.setattr(readers, "find_reader", lambda found=found: readers.LightningReader(make(), found))
        with contextlib.nullcontext() if found is None else pytest.warns(UserWarning, match="Lightning counts"):
            readers.read(loader)


def test_a_reader_that_knows_the_length_is_not_ahead(monkeypatch):
    module = types.SimpleNamespace(_PrefetchDataFetcher=Reader)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loops.fetchers", module)
    monkeypatch.setattr(Reader, "length", 4)
    loader = make()
    iter(Reader(loader))
    assert loader.state_dict()["position"]["delivered"] == 1
