"""Which part of an iterable dataset is whose, without Ray; tests/integration/test_ranks.py has workers."""

import itertools
import logging

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import rayloader
from rayloader import DataLoader, RayloaderError, ShardInfo, get_shard_info
from rayloader._compat import set_worker_info, torch_worker
from rayloader.host.shard_info import Reader


class Records(IterableDataset):
    """Reads its part."""

    def __iter__(self):
        shard = get_shard_info()
        yield from itertools.islice(range(40), shard.index, None, shard.count)


class Unaware(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.fixture
def in_worker():
    def become(reader, **info):
        worker_info = torch_worker.WorkerInfo(seed=0, dataset=None, **info)
        if reader is not None:
            reader.attach(worker_info)
        set_worker_info(worker_info)

    yield become
    set_worker_info(None)


def test_ranks_and_workers_have_a_part_each(in_worker):
    found, indices = [], []
    for rank, worker_id in itertools.product(range(3), range(2)):
        in_worker(Reader((rank, 3), worker_id, 2), id=worker_id, num_workers=2)
        shard = get_shard_info()
        assert shard == get_shard_info() == ShardInfo(2 * rank + worker_id, 6, rank, 3, worker_id, 2)
        indices.append(shard.index)
        found += list(Records())
    assert indices == list(range(6))
    assert sorted(found) == list(range(40))


def test_without_workers_each_rank_has_a_part():
    loaders = [DataLoader(Records(), 4, num_replicas=3, rank=rank) for rank in range(3)]
    iterators = [iter(loader) for loader in loaders]  # at the same time in one process
    found = [
        [batch.tolist() for batch in three]
        for three in itertools.zip_longest(*iterators, fillvalue=None)
        if all(batch is not None for batch in three)
    ]
    assert sorted(sample for three in found for batch in three for sample in batch) == sorted(
        sample for rank in range(3) for sample in range(rank, 40, 3)
    )
    assert get_shard_info() == ShardInfo(0, 1, 0, 1, 0, 1)


def test_a_state_without_workers_goes_on_in_the_same_part():
    loader = DataLoader(Records(), 4, num_replicas=3, rank=1)
    iterator = iter(loader)
    next(iterator)
    again = DataLoader(Records(), 4, num_replicas=3, rank=1)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in iterator]


def test_a_loader_within_a_dataset_reads_for_who_reads_that():
    class Outer(IterableDataset):
        def __iter__(self):
            return iter(DataLoader(Records(), None))

    assert list(DataLoader(Outer(), None, num_replicas=4, rank=3)) == list(range(3, 40, 4))


def test_without_ranks_there_is_one_part():
    assert list(DataLoader(Records(), None)) == list(Records()) == list(range(40))


def test_a_loader_that_does_not_know_its_rank_is_an_error(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for read in (lambda: list(DataLoader(Records(), None)), lambda: list(Records())):
        with pytest.raises(RayloaderError, match=r"several ranks.*pass num_replicas.*needs rayloader\.patch\(\)"):
            read()
    assert list(DataLoader(Records(), None, num_replicas=1, rank=0)) == list(range(40))
    assert list(DataLoader(Unaware(), None)) == list(range(4))


def test_a_worker_of_torchs_loader_is_an_error(in_worker):
    in_worker(None, id=0, num_workers=2)
    with pytest.raises(RayloaderError, match="worker of torch's own DataLoader"):
        list(Records())


def test_who_does_not_ask_for_its_part_is_told_in_the_log_once(caplog):
    with caplog.at_level(logging.WARNING, "rayloader"):
        for _ in range(2):
            assert list(DataLoader(Unaware(), None, num_replicas=2, rank=1)) == list(range(4))
        assert caplog.text.count("its iterable dataset Unaware did not ask") == 1
        caplog.clear()
        list(DataLoader(Unaware(), None, num_replicas=1, rank=0))
        list(DataLoader(Records(), None, num_replicas=2, rank=1))
        list(TorchDataLoader(Records(), None))
        assert not caplog.text


def test_a_datapipe_is_divided_by_its_sharding_filter(caplog):
    pipe = IterableWrapper(range(10)).sharding_filter()
    assert isinstance(pipe, IterDataPipe)
    with caplog.at_level(logging.WARNING, "rayloader"):
        assert list(DataLoader(pipe, None, num_replicas=2, rank=1)) == [1, 3, 5, 7, 9]
    assert not caplog.text


def test_it_is_public():
    assert {"get_shard_info", "ShardInfo"} <= set(rayloader.__all__)
