"""What is said of data that nobody divides, from the first batches alone; with workers see tests/integration."""

import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from rayloader import DataLoader
from rayloader._compat import torch_worker
from rayloader.epoch import undivided
from rayloader.host.shard_info import Reader
from rayloader.task import Task


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(undivided, "_warned", set())


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def tasks(digests, num_workers, **more):
    """The tasks with which workers have built batches of these digests, in turn."""
    return [
        Task(number, SimpleNamespace(checksum=7), number % num_workers, digest=digest, **more)
        for number, digest in enumerate(digests)
    ]


def said(watch, seen):
    """The texts of warnings, and how many tasks were looked at."""
    looked = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while watch is not None and looked < len(seen):
            watch = watch.saw(seen[looked])
            looked += 1
    return [str(one.message) for one in caught], looked


@pytest.mark.parametrize(
    ("digests", "num_workers", "more", "expected"),
    [
        ([1, 1, 2, 2], 2, {}, True),
        ([1, 5, 1, 2, 6, 2], 3, {}, True),
        ([1, 1, 2, 2], 2, {"asked": True}, False),
        ([1, 1, 1, 1], 2, {}, False),  # all the same
        ([1, 2, 3, 4], 2, {}, False),
        ([1, 1, 2, 3], 2, {}, False),
        ([1, 1], 2, {}, False),
        ([1, 2], 2, {"read": (8, 9)}, True),
        ([1, 2, 3, 4], 2, {"read": (8, 9)}, True),
        ([1, 2, 3, 4], 2, {"read": (8, 8)}, False),
        ([1, 1, 2, 2], 2, {"read": (8,)}, False),  # each has one sample
    ],
)
def test_a_stream_whose_workers_give_the_same(digests, num_workers, more, expected):
    watch = undivided.watch_of_workers(DataLoader(Stream(), num_workers=2), num_workers)
    texts, looked = said(watch, [None, *tasks(digests, num_workers, **more), *tasks([8, 9] * 9, num_workers)])
    assert len(texts) == expected
    assert looked <= 2 + 2 * num_workers  # then nothing is looked at any more
    if expected:
        read = "samples" if more else "batches"
        assert f"began with the same {read}, and the iterable dataset Stream has not asked which part" in texts[0]
        assert undivided.watch_of_workers(DataLoader(Stream(), num_workers=2), 2) is None  # it is said once


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 2, "num_replicas": 2, "rank": 0}])
def test_streams_that_are_not_looked_at(options):
    """One worker; or the worker tells of ranks and workers at once."""
    assert undivided.watch_of_workers(DataLoader(Stream(), **options), options["num_workers"]) is None


def test_who_asks_for_a_worker_is_noticed():
    reader = Reader((0, 1), 1, 2)
    info = reader.worker_info(5, "data")
    copy = pickle.loads(pickle.dumps(info))
    reader.was_asked_for = False
    assert type(copy) is torch_worker.WorkerInfo
    assert not reader.was_asked_for
    assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 2, 5, "data")
    assert reader.was_asked_for
    assert not reader.asked  # for its part of several ranks
    assert repr(info).replace("_WorkerInfo", "WorkerInfo") == repr(copy)


# ---- ranks


@pytest.fixture
def ranks(monkeypatch):
    """Lets this process be one rank after the other of a group."""
    store = dist.HashStore()
    monkeypatch.setattr(undivided, "default_store", lambda: store)

    def become(rank):
        undivided._warned.clear()
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    return become


def began(loader, digests=(1, 2)):
    watch = undivided.watch_of_ranks(loader)
    return [] if watch is None else said(watch, [None, *tasks(digests, 1)])[0]


DATA = [*range(40)]


def test_ranks_that_read_the_same(ranks):
    ranks(0)
    for _ in range(2):  # the same rank twice
        assert began(DataLoader(DATA, shuffle=True)) == []
    ranks(1)
    assert began(DataLoader(DATA[:-1], shuffle=True)) == []
    assert began(DataLoader(DATA, shuffle=True), (1, 3)) == []
    (text,) = began(DataLoader(DATA, shuffle=True))
    assert text.startswith(
        "2 ranks of torch.distributed began with the same batches: BatchSampler of RandomSampler gives"
    )
    assert began(DataLoader(DATA, shuffle=True)) == []  # said already
    ranks(2)
    assert began(DataLoader(DATA, shuffle=True))[0].startswith("3 ranks")


class Part(list):
    """As a framework's or a user's own."""

    num_replicas, rank = 2, 0


class Own(SequentialSampler):
    pass


@pytest.mark.parametrize(
    ("data", "options", "digests"),
    [
        (DATA, {"num_replicas": 2}, (1, 2)),
        (DATA, {"sampler": DistributedSampler(DATA, 2, 0)}, (1, 2)),
        (DATA, {"sampler": Own(DATA)}, (1, 2)),
        (DATA, {"batch_sampler": BatchSampler(Own(DATA), 2, False)}, (1, 2)),
        (Part(DATA), {}, (1, 2)),
        (DATA, {"sampler": DATA}, (1, 2)),
        (DATA, {}, (1, 1)),  # the data does not show it
        (DATA, {}, (3,)),
    ],
)
def test_ranks_that_divide_the_data_or_may_or_mean_it(ranks, data, options, digests):
    for rank in range(2):
        ranks(rank)
        told = {"rank": rank} if "num_replicas" in options else {}
        assert began(DataLoader(data, **options, **told), digests) == []


def test_a_store_that_fails_is_no_error(ranks, monkeypatch):
    ranks(0)
    monkeypatch.setattr(undivided, "default_store", lambda: None)
    assert began(DataLoader(DATA)) == []
