"""Trainers of Ray Train: their batches are those of their ranks, whoever deals them out.

python script_ray_train.py FOLDER restarted   they fail in mid-epoch, and go on from their checkpoint
python script_ray_train.py FOLDER unprepared  without prepare_data_loader; the workers ask for CPUs, as by default
python script_ray_train.py FOLDER tuned       trials of Ray Tune, with default arguments, beside CPUs that are free

FOLDER is for what is written meanwhile.
"""

import json
import sys
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from ray import tune

import rayloader


def epochs(loader, tell, first=0):
    """The batches of the epochs from this one on, and the numbers of theirs."""
    for epoch in range(first, 2):
        tell(epoch)
        yield from ((epoch, batch.tolist()) for batch in loader)


def ours(rank, **options):
    return rayloader.DataLoader(range(48), 4, shuffle=True, num_replicas=2, rank=rank, **options)


def restarted(rank):
    """Nine batches, a checkpoint, a failure, and the rest."""
    loader = ours(rank, num_workers=1, ray_remote_args={"num_cpus": 0})
    prepared = ray.train.torch.prepare_data_loader(loader)
    first, batches = 0, []
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            states = [torch.load(path) for path in sorted(Path(saved).iterdir())]
        loader.load_state_dict([state["loader"] for state in states])
        first, batches = states[rank]["epoch"], states[rank]["batches"]
    for epoch, batch in epochs(prepared, loader.set_epoch, first):
        batches.append(batch)
        if len(batches) == 9 and checkpoint is None:
            with tempfile.TemporaryDirectory() as saved:
                state = {"epoch": epoch, "batches": batches, "loader": loader.state_dict()}
                torch.save(state, Path(saved, f"{rank}.pt"))
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(saved))
        if len(batches) == 11 and checkpoint is None:
            raise RuntimeError("lost")
    return [checkpoint is not None, batches]


def unprepared(rank):
    loader = ours(rank, num_workers=1)
    return [True, [batch for _, batch in epochs(loader, loader.set_epoch)]]


def train(name, folder):
    """What each trainer runs."""
    rank = ray.train.get_context().get_world_rank()
    Path(folder, f"{rank}.json").write_text(json.dumps(CASES[name](rank)))


def trial(config):
    loader = rayloader.DataLoader(range(100), config["batch_size"], shuffle=True, num_workers=1)
    assert sorted(sample for batch in loader for sample in batch.tolist()) == [*range(100)]
    tune.report({"batches": len(loader)})


CASES = {"restarted": restarted, "unprepared": unprepared}


def check_trainers(name, folder):
    ray.train.torch.TorchTrainer(
        lambda: train(name, folder),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    ).fit()
    for rank in (0, 1):
        loader = ours(rank)
        expected = [batch for _, batch in epochs(loader, loader.set_epoch)]
        assert json.loads((folder / f"{rank}.json").read_text()) == [True, expected]


def check_trials(folder):
    ray.init(num_cpus=4, include_dashboard=False)  # one for each trial, and one for each worker
    settings = {"run_config": tune.RunConfig(storage_path=str(folder))}
    results = tune.Tuner(trial, param_space={"batch_size": tune.grid_search([10, 20])}, **settings).fit()
    assert not results.errors, results.errors
    assert sorted(results.get_dataframe()["batches"]) == [5, 10]


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    check_trials(folder) if name == "tuned" else check_trainers(name, folder)
    print("the end")
