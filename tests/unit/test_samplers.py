"""Whether samplers keep more than a state holds, what a look at them does, and where it ends."""

import random
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, Subset

import rayloader
from rayloader.resume import samplers as module
from rayloader.resume.samplers import Samplers, named_generators

LENGTH = 24


class Drawing(Dataset):
    def __init__(self):
        self.generator = random.Random(0)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index

    def draw(self):
        return self.generator.randrange(LENGTH)


class Constant(Sampler):
    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH))


class Remembers(Constant):
    """Keeps what it has given, and gives the same."""

    def __init__(self):
        self.given = []

    def __iter__(self):
        self.given.append(len(self.given))
        return super().__iter__()


class ByEpoch(Constant):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(random.Random(self.epoch).sample(range(LENGTH), LENGTH))


class Lazily(Constant):
    """From the global generators, as it is asked."""

    def __iter__(self):
        for _ in range(LENGTH):
            yield int((random.random() + np.random.rand() + torch.rand(1).item()) * 100) % LENGTH


class Counts(Constant):
    def __init__(self):
        self.counts = [0]

    def __iter__(self):
        self.counts[0] += 1
        return iter(random.Random(self.counts[0]).sample(range(LENGTH), LENGTH))


class Uncopied(Counts):
    """Nobody can know what it would give."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Tells(Counts):
    def state_dict(self):
        return {"count": self.counts[0]}

    def load_state_dict(self, state):
        self.counts[0] = state["count"]


class Fails(Constant):
    def __iter__(self):
        raise KeyError("not yet")


class OfItsData(Constant):
    def __init__(self):
        self.data_source = Drawing()

    def __iter__(self):
        return iter([self.data_source.draw() for _ in range(LENGTH)])


def samplers_of(sampler):
    return Samplers(DataLoader(range(LENGTH), batch_size=4, sampler=sampler))


@pytest.mark.parametrize(
    ("sampler", "keeps"),
    [
        (Constant(), False),
        (Remembers(), False),
        (ByEpoch(), False),
        (Lazily(), False),
        (Tells(), False),
        (Uncopied(), False),
        (Fails(), False),
        (DistributedSampler(range(LENGTH), 1, 0), False),
        ([3, 1, 2], False),
        (Counts(), True),
        (OfItsData(), True),
    ],
    ids=lambda given: type(given).__name__,
)
def test_only_samplers_that_go_on_from_what_no_state_holds_keep_more(sampler, keeps):
    assert samplers_of(sampler).keep_more(range(LENGTH), []) == keeps


def test_a_look_copies_neither_what_the_dataset_holds_nor_a_great_many_objects(monkeypatch):
    class Uncopiable(Drawing):
        def __deepcopy__(self, memo):
            pytest.fail("was copied")

    counts, rows = Counts(), Uncopiable()
    counts.base = rows
    assert samplers_of(counts).keep_more(Subset(rows, range(LENGTH)), [])
    monkeypatch.setattr(module, "_MOST_COPIED", 100)
    assert samplers_of(counts).keep_more(Subset(rows, range(LENGTH)), [])
    counts.many = [[number] for number in range(100)]
    assert not samplers_of(counts).keep_more(Subset(rows, range(LENGTH)), [])


def test_what_is_restored_beside_them_is_nothing_that_they_keep():
    """Of a loader without workers the dataset's generators are in the state."""
    sampler = OfItsData()
    before = sampler.data_source.generator.getstate()
    assert not samplers_of(sampler).keep_more(sampler.data_source, [sampler.data_source.generator])
    assert sampler.data_source.generator.getstate() == before


@pytest.mark.parametrize("sampler", [Counts(), Lazily()], ids=["Counts", "Lazily"])
def test_a_look_leaves_samplers_and_generators_as_they_were(sampler):
    def now():
        return str(vars(sampler)), random.getstate(), torch.get_rng_state().tolist(), np.random.rand()

    np.random.seed(0)
    before = now()
    np.random.seed(0)
    samplers_of(sampler).keep_more(range(LENGTH), [])
    assert now() == before


def test_torchs_samplers_are_not_asked(monkeypatch):
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: pytest.fail("was asked"))
    assert not samplers_of(RandomSampler(range(LENGTH))).keep_more(range(LENGTH), [])


NAMED, OTHER = random.Random(1), random.Random(2)


def test_generators_of_its_module_are_a_samplers_if_its_code_names_them():
    class Names(Constant):
        held = random.Random(3)

        def __iter__(self):
            return iter([NAMED.randrange(LENGTH)])

    assert named_generators(Names()) == [Names.held, NAMED]


class Endless:
    """A sampler that wraps what it holds anew at each access."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)

    @property
    def sampler(self):
        return Endless(self.inner)


class Raising(Endless):
    @property
    def sampler(self):
        raise RuntimeError("not yet")


def mocked(inner):
    return Mock(__iter__=lambda _: iter(inner), __len__=lambda _: len(inner))


@pytest.mark.parametrize("sampler", [Endless, Raising, mocked])
@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_what_a_sampler_makes_without_end_is_not_followed_without_end(sampler, name):
    order = [3, 1, 2] if name == "sampler" else [[3, 1], [2]]
    torchs = DataLoader(range(5), **{name: sampler(order)})
    ours = rayloader.DataLoader(range(5), **{name: sampler(order)})
    ours.set_epoch(1)
    for _ in range(2):
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in torchs]
    if sampler is not mocked:  # whose state is a Mock
        next(iter(ours))
        anew = rayloader.DataLoader(range(5), **{name: sampler(order)})
        anew.load_state_dict(ours.state_dict())
        assert [batch.tolist() for batch in anew] == [batch.tolist() for batch in torchs][1:]
