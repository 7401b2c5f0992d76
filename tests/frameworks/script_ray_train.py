"""Trainers of Ray Train that fail in mid-epoch, and go on from their checkpoint when Ray Train starts them again.

python script_ray_train.py FOLDER   for what is written meanwhile
"""

import json
import sys
import tempfile
from pathlib import Path

import ray.train.torch
import torch

import rayloader


def train(folder):
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


def expected(rank):
    """The batches of a trainer without interruption."""
    loader = rayloader.DataLoader(range(48), batch_size=4, shuffle=True, num_replicas=2, rank=rank)
    for epoch in range(2):
        loader.set_epoch(epoch)
        yield from (batch.tolist() for batch in loader)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.train.torch.TorchTrainer(
        lambda: train(folder),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
    for rank in (0, 1):
        assert json.loads((folder / f"{rank}.json").read_text()) == [True, list(expected(rank))]
    print("the end")
