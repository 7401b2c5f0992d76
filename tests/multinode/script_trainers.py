"""Loaders with default arguments in Ray Train's trainers, or in Ray Tune's trials, that hold all CPUs of their node.

python script_trainers.py train|tune FOLDER   for what is written meanwhile; the other nodes have no CPU free
"""

import json
import sys
from pathlib import Path

import ray
import ray.train.torch
import ray.tune

import rayloader


class Origins:
    """Sample i, with what Ray gave the process that built it."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        context = ray.get_runtime_context()
        return index, context.get_assigned_resources().get("CPU", 0), context.get_placement_group_id() is not None


def load(folder, name, **ranks):
    """Two epochs; writes what came."""
    in_group = ray.get_runtime_context().get_placement_group_id() is not None
    loader = rayloader.DataLoader(Origins(), batch_size=4, num_workers=1, **ranks)
    batches = [batch for _ in range(2) for batch in loader]
    indices = [index for batch, _, _ in batches for index in batch.tolist()]
    cpus = [cpu for _, batch, _ in batches for cpu in batch.tolist()]
    captured = [is_captured for _, _, batch in batches for is_captured in batch.tolist()]
    Path(folder, f"{name}.json").write_text(json.dumps([in_group, indices, max(cpus), any(captured)]))


def train(folder):
    context = ray.train.get_context()
    load(folder, context.get_world_rank(), num_replicas=context.get_world_size(), rank=context.get_world_rank())


def run_trainers(folder):
    ray.train.torch.TorchTrainer(
        lambda: train(folder),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
    ).fit()


def run_trials(folder):
    ray.tune.Tuner(
        ray.tune.with_resources(lambda config: load(folder, config["name"]), {"CPU": 1}),
        param_space={"name": ray.tune.grid_search([0, 1])},
        run_config=ray.tune.RunConfig(storage_path=str(folder / "runs")),
    ).fit()


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    {"train": run_trainers, "tune": run_trials}[kind](folder)
    print("the end")
