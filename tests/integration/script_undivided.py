"""One of two ranks, which read data that nobody divides, or somebody does.

python script_undivided.py RANK FILE   FILE: by which the ranks meet; prints what is warned of, case by case
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, Subset

from rayloader import DataLoader

RANK = int(sys.argv[1])


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, number):
        return torch.tensor(number)


class Zeros(Numbers):
    def __getitem__(self, number):
        return torch.zeros(2)


class Ordered(Numbers):
    """As another class: what was said of one kind is not said again."""


def mine(data):
    """Every second sample, of the same indices in both ranks."""
    return Subset(data, range(RANK, len(data), 2))


CASES = {
    "shuffle": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "shuffle again": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "in order, with workers": lambda: DataLoader(Ordered(), 4, num_workers=1, workers="fork"),
    "other seeds": lambda: DataLoader(Ordered(), 4, shuffle=True, generator=torch.Generator().manual_seed(RANK)),
    "sampler": lambda: DataLoader(Ordered(), 4, sampler=DistributedSampler(Ordered())),
    "num_replicas": lambda: DataLoader(Ordered(), 4, num_replicas=2),
    "meant": lambda: DataLoader(Ordered(), 4, num_replicas=1, rank=0),
    "parts": lambda: DataLoader(mine(Ordered()), 4),
    "constant": lambda: DataLoader(Zeros(), 4),
    "of one rank": lambda: DataLoader(Subset(Ordered(), range(12)), 4) if RANK == 0 else [],
}

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    for name, make in CASES.items():
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in make():
                pass
        for one in caught:
            if one.category is UserWarning:
                print(f"{name}: {one.message}")
        dist.barrier()  # what one rank has begun, the other has too
    dist.destroy_process_group()
