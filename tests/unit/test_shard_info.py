"""Which part of an iterable dataset is whose, without Ray; tests/integration/test_ranks.py has workers."""

import itertools
import logging

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from rayloader import DataLoader, RayloaderError, ShardInfo, get_shard_info
from rayloader._compat import set_worker_info, torch_worker
from rayloader.host.shard_info import Reader
from states import Stream


class Records(IterableDataset):
    """Reads its part."""

    def __iter__(self):
        shard = get_shard_info()
        yield from itertools.islice(range(40), shard.index, None, shard.count)


class Unaware(Stream):
    """Of which nobody was told before."""


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
    for number, (rank, worker_id) in enumerate(itertools.product(range(3), range(2))):
        in_worker(Reader((rank, 3), worker_id, 2), id=worker_id, num_workers=2)
        assert get_shard_info() == get_shard_info() == ShardInfo(number, 6, rank, 3, worker_id, 2)
        assert list(Records()) == list(range(number, 40, 6))


def test_without_workers_each_rank_has_a_part_and_a_state_goes_on_in_it():
    def of_rank(rank):
        return DataLoader(Records(), None, num_replicas=3, rank=rank)

    loaders = [of_rank(rank) for rank in range(3)]
    for number, samples in enumerate(zip(*loaders, strict=False)):  # at the same time in one process
        assert [*samples] == [3 * number, 3 * number + 1, 3 * number + 2]
        if number == 4:
            states = [loader.state_dict() for loader in loaders]
    assert get_shard_info() == ShardInfo(0, 1, 0, 1, 0, 1)
    for rank, state in enumerate(states):
        again = of_rank(rank)
        again.load_state_dict(state)
        assert list(again) == list(range(rank, 40, 3))[5:]


def test_a_loader_within_a_dataset_reads_for_who_reads_that():
    class Outer(IterableDataset):
        def __iter__(self):
            return iter(DataLoader(Records(), None))

    assert list(DataLoader(Outer(), None, num_replicas=4, rank=3)) == list(range(3, 40, 4))
    assert list(DataLoader(Outer(), None)) == list(Records()) == list(range(40))  # there is one part


def test_a_loader_that_does_not_know_its_rank_is_an_error(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for reading in (DataLoader(Records(), None), Records()):
        with pytest.raises(RayloaderError, match=r"several ranks.*pass num_replicas.*needs rayloader\.patch\(\)"):
            list(reading)
    assert list(DataLoader(Records(), None, num_replicas=1, rank=0)) == list(range(40))
    assert list(DataLoader(Stream(), None)) == list(range(100))


def test_a_worker_of_torchs_loader_is_an_error(in_worker):
    in_worker(None, id=0, num_workers=2)
    with pytest.raises(RayloaderError, match="worker of torch's own DataLoader"):
        list(Records())


def test_who_does_not_ask_for_its_part_is_told_in_the_log_once(caplog):
    def read(dataset, num_replicas=2):
        return list(DataLoader(dataset, None, num_replicas=num_replicas, rank=num_replicas - 1))

    with caplog.at_level(logging.WARNING, "rayloader"):
        assert read(Unaware()) == read(Unaware()) == list(range(100))
        assert caplog.text.count("its iterable dataset Unaware did not ask") == 1
        caplog.clear()
        read(Unaware(), 1), read(Records()), list(TorchDataLoader(Records(), None))
        assert read(IterableWrapper(range(10)).sharding_filter()) == [1, 3, 5, 7, 9]  # which divides it
        assert not caplog.text
