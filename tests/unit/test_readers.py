"""States of loaders whose reader is a batch ahead of the program; tests/frameworks has the real ones."""

import gc
import pickle
import sys
import types

import pytest
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
    def __init__(self, error=None):
        self.error = error

    def __iter__(self):
        return iter(range(7))

    def state_dict(self):
        if self.error:
            raise self.error
        return {}

    def load_state_dict(self, state):
        pass


@pytest.fixture(params=MODULES.items(), ids=MODULES)
def reader(request, monkeypatch):
    module, name = request.param
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


def test_what_a_reader_holds_while_it_meets_an_error_is_still_to_come(reader):
    loader = rayloader.DataLoader(Fails(), 2)
    batches = iter(reader(loader))
    assert next(batches) == [0, 1]
    with pytest.raises(KeyError):
        next(batches)
    assert loader.state_dict()["position"]["delivered"] == 1
    assert [next(batches), loader.state_dict()["position"]["delivered"]] == [[2, 3], 3]


def test_a_state_that_cannot_be_told_hurts_only_who_asks_for_it(reader):
    loader = make(Stream(ValueError("none")))
    batches = iter(reader(loader))
    assert next(batches) == [0, 1]
    with pytest.raises(rayloader.StateError, match="Stream could not save its state"):
        loader.state_dict()
    assert next(batches) == [2, 3]


def test_a_reader_that_knows_the_length_is_not_ahead(monkeypatch):
    module = types.SimpleNamespace(_PrefetchDataFetcher=Reader)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.loops.fetchers", module)
    monkeypatch.setattr(Reader, "length", 4)
    loader = make()
    iter(Reader(loader))
    assert loader.state_dict()["position"]["delivered"] == 1
