"""One rank of a training with DistributedDataParallel, with torch's loader or with ours.

    python -m torch.distributed.run --standalone --nproc-per-node=2 script_torchrun.py LOADER FOLDER

LOADER is torch or rayloader. The rank leaves its batches and parameters in FOLDER. Where torchrun may restart the
ranks, rank 0 is killed in the first round, after its first epoch.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed
from torch.utils.data import Dataset, DistributedSampler

LOADER, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
DIES = RANK == 0 and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > ROUND

if LOADER == "torch":
    from torch.utils.data import DataLoader
else:
    from rayloader import DataLoader


class Numbers(Dataset):
    """Whose workers add noise from their own random streams."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return torch.tensor([index, *torch.randn(3)]), torch.tensor([index % 7.0])


torch.distributed.init_process_group("gloo")
torch.manual_seed(3)
dataset = Numbers()
sampler = DistributedSampler(dataset, seed=5)
loader = DataLoader(dataset, 4, sampler=sampler, num_workers=1)
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
    if DIES:
        os.kill(os.getpid(), signal.SIGKILL)
result = {"batches": batches, "parameters": [parameter.detach() for parameter in model.parameters()]}
torch.save(result, FOLDER / f"{LOADER}-{ROUND}-{RANK}.pt")
torch.distributed.barrier()  # nobody has left before
torch.distributed.destroy_process_group()
