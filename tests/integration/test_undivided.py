"""Data that nobody divides is warned of once; data that is divided, by whatever means, never."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from probes import oversubscribed
from rayloader import DataLoader, ShuffleBuffer, get_shard_info
from rayloader.epoch import iterator, local, undivided
from rayloader.plans import PackedStream

pytestmark = [oversubscribed, pytest.mark.filterwarnings("error:workers .* began with the same (batches|samples)")]

TEXT = r"workers 0 and 1 began with the same (batches|samples), and the iterable dataset \w+ has not asked"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(undivided, "_warned", set())


class Whole(IterableDataset):
    """The same for everybody, but for its first item."""

    def __init__(self, first=lambda: 0, rest=range(12)):
        self.first, self.rest = first, rest

    def __iter__(self):
        return iter([self.first(), *self.rest])


class Texts(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(96).view(12, 8))


def load(stream, epochs=2, **options):
    loader = DataLoader(stream, 2, num_workers=2, **{"workers": "fork", **options})
    return [[*loader] for _ in range(epochs)]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"in_order": False}, {"workers": "ray"}])
def test_a_stream_that_nobody_divides(options, ray_session):
    with pytest.warns(UserWarning, match=TEXT) as caught:
        epochs = load(Whole(), **options)
    assert [len(epoch) for epoch in epochs] == [14, 14]
    assert len(caught) == 1
    assert Path(caught[0].filename) == Path(__file__)  # the line that iterates
    load(Whole())  # it is said once


@pytest.mark.parametrize("stream", [ShuffleBuffer(PackedStream(Texts(), 4), 5), PackedStream(Texts(), 16)])
def test_the_stream_in_a_wrapper(stream):
    """Workers draw different orders from it, and read the same."""
    with pytest.warns(UserWarning, match=r"the iterable dataset Texts") as caught:
        load(stream)
    assert len(caught) == 1


def by_worker():
    return get_worker_info().id * 0


def choose(worker_id):
    get_worker_info().dataset.part = worker_id


@pytest.mark.parametrize(
    ("stream", "worker_init_fn"),
    [
        (Whole(by_worker), None),  # its parts are copies of each other
        (ShuffleBuffer(Whole(by_worker), 3), None),
        (Whole(lambda: get_shard_info().index * 0), None),
        (Whole(), choose),
    ],
    ids=["by worker", "by worker in a wrapper", "by shard", "when its worker begins"],
)
def test_streams_that_are_divided_or_may_be(stream, worker_init_fn):
    load(stream, epochs=1, worker_init_fn=worker_init_fn)


def test_the_warning_as_an_error_loses_no_batch():
    batches = iter(DataLoader(Whole(), 2, num_workers=2, workers="fork"))
    found = [next(batches) for _ in range(4)]
    with pytest.raises(UserWarning, match=TEXT):
        next(batches)
    assert len(found) + len([*batches]) == 14


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_that_read_the_same(num_workers, monkeypatch):
    """Each a group of its own, as far as torch knows."""
    store = dist.HashStore()
    monkeypatch.setattr(undivided, "default_store", lambda: store)
    for module in (iterator, local):
        monkeypatch.setattr(module, "trains_in_a_group", lambda: True)

    def read(rank):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        options = {"shuffle": True, "generator": torch.Generator(), "num_workers": num_workers, "workers": "fork"}
        return [*DataLoader(range(24), 4, **options)]

    read(0)
    with pytest.warns(UserWarning, match=r"2 ranks of torch.distributed began with the same batches: BatchSampler of"):
        read(1)
