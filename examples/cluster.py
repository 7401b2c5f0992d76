"""Train a small network on the head of a Ray cluster, with workers on its data nodes.

The images are noise around one of ten patterns, so that no files have to be on the nodes. A sample does not say which
node built it: if that node is lost, another one must be able to build the same. docs/howto/cluster.md starts a cluster
for this script, which has nodes with the resource `data_worker`:

    ray job submit --working-dir examples -- python cluster.py
"""

import argparse

import ray
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from rayloader import DataLoader


class Patterns(Dataset):
    """Noisy images (3, 32, 32) of ten patterns, as an image and its label."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % 10
        return self.patterns[label] + 10 * torch.randn(3, 32, 32), label


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16_000)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    loader = DataLoader(
        Patterns(options.samples),
        batch_size=64,
        shuffle=True,
        num_workers=options.workers,
        ray_remote_args={"resources": {"data_worker": 1}},  # only data nodes have it
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(network(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    nodes = {worker.node for worker in loader.stats().total.workers}
    here = ray.get_runtime_context().get_node_id()
    print(f"loss {loss.item():.2f} after {len(loader)} batches")
    print(f"nodes that built them: {len(nodes)}, this one {'among' if here in nodes else 'not among'} them")


if __name__ == "__main__":
    main()
