"""Torch's side of the multi-node tests, in a process without Ray: `python multinode_reference.py OUT`."""

import sys
import warnings
from pathlib import Path

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from multinode_data import CASES, epochs

if __name__ == "__main__":
    torch.multiprocessing.set_start_method("fork")
    warnings.filterwarnings("ignore", "This DataLoader will create")  # three workers on what may be two cores
    batches = {case: epochs(DataLoader(**options())) for case, options in CASES.items()}
    torch.save(batches, Path(sys.argv[1]))
    assert "ray" not in sys.modules, "the reference must not have Ray in it"
