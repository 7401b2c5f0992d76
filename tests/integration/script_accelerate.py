"""Hugging Face's Accelerate, which calls `state_dict` of every loader that has it: at construction, and each batch.

python script_accelerate.py

Without workers, Ray is not imported.
"""

import random
import sys
import warnings

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

import rayloader

warnings.filterwarnings("ignore", "'set_vital' is deprecated")
rayloader.patch()


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


def seed(number):
    for module in (random, np.random):
        module.seed(number)
    torch.manual_seed(number)


def prepared(number):
    seed(number)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
    return accelerator.prepare(rayloader.DataLoader(Augmented(), 3, shuffle=True))


def epoch(loader):
    return [batch.tolist() for batch in loader]


loader = prepared(1)
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
    loader = prepared(2)
    loader.load_state_dict(state)
    found = epoch(loader)
    assert found == (batches[taken:] if taken < len(batches) else following), taken

assert not any(name == "ray" or name.startswith("ray.") for name in sys.modules)
print("the end")
