"""`share` over two nodes: the producer here, its loader's worker there, and consumers on both."""

import itertools

import pytest
import ray
import torch

from multinode_data import AWAY, calls
from multinode_waiting import get
from rayloader import share, shared

pytestmark = [pytest.mark.multinode, pytest.mark.full, pytest.mark.usefixtures("nodes")]

HERE = {"num_cpus": 0, "resources": {"here": 0.01}}


@ray.remote(max_restarts=0)
class Trainer:
    """Reads as many batches as it is told, in its turn."""

    def __init__(self, name, rank):
        self.consumer = shared(name, rank)

    def read(self, count=None, *, begin=False):
        """So many batches; all that are left. And the node."""
        if begin:
            self.batches = iter(self.consumer)
        found = [batch.clone() for batch in itertools.islice(self.batches, count)]
        return torch.stack(found), ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize("width", [2, 100_000], ids=["small", "large"])
def test_consumers_of_both_nodes_get_what_the_loader_would_have_given(width, nodes):
    """In two epochs; the second one is gone on with, on the other node, when a consumer was killed."""

    def load():
        torch.manual_seed(1)
        return calls(lambda index: index + torch.rand(width), 12, shuffle=True, ray_remote_args=AWAY)

    loader = load()
    expected = [torch.stack(list(loader)) for _ in range(2)]
    with share(load(), consumers=2, name="moves"):
        moves, stays = (Trainer.options(**place).remote("moves", rank) for rank, place in enumerate((AWAY, HERE)))
        for (found, node_id), place in zip(
            get([one.read.remote(begin=True) for one in (moves, stays)]), (nodes.away, nodes.here), strict=True
        ):
            assert (torch.equal(found, expected[0]), node_id) == (True, place)
        begun, _ = get(moves.read.remote(2, begin=True))
        ray.kill(moves)
        other = stays.read.remote(begin=True)
        rest, node_id = get(Trainer.options(**HERE).remote("moves", 0).read.remote(begin=True))
        assert (len(rest) >= 10, node_id) == (True, nodes.here)  # what it took in its last 20 ms may come again
        assert torch.equal(begun, expected[1][:2])
        assert torch.equal(rest, expected[1][-len(rest) :])
        assert torch.equal(get(other)[0], expected[1])
        ray.kill(stays)
