"""`share` over two nodes: the producer here, its loader's worker there, and consumers on both."""

import pytest
import ray
import torch

from multinode_data import AWAY, calls
from multinode_waiting import get
from rayloader import share, shared

pytestmark = [pytest.mark.multinode, pytest.mark.full, pytest.mark.usefixtures("nodes")]

HERE = {"num_cpus": 0, "resources": {"here": 0.01}}


@ray.remote
def read(name, rank):
    """Two epochs of a consumer, and the node."""
    consumer = shared(name, rank)
    return [torch.stack(list(consumer)) for _ in range(2)], ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize("width", [2, 100_000], ids=["small", "large"])
def test_consumers_of_both_nodes_get_what_the_loader_would_have_given(width, nodes):
    def load():
        torch.manual_seed(1)
        return calls(lambda index: index + torch.rand(width), 12, shuffle=True, ray_remote_args=AWAY)

    loader = load()
    expected = [torch.stack(list(loader)) for _ in range(2)]
    with share(load(), consumers=2, name="both"):
        found = get([read.options(**place).remote("both", rank) for rank, place in enumerate((AWAY, HERE))])
    assert [node_id for _, node_id in found] == [nodes.away, nodes.here]
    assert all(map(torch.equal, batches, expected) for batches, _ in found)
