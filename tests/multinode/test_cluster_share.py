"""`share` over two nodes: the producer here, its loader's worker there, and consumers on both."""

import itertools

import pytest
import ray
import torch

from multinode_data import AWAY
from rayloader import DataLoader, SharedLoader, share, shared

pytestmark = [pytest.mark.multinode, pytest.mark.full, pytest.mark.usefixtures("nodes")]

HERE = {"num_cpus": 0, "resources": {"here": 0.01}}


class Noisy:
    """Numbers with noise, of the worker's generator."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(self.width)


@ray.remote(max_retries=0)
def consume(loader: SharedLoader, rank: int) -> tuple[list[list[torch.Tensor]], str]:
    """All batches of two epochs, and the node."""
    consumer = loader.consumer(rank)
    epochs = [[batch.clone() for batch in consumer] for _ in range(2)]
    return epochs, ray.get_runtime_context().get_node_id()


@ray.remote(max_restarts=0)
class Trainer:
    """One that reads as many batches as it is told."""

    def __init__(self, name: str, rank: int) -> None:
        self.batches = iter(shared(name, rank))

    def read(self, count: int | None = None) -> list[torch.Tensor]:
        """So many batches; all that are left."""
        return [batch.clone() for batch in itertools.islice(self.batches, count)]


def loader_of(width: int) -> DataLoader[torch.Tensor]:
    torch.manual_seed(1)
    return DataLoader(Noisy(width), 2, shuffle=True, num_workers=1, ray_remote_args=AWAY)


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("width", [2, 100_000], ids=["small", "large"])
def test_consumers_of_both_nodes_get_what_the_loader_would_have_given(width, nodes):
    loader = loader_of(width)
    expected = [list(loader) for _ in range(2)]
    with share(loader_of(width), consumers=2) as both:
        calls = [consume.options(**where).remote(both, rank) for rank, where in enumerate((HERE, AWAY))]
        results = ray.get(calls)
    assert [node for _, node in results] == [nodes.here, nodes.away]
    for epochs, _ in results:
        assert [equal(found, batches) for found, batches in zip(epochs, expected, strict=True)] == [True, True]


def test_a_consumer_whose_process_was_killed_goes_on_where_it_was_on_another_node():
    expected = list(loader_of(100_000))
    with share(loader_of(100_000), consumers=2, name="moves") as both:
        first = Trainer.options(**AWAY).remote("moves", 0)
        begun = ray.get(first.read.remote(2))
        ray.kill(first)
        other = consume_once.options(**AWAY).remote(both, 1)
        second = Trainer.options(**HERE).remote("moves", 0)
        rest = ray.get(second.read.remote())
        assert equal(ray.get(other), expected)
    assert equal([*begun, *rest], expected)


@ray.remote(max_retries=0)
def consume_once(loader: SharedLoader, rank: int) -> list[torch.Tensor]:
    return [batch.clone() for batch in loader.consumer(rank)]
