"""One of two ranks that Lightning starts itself: its batches, beside torch's loader.

python script_lightning.py   starts the other rank
"""

import warnings

import any_torchvision  # isort: skip  # noqa: F401 (first)
import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

import rayloader
from framework_data import seed
from lightning_cases import QUIET, Noting

warnings.filterwarnings("ignore")


def batches(loader_class, **options):
    """Of two epochs; Lightning makes the loader anew, with a sampler of its own."""
    seed(1)
    module = Noting()
    loader = loader_class([torch.tensor(number) for number in range(46)], 4, shuffle=True, **options)
    lightning.Trainer(max_epochs=2, devices=2, strategy="ddp", **QUIET).fit(module, loader)
    return [batch["one"] for batch in module.seen]


if __name__ == "__main__":
    expected = batches(DataLoader)
    assert len(expected) == 12
    assert len({number for batch in expected[:6] for number in batch}) == 23  # the other rank has the rest
    assert batches(rayloader.DataLoader) == expected
    assert batches(rayloader.DataLoader, num_workers=1, persistent_workers=True) == expected
    print("the end\n", end="", flush=True)  # in one piece
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    rayloader.shutdown()
