"""Hugging Face's Accelerate, which calls `state_dict` of every loader that has it: at construction, and each batch.

python script_accelerate.py

It makes loaders of the class that `torch.utils.data` has when it is imported; a program that wants ours sets it.
"""

import random
import sys
import warnings

import numpy as np
import torch

import rayloader

torch.utils.data.DataLoader = rayloader.DataLoader
warnings.filterwarnings("ignore", "'set_vital' is deprecated")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


def seed(number):
    for module in (random, np.random):
        module.seed(number)
    torch.manual_seed(number)


def prepared(stateful, number):
    seed(number)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=False),
    )
    return accelerator.prepare(rayloader.DataLoader(Augmented(), 3, shuffle=True))


def epoch(loader):
    return [batch.tolist() for batch in loader]


loader = prepared(False, 1)
assert type(loader.base_dataloader) is rayloader.DataLoader
assert loader.state_dict()["num_workers"] == 0
states, batches = [], []
for batch in loader:
    batches.append(batch.tolist())
    states.append((loader.state_dict(), random.getstate()))
following = epoch(loader)
seed(1)
assert batches == epoch(rayloader.DataLoader(Augmented(), 3, shuffle=True))

# Accelerate fetches one batch ahead: of the next batch its samples are drawn before the state is saved or after.
for taken, (state, _) in enumerate(states, 1):
    loader = prepared(False, 2)
    loader.load_state_dict(state)
    found = epoch(loader)
    assert found == (batches[taken:] if taken < len(batches) else following), taken

# With torchdata's loader in place of ours the same samples come; the draws from the global generators are not its part.
loader = prepared(True, 1)
assert type(loader.base_dataloader) is not rayloader.DataLoader
iterator = iter(loader)
taken = [next(iterator).tolist() for _ in range(2)]
assert [sample[0] for batch in taken for sample in batch] == [sample[0] for batch in batches[:2] for sample in batch]

assert not any(name == "ray" or name.startswith("ray.") for name in sys.modules)
print("the end")
