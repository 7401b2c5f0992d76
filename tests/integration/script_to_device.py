"""A user's script on a simulated accelerator that ends in the midst of everything.

    python script_to_device.py

At its end batches are page-locked, copies from them and to the device are pending, and iterators live. It must end by
itself, with status 0 and its last line printed.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # the simulated accelerator
from probes import load
from simulated_device import DEVICE, SimulatedAccelerator


def large(index):
    return torch.full((50_000,), index)


if __name__ == "__main__":
    accelerator = SimulatedAccelerator().install(pytest.MonkeyPatch())
    pinned = iter(load(large, 100, num_workers=2, pin_memory=True, prefetch_factor=2))
    for _ in range(40):  # memory is page-locked when it is used again
        next(pinned)
    kept = [next(pinned) for _ in range(3)]
    copies = [accelerator.copy(next(pinned), DEVICE) for _ in range(3)]
    moved = iter(load(large, 100, num_workers=2, device="cuda"))
    batch = next(moved)
    accelerator.wait_for(queued=6)
    print("done", len(kept), len(copies), int(batch[0]), bool(accelerator.registered))
