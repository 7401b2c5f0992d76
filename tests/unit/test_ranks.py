"""Each rank's part of what samplers give, beside torch's DistributedSampler, and what cannot be divided.

test_rank_states.py compares the parts of all samplers with a model.
"""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler
from torch.utils.data import DataLoader as TorchDataLoader

import rayloader
import stateful
from rayloader import DataLoader
from rayloader.loader import WorkerCount
from rayloader.random.generators import RandomState
from rayloader.resume.ranks import Shard
from states import Stream


def batches(loader):
    return [batch.tolist() for batch in loader]


@settings(max_examples=50)
@given(*(st.integers(0, most) for most in (29, 6, 6, 4, 3)), st.booleans(), st.booleans())
def test_batches_are_those_of_torchs_distributed_sampler(length, others, rank, size, epoch, shuffle, drop_last):
    data, rank, world = torch.arange(length), rank % (others + 1), others + 1
    sampler = DistributedSampler(data, world, rank, shuffle, seed=5, drop_last=drop_last)
    theirs = TorchDataLoader(data, size + 1, sampler=sampler, drop_last=drop_last)
    ways = [{"shuffle": shuffle}, {"sampler": range(length)}]
    for way in ways[: 2 - shuffle]:
        ours = DataLoader(data, size + 1, drop_last=drop_last, num_replicas=world, rank=rank, seed=5, **way)
        sampler.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert (len(ours), batches(ours)) == (len(theirs), batches(theirs))


def test_an_order_is_drawn_when_it_is_asked_for_and_leaves_the_global_generators_alone():
    generator = torch.Generator().manual_seed(3)
    before = RandomState.capture([generator])
    parts = [iter(Shard(RandomSampler(range(20), generator=generator), 2, 1)), iter(Shard(stateful.Lazy(), 2, 1))]
    assert RandomState.capture([generator]).equals(before)
    list(parts[1])
    assert RandomState.capture([generator]).equals(before)
    list(parts[0])
    assert not RandomState.capture([generator]).equals(before)


class Told(Sampler):
    """Wants to know the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(range(self.epoch, self.epoch + 6))


class ToldDataset(list):
    epoch, set_epoch = 0, Told.set_epoch


@pytest.mark.parametrize("ranks", [{}, {"num_replicas": 2, "rank": 1}])
@pytest.mark.parametrize("given", [lambda s: {"sampler": s}, lambda s: {"batch_sampler": BatchSampler(s, 2, False)}])
def test_set_epoch_is_told_to_who_wants_to_know(given, ranks):
    sampler = Told()
    loader = DataLoader(ToldDataset(range(20)), **given(sampler), **ranks)
    loader.set_epoch(5)
    assert (loader.dataset.epoch, sampler.epoch) == (5, 5)
    DataLoader(range(3)).set_epoch(3)


# ---- the epoch


def of_rank(dataset=range(100), batch_size=4, **options):
    size = {} if "batch_sampler" in options else {"batch_size": batch_size}
    return DataLoader(dataset, **size, **{"num_replicas": 2, "rank": 0, **options})


@pytest.mark.parametrize("given", [{"shuffle": True}, {"sampler": stateful.Lazy()}])
def test_the_same_random_order_again_is_told_once(given):
    loader = of_rank(**given)
    next(iter(loader))  # a look at the first batch
    list(loader)
    with pytest.warns(UserWarning, match=r"same random order .* number is still 0; call set_epoch") as caught:
        list(loader)
    assert caught[0].filename == __file__
    list(loader)


def test_no_warning_without_cause():
    """Warnings are errors here."""
    loader = of_rank(shuffle=True)
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    held = RandomSampler(range(20), generator=torch.Generator())
    for loader in (of_rank(), of_rank(sampler=range(20)), of_rank(sampler=held), DataLoader([1, 2], shuffle=True)):
        list(loader)
        list(loader)


# ---- frameworks


BATCHES = BatchSampler(range(20), 2, False)


@pytest.mark.parametrize("given", [{}, {"shuffle": True}, {"sampler": stateful.Lazy()}, {"batch_sampler": BATCHES}])
def test_a_loader_that_is_made_anew_from_its_attributes_is_not_divided_twice(given):
    """And frameworks see a DistributedSampler."""
    loader = of_rank(**given, rank=1, seed=4)
    assert isinstance(loader.sampler, DistributedSampler)
    expected = batches(loader)
    own = {name: getattr(loader, name) for name in ("num_replicas", "rank", "seed", "num_workers")}
    parts = {"batch_sampler": loader.batch_sampler}
    if "batch_sampler" not in given:
        parts = {"batch_size": loader.batch_size, "sampler": loader.sampler}
    anew = DataLoader(loader.dataset, **parts, **own)
    assert batches(anew) == expected
    assert type(anew.num_workers) is WorkerCount
    with rayloader.patch():
        anew = TorchDataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=loader.num_workers)
    assert (anew.num_replicas, anew.rank, anew.seed) == (2, 1, 4)
    assert batches(anew) == expected


class AcceleratesShard(BatchSampler):
    def __init__(self, batch_sampler):
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, 2, 0

    def __iter__(self):
        return iter(list(self.batch_sampler)[::2])

    def __len__(self):
        return len(self.batch_sampler) // 2


class Part(Stream):
    num_processes, process_index = 2, 1


DISTRIBUTED = DistributedSampler(range(20), 2, 0)


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": DISTRIBUTED},
        {"batch_sampler": BatchSampler(DISTRIBUTED, 2, False)},
        {"batch_sampler": AcceleratesShard(BATCHES)},
        {"sampler": Shard(range(20), 2, 0)},
        {"dataset": Part()},
    ],
)
def test_what_is_divided_already_is_refused(given):
    with pytest.raises(ValueError, match=r"divided among the ranks twice, by .*leave num_replicas and rank out"):
        of_rank(**given)


def test_a_framework_that_divides_what_is_divided_is_refused():
    loader = of_rank()
    again = AcceleratesShard(loader.batch_sampler)
    for patch in (contextlib.nullcontext, rayloader.patch):
        with patch(), pytest.raises(ValueError, match="twice, by AcceleratesShard"):
            TorchDataLoader(loader.dataset, batch_sampler=again, num_workers=loader.num_workers)
    for sampler, rank in ((DISTRIBUTED, 0), (loader.sampler, 1)):  # other numbers than it was made with
        with pytest.raises(ValueError, match="twice, by DistributedSampler"):
            of_rank(sampler=sampler, num_workers=loader.num_workers, rank=rank)


# ---- what is refused


class Endless(Told):
    def __iter__(self):
        return itertools.repeat(0)


def test_an_endless_sampler_is_an_error_and_no_hang():
    with pytest.raises(TypeError, match="must have a length"):
        of_rank(sampler=itertools.repeat(0))
    with pytest.raises(ValueError, match="gives more than the 6"):
        list(of_rank(sampler=Endless()))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"rank": None}, ValueError, "num_replicas was given without rank"),
        ({"num_replicas": None}, ValueError, "rank was given without num_replicas"),
        ({"num_replicas": 0}, ValueError, "num_replicas must be a whole number >= 1, got 0"),
        ({"num_replicas": 2.0}, TypeError, "num_replicas must be a whole number >= 1, got 2.0"),
        ({"rank": -1}, ValueError, "rank must be a whole number >= 0, got -1"),
        ({"rank": 2}, ValueError, "num_replicas must be a whole number >= 3, got 2"),
        ({"seed": -1}, ValueError, "seed must be a whole number >= 0, got -1"),
        ({"num_replicas": None, "rank": None, "seed": 3}, ValueError, "no effect without num_replicas"),
        ({"sampler": range(5), "shuffle": True}, ValueError, "mutually exclusive"),
        ({"batch_sampler": [[1]], "shuffle": True}, ValueError, "mutually exclusive"),
    ],
)
def test_arguments_are_checked(given, error, text):
    with pytest.raises(error, match=text):
        of_rank(**given)


def test_another_rank_is_another_loader():
    for name in ("num_replicas", "rank", "seed"):
        with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
            setattr(of_rank(), name, 1)


def test_the_other_number_is_torch_distributeds(monkeypatch):
    for name, value in {"is_initialized": True, "get_world_size": 2, "get_rank": 1}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for numbers in ({"num_replicas": 2}, {"rank": 0}, {"num_replicas": 3}):
        loader = DataLoader(range(5), **numbers)
        assert (loader.num_replicas, loader.rank) == (numbers.get("num_replicas", 2), numbers.get("rank", 1))
    loader = DataLoader(range(5))  # nothing is divided
    assert (loader.num_replicas, loader.rank, loader.seed, len(loader)) == (None, None, 0, 5)
