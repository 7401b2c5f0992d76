"""Trainers of Ray Train: their batches are those of their ranks, whoever deals them out.

python script_ray_train.py FOLDER restarted   they fail in mid-epoch, and go on from their checkpoint
python script_ray_train.py FOLDER unprepared  without prepare_data_loader; the workers ask for CPUs, as by default
python script_ray_train.py FOLDER patched     torch's loaders under a patch, which prepare_data_loader makes anew

FOLDER is for what is written meanwhile.
"""

import json
import sys
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from torch.utils.data import DataLoader, DistributedSampler

import rayloader


def restarted(folder):
    """Of each trainer: nine batches, a checkpoint, a failure, and the rest of two epochs."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    loader = rayloader.DataLoader(
        range(48),
        batch_size=4,
        shuffle=True,
        num_workers=1,
        num_replicas=context.get_world_size(),
        rank=rank,
        ray_remote_args={"num_cpus": 0},
    )
    prepared = ray.train.torch.prepare_data_loader(loader)
    first, batches = 0, []
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            states = [torch.load(path) for path in sorted(Path(saved).iterdir())]
        loader.load_state_dict([state["loader"] for state in states])
        first, batches = states[rank]["epoch"], states[rank]["batches"]
    for epoch in range(first, 2):
        loader.set_epoch(epoch)
        for batch in prepared:
            batches.append(batch.tolist())
            if len(batches) == 9 and checkpoint is None:
                with tempfile.TemporaryDirectory() as saved:
                    state = {"epoch": epoch, "batches": batches, "loader": loader.state_dict()}
                    torch.save(state, Path(saved, f"{rank}.pt"))
                    ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(saved))
            if len(batches) == 11 and checkpoint is None:
                raise RuntimeError("lost")
    Path(folder, f"{rank}.json").write_text(json.dumps([checkpoint is not None, batches]))


def unprepared(folder):
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    loader = rayloader.DataLoader(range(48), 4, shuffle=True, num_workers=1, num_replicas=ranks, rank=rank)
    batches = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches += [batch.tolist() for batch in loader]
    Path(folder, f"{rank}.json").write_text(json.dumps([False, batches]))


def patched(folder):
    with rayloader.patch(ray_remote_args={"num_cpus": 0}):
        loader = ray.train.torch.prepare_data_loader(DataLoader(range(48), 4, shuffle=True, num_workers=1))
    batches = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches += [batch.tolist() for batch in loader]
    rank = ray.train.get_context().get_world_rank()
    is_ours = "rayloader.epoch.iterator" in sys.modules
    Path(folder, f"{rank}.json").write_text(json.dumps([is_ours, batches]))


def of_torch(rank):
    """The batches of a trainer with torch's loader and sampler."""
    sampler = DistributedSampler(range(48), 2, rank)
    loader = DataLoader(range(48), 4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from (batch.tolist() for batch in loader)


def of_ours(rank):
    """The batches of a trainer without interruption."""
    loader = rayloader.DataLoader(range(48), batch_size=4, shuffle=True, num_replicas=2, rank=rank)
    for epoch in range(2):
        loader.set_epoch(epoch)
        yield from (batch.tolist() for batch in loader)


CASES = {
    "restarted": (restarted, True, of_ours),
    "unprepared": (unprepared, False, of_ours),
    "patched": (patched, True, of_torch),
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train, flag, expected = CASES[sys.argv[2]]
    ray.train.torch.TorchTrainer(
        lambda: train(folder),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
    for rank in (0, 1):
        assert json.loads((folder / f"{rank}.json").read_text()) == [flag, list(expected(rank))]
    print("the end")
