"""What torchdata's loader and ours are given, and what they make of it.

python torchdata_cases.py OUT NAME...   write to OUT, as JSON, what torchdata's loader makes of these
"""

import itertools
import json
import logging

import torch
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from framework_data import Numbers, write_results


class Squares(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(index**2)


class Count:
    """An iterator that tells its state."""

    position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == 10:
            raise StopIteration
        self.position += 1
        return self.position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Counted(IterableDataset):
    """Has such an iterator in each epoch."""

    def __iter__(self):
        return Count()


CASES = {
    "map": lambda: {"dataset": Squares(), "sampler": SequentialSampler(range(20)), "batch_size": 3},
    "its own sampler": lambda: {"dataset": Squares(), "sampler": StatefulDistributedSampler(Squares(), 2, 1)},
    "batch sampler": lambda: {"dataset": Squares(), "batch_sampler": [[1, 2, 3], [5], [8, 13], [4, 6, 7, 9], [0]]},
    "stream": lambda: {"dataset": Numbers(20), "batch_size": 3},
    "stream whose iterator has a state": lambda: {"dataset": Counted(), "batch_size": None},
}
NAMES = [f"{case}, {number}" for case, number in itertools.product(CASES, "02")]


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def run(name, loader_class=StatefulDataLoader, steps=1):
    """The batches of two epochs, and of the two that follow states of the first, by how many steps had been made."""
    case, number = name.split(", ")

    def make():
        return loader_class(**CASES[case](), num_workers=int(number), snapshot_every_n_steps=steps)

    saved = [make().state_dict()]
    loader, batches = make(), []
    for batch in loader:
        batches.append(plain(batch))
        saved.append(loader.state_dict())
    saved.append(loader.state_dict())  # between two epochs
    found = {"first": batches, "second": [*map(plain, loader)]}
    for taken in (0, 1, len(batches) - 1, len(batches), len(batches) + 1):
        loader = make()
        loader.load_state_dict(saved[taken])
        found[f"after {taken}"] = [[*map(plain, loader)] for _ in range(2)]
    return json.loads(json.dumps(found))  # as it comes from a file


if __name__ == "__main__":
    logging.disable()  # it tells of each stream that it reads again
    write_results(run)
