"""Each rank's part of what samplers give, beside torch's DistributedSampler."""

import itertools
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader

import rayloader
from rayloader import DataLoader
from rayloader.loader import WorkerCount
from rayloader.resume.ranks import Shard


def batches(loader):
    return [batch.tolist() for batch in loader]


# ---- beside torch's DistributedSampler


RANKS = [(num_replicas, rank) for num_replicas in (1, 2, 4, 7) for rank in range(num_replicas)]
LENGTHS = [0, 1, 3, 24, 25, 29]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_those_of_torchs_distributed_sampler(drop_last, shuffle):
    for length, (num_replicas, rank) in itertools.product(LENGTHS, RANKS):
        data = torch.arange(length)
        sampler = DistributedSampler(data, num_replicas, rank, shuffle, seed=5, drop_last=drop_last)
        theirs = TorchDataLoader(data, 3, sampler=sampler, drop_last=drop_last)
        ours = DataLoader(data, 3, shuffle, drop_last=drop_last, num_replicas=num_replicas, rank=rank, seed=5)
        assert len(ours) == len(theirs)
        for epoch in (0, 3):
            sampler.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert batches(ours) == batches(theirs)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_is_divided_as_distributed_sampler_divides_a_dataset(drop_last):
    for length, (num_replicas, rank) in itertools.product(LENGTHS, RANKS):
        shard = Shard(range(length), num_replicas, rank, drop_last=drop_last)
        expected = DistributedSampler(range(length), num_replicas, rank, shuffle=False, drop_last=drop_last)
        assert list(shard) == list(expected)
        assert len(shard) == len(expected) == len(list(shard))


def test_orders_of_torchs_samplers_are_those_after_seeding_with_seed_and_epoch():
    torch.manual_seed(1)
    for make in (
        lambda: SubsetRandomSampler(range(20)),
        lambda: WeightedRandomSampler(range(1, 21), 30),
        lambda: RandomSampler(range(20), replacement=True),
    ):
        shard = Shard(make(), 1, 0, seed=7)
        shard.set_epoch(4)
        with torch.random.fork_rng():
            torch.manual_seed(7 + 4)
            expected = list(make())
        assert list(shard) == expected


# ---- one order in all ranks


class Draws(Sampler):
    """Draws as it goes, from all three global generators."""

    def __len__(self):
        return 30

    def __iter__(self):
        for _ in range(10):
            yield random.randrange(100)
            yield int(np.random.randint(100))
            yield int(torch.randint(100, ()))


class Buckets(Sampler):
    """Batches of several sizes, always in the same list."""

    def __iter__(self):
        batch = []
        for size in torch.randperm(7).tolist():
            batch[:] = torch.randint(50, (size + 1,)).tolist()
            yield batch

    def __len__(self):
        return 7


def orders(make, num_replicas, epoch):
    """What each rank gets, whose global generators differ."""
    parts = []
    for rank in range(num_replicas):
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        loader = make(rank)
        loader.set_epoch(epoch)
        parts.append([drawn.copy() if isinstance(drawn, list) else drawn for drawn in loader._index_sampler])
        after = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        assert str(after) == str(before)
    return parts


@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_with_other_global_generators_draw_the_same_order(epoch):
    data = range(100)
    of_one = orders(lambda _: DataLoader(data, None, sampler=Draws(), num_replicas=1, rank=0), 1, epoch)
    parts = orders(lambda rank: DataLoader(data, None, sampler=Draws(), num_replicas=3, rank=rank), 3, epoch)
    assert [sample for three in zip(*parts, strict=True) for sample in three] == of_one[0]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_batch_sampler_gives_whole_batches_and_all_ranks_as_many(epoch):
    data = range(100)

    def make(num_replicas):
        return lambda rank: DataLoader(data, batch_sampler=Buckets(), num_replicas=num_replicas, rank=rank)

    (whole,) = orders(make(1), 1, epoch)
    assert len(whole) == 7
    parts = orders(make(3), 3, epoch)
    assert [batch for three in zip(*parts, strict=True) for batch in three] == [*whole, *whole[:2]]
    assert len(make(3)(0)) == 3


def test_another_epoch_and_another_seed_are_another_order():
    def drawn(seed, epoch):
        shard = Shard(Draws(), 2, 0, seed=seed)
        shard.set_epoch(epoch)
        return list(shard)

    assert drawn(0, 0) == drawn(0, 0)
    assert drawn(0, 0) != drawn(0, 1)
    assert drawn(0, 0) != drawn(1, 0)


def test_the_incomplete_round_of_a_batch_sampler_that_drops_is_dropped():
    sampler = BatchSampler(range(29), 4, drop_last=True)  # 7 batches
    loaders = [DataLoader(range(29), batch_sampler=sampler, num_replicas=3, rank=rank) for rank in range(3)]
    parts = [batches(loader) for loader in loaders]
    assert [len(part) for part in parts] == [len(loader) for loader in loaders] == [2, 2, 2]
    assert sorted(sample for part in parts for batch in part for sample in batch) == list(range(24))


def test_a_generator_of_the_samplers_own_goes_on_from_epoch_to_epoch():
    generator = torch.Generator().manual_seed(3)
    alone = RandomSampler(range(20), generator=torch.Generator().manual_seed(3))
    shard = Shard(RandomSampler(range(20), generator=generator), 2, 1)
    for _ in range(3):
        assert list(shard) == list(alone)[1::2]


class Weighted(Sampler):
    """Wants to know the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(range(self.epoch, self.epoch + 6))


def test_the_sampler_within_is_told_the_epoch():
    for loader in (
        DataLoader(range(20), None, sampler=Weighted(), num_replicas=2, rank=1),
        DataLoader(range(20), 1, sampler=Weighted(), num_replicas=2, rank=1),
    ):
        loader.set_epoch(5)
        assert [int(sample) for sample in loader] == [6, 8, 10]
    loader = DataLoader(range(20), batch_sampler=BatchSampler(Weighted(), 2, False), num_replicas=3, rank=0)
    loader.set_epoch(2)
    assert batches(loader) == [[2, 3]]


# ---- the epoch


def shuffled(**options):
    return DataLoader(range(100), 4, num_replicas=2, rank=0, **options)


@pytest.mark.parametrize("given", [{"shuffle": True}, {"sampler": Draws()}])
def test_the_same_random_order_again_is_told_once(given):
    loader = shuffled(**given)
    next(iter(loader))  # a look at the first batch
    list(loader)
    with pytest.warns(UserWarning, match=r"same random order .* number is still 0; call set_epoch") as caught:
        list(loader)
    assert caught[0].filename == __file__
    list(loader)


def test_no_warning_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = shuffled(shuffle=True)
        for epoch in range(3):
            loader.set_epoch(epoch)
            list(loader)
        for loader in (
            shuffled(),
            shuffled(sampler=range(20)),
            shuffled(sampler=RandomSampler(range(20), generator=torch.Generator())),
            DataLoader(range(20), shuffle=True),
        ):
            list(loader)
            list(loader)


def test_set_epoch_is_told_to_who_wants_to_know():
    class Dataset(list):
        set_epoch = Weighted.set_epoch

    sampler = Weighted()
    for given in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 2, False)}):
        loader = DataLoader(Dataset(range(9)), **given)
        loader.set_epoch(3)
        assert (loader.dataset.epoch, sampler.epoch) == (3, 3)
        sampler.epoch = 0
    DataLoader(range(3)).set_epoch(3)


# ---- frameworks


def test_frameworks_see_a_distributed_sampler():
    for loader in (
        DataLoader(range(8), num_replicas=2, rank=0),
        DataLoader(range(8), sampler=SequentialSampler(range(8)), num_replicas=2, rank=0),
        DataLoader(range(8), batch_sampler=BatchSampler(range(8), 2, False), num_replicas=2, rank=0),
    ):
        assert isinstance(loader.sampler, DistributedSampler)
        loader.sampler.set_epoch(3)
        assert loader.sampler.epoch == 3


@pytest.mark.parametrize(
    "given", [{}, {"shuffle": True}, {"sampler": Draws()}, {"batch_sampler": BatchSampler(range(20), 2, False)}]
)
def test_a_loader_that_is_made_anew_from_its_attributes_is_not_divided_twice(given):
    loader = DataLoader(range(100), **given, num_replicas=2, rank=1, seed=4)
    expected = batches(loader)
    names = ("num_replicas", "rank", "seed", "num_workers")
    own = {name: getattr(loader, name) for name in names}
    if "batch_sampler" in given:
        anew = type(loader)(loader.dataset, batch_sampler=loader.batch_sampler, **own)
    else:
        anew = type(loader)(loader.dataset, sampler=loader.sampler, **own)
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


class Part(IterableDataset):
    num_processes, process_index = 2, 1

    def __iter__(self):
        return iter(range(4))


def distributed(num_replicas=2, rank=0):
    return DistributedSampler(range(20), num_replicas, rank)


@pytest.mark.parametrize(
    ("dataset", "given"),
    [
        (range(20), {"sampler": distributed()}),
        (range(20), {"batch_sampler": BatchSampler(distributed(), 2, False)}),
        (range(20), {"batch_sampler": AcceleratesShard(BatchSampler(range(20), 2, False))}),
        (range(20), {"sampler": Shard(range(20), 2, 0)}),
        (Part(), {}),
    ],
)
def test_what_is_divided_already_is_refused(dataset, given):
    with pytest.raises(ValueError, match=r"divided among the ranks twice, by .*leave num_replicas and rank out"):
        DataLoader(dataset, **given, num_replicas=2, rank=0)


def test_a_framework_that_divides_what_is_divided_is_refused():
    loader = DataLoader(range(20), 2, num_replicas=2, rank=0)
    again = AcceleratesShard(loader.batch_sampler)
    with pytest.raises(ValueError, match="twice, by AcceleratesShard"):
        TorchDataLoader(loader.dataset, batch_sampler=again, num_workers=loader.num_workers)
    with rayloader.patch(), pytest.raises(ValueError, match="twice, by AcceleratesShard"):
        TorchDataLoader(loader.dataset, batch_sampler=again, num_workers=loader.num_workers)
    with pytest.raises(ValueError, match="twice, by DistributedSampler"):
        DataLoader(range(20), sampler=distributed(), num_workers=loader.num_workers, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="twice, by DistributedSampler"):  # other numbers than it was made with
        DataLoader(range(20), sampler=loader.sampler, num_workers=loader.num_workers, num_replicas=2, rank=1)


# ---- what is refused


class Endless(Sampler):
    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        while True:
            yield 0

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length


def test_an_endless_sampler_is_an_error_and_no_hang():
    for sampler in (Endless(), iter([1, 2])):
        with pytest.raises(TypeError, match="must have a length"):
            DataLoader(range(5), sampler=sampler, num_replicas=2, rank=0)
    loader = DataLoader(range(5), sampler=Endless(3), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="gives more than the 3"):
        list(loader)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_replicas": 2}, ValueError, "num_replicas was given without rank"),
        ({"rank": 0}, ValueError, "rank was given without num_replicas"),
        ({"num_replicas": 0, "rank": 0}, ValueError, "num_replicas must be a whole number >= 1, got 0"),
        ({"num_replicas": 2.0, "rank": 0}, TypeError, "num_replicas must be a whole number >= 1, got 2.0"),
        ({"num_replicas": 2, "rank": -1}, ValueError, "rank must be a whole number >= 0, got -1"),
        ({"num_replicas": 2, "rank": 2}, ValueError, "num_replicas must be a whole number >= 3, got 2"),
        ({"num_replicas": 2, "rank": 1, "seed": -1}, ValueError, "seed must be a whole number >= 0, got -1"),
        ({"seed": 3}, ValueError, "no effect without num_replicas"),
        ({"num_replicas": 2, "rank": 0, "sampler": range(5), "shuffle": True}, ValueError, "mutually exclusive"),
        ({"num_replicas": 2, "rank": 0, "batch_sampler": [[1]], "shuffle": True}, ValueError, "mutually exclusive"),
    ],
)
def test_arguments_are_checked(given, error, text):
    with pytest.raises(error, match=text):
        DataLoader(range(5), **given)


@pytest.mark.parametrize("name", ["num_replicas", "rank", "seed"])
def test_another_rank_is_another_loader(name):
    loader = DataLoader(range(5), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
        setattr(loader, name, 1)


def test_the_other_number_is_torch_distributeds(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", world_size=1, rank=0)
    try:
        for given in ({"num_replicas": 1}, {"rank": 0}, {"num_replicas": 3}):
            loader = DataLoader(range(5), **given)
            assert (loader.num_replicas, loader.rank) == (given.get("num_replicas", 1), 0)
        assert DataLoader(range(5)).num_replicas is None
    finally:
        torch.distributed.destroy_process_group()


def test_without_ranks_nothing_is_divided():
    loader = DataLoader(range(5), 2)
    assert (loader.num_replicas, loader.rank, loader.seed) == (None, None, 0)
    assert type(loader.sampler) is SequentialSampler


class Subclass(DataLoader):
    """Has attributes of these names."""

    def __init__(self, dataset, rank, num_replicas):
        self.rank, self.seed = rank, 5
        super().__init__(dataset, sampler=DistributedSampler(dataset, num_replicas, rank))
        self.num_replicas, self.rank = num_replicas, rank


def test_a_subclass_may_have_attributes_of_these_names():
    loader = Subclass(range(6), 1, 2)
    assert (loader.rank, loader.seed, loader.num_replicas, len(list(loader))) == (1, 5, 2, 3)
    loader.load_state_dict(loader.state_dict())
    loader = Subclass(range(6), 1, 2)
    with rayloader.patch():
        anew = TorchDataLoader(loader.dataset, sampler=loader.sampler, num_workers=loader.num_workers)
    assert (anew.num_replicas, anew.rank, anew.seed) == (None, None, 0)


# ---- draw-ahead


def test_nothing_is_drawn_before_the_first_sample_is_asked_for():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    part = iter(Shard(RandomSampler(range(20), generator=generator), 2, 1))
    assert torch.equal(generator.get_state(), before)
    next(part)
    assert Counter(generator.get_state().tolist()) != Counter(before.tolist())
