"""Ranks, parts of streams, `set_epoch` and `in_order=False`, with one worker on each of two nodes."""

import pytest
from torch.utils.data import IterableDataset

from multinode_data import ON_EACH, Calls, as_is, origin
from multinode_waiting import HANG_LIMIT, wait_until
from rayloader import DataLoader, get_shard_info

pytestmark = [pytest.mark.multinode, pytest.mark.full, pytest.mark.usefixtures("warm")]

ON_BOTH = {"num_workers": 2, "ray_remote_args": ON_EACH}


class Parts(IterableDataset):
    """The part of forty numbers that is due here, and where that is."""

    def __iter__(self):
        shard = get_shard_info()
        return ((number, shard.index, shard.count, origin()[0]) for number in range(shard.index, 40, shard.count))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_in_each_epoch_what_it_gets_without_workers(rank):
    def load(**where):
        return DataLoader(range(23), 4, shuffle=True, num_replicas=2, rank=rank, **where)

    far, local = load(**ON_BOTH), load()
    orders = []
    for epoch in (3, 1):
        for loader in (far, local):
            loader.set_epoch(epoch)
        orders.append([batch.tolist() for batch in far])
        assert orders[-1] == [batch.tolist() for batch in local]
    assert orders[0] != orders[1]


def test_each_worker_of_each_rank_has_a_part_of_a_stream(nodes):
    found = []
    for rank in (0, 1):
        found += DataLoader(Parts(), None, num_replicas=2, rank=rank, collate_fn=as_is, **ON_BOTH)
    assert sorted(number for number, *_ in found) == list(range(40))
    assert {(number % 4, 4) for number, *_ in found} == {(index, count) for _, index, count, _ in found}
    assert {node for *_, node in found} == {nodes.here, nodes.away}


def test_without_order_no_node_waits_for_the_other(tmp_path):
    """The first batch is built only once the trainer has that of the other node."""
    taken = tmp_path / "taken"

    def sample(index):
        if index == 0:
            wait_until(taken.exists, "the trainer has another batch")
        return index

    batches = iter(DataLoader(Calls(sample, 20), None, in_order=False, timeout=HANG_LIMIT, **ON_BOTH))
    found = [next(batches)]
    taken.touch()
    assert found[0] != 0
    assert sorted([*found, *batches]) == list(range(20))
