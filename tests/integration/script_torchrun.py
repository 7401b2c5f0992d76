"""One rank of a training with DistributedDataParallel, with our loader, and again with torch's: both train alike.

    python -m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1 script_torchrun.py FOLDER

Rank 0 is killed in the first round, after its first epoch. A rank that has compared leaves a file in FOLDER.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed
import torch.utils.data
from torch.utils.data import Dataset, DistributedSampler

import rayloader

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Numbers(Dataset):
    """Whose workers add noise from their own random streams."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.tensor([index, *torch.randn(3)]), torch.tensor([index % 7.0])


def trained(loader_class):
    """All batches, and the model's parameters."""
    torch.manual_seed(3)
    sampler = DistributedSampler(Numbers(), seed=5)
    loader = loader_class(Numbers(), 4, sampler=sampler, num_workers=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batches = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            batches.append(inputs.clone())
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if RANK == ROUND == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return [*batches, *(parameter.detach() for parameter in model.parameters())]


torch.distributed.init_process_group("gloo")
ours, theirs = trained(rayloader.DataLoader), trained(torch.utils.data.DataLoader)
assert len(ours) == len(theirs) == 14 + 2
assert all(map(torch.equal, ours, theirs))
Path(sys.argv[1], f"{RANK}-{ROUND}").touch()
torch.distributed.barrier()  # nobody has left before
torch.distributed.destroy_process_group()
