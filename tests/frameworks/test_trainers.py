"""Trainers that have loops of their own: Hugging Face Transformers, Ray Train, Ray Tune."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from torch.utils.data import DataLoader

import rayloader
from framework_data import HANG_LIMIT, Augmented, Model, Numbers, Sums, recorded, seed
from rayloader.frameworks import readers

full = pytest.mark.full
pytestmark = pytest.mark.usefixtures("ray_session")


# ---- Transformers: its Trainer makes loaders by torch's name, and Accelerate makes them anew


def transformers_losses(folder, workers=2):
    importlib.import_module("any_torchvision")
    transformers = importlib.import_module("transformers")
    seed(1)
    losses = []

    class Recorder(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=20,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        seed=1,
    )
    trainer = transformers.Trainer(Model(), arguments, train_dataset=Sums(), callbacks=[Recorder()])
    trainer.train()
    return losses


@full
@pytest.mark.filterwarnings("default")  # what Transformers warns of is its own matter
def test_transformers(tmp_path, monkeypatch):
    expected = transformers_losses(tmp_path)
    assert len(expected) == 20
    kinds = recorded(monkeypatch, rayloader.DataLoader)
    with rayloader.patch(on_error="skip"):
        found = transformers_losses(tmp_path)
    assert kinds == [rayloader.DataLoader]
    assert found == expected


# ---- Ray Train: with several trainers it makes a loader anew, with a DistributedSampler


@pytest.fixture
def trainer(monkeypatch):
    """The second of two."""
    utilities = importlib.import_module("ray.train.torch.train_loop_utils")
    monkeypatch.setattr(utilities.session, "get_world_size", lambda: 2)
    monkeypatch.setattr(utilities.session, "get_world_rank", lambda: 1)
    monkeypatch.setattr(utilities, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    return utilities._TorchAccelerator(amp=False)


@pytest.mark.filterwarnings("default")
def test_ray_train(trainer, monkeypatch):
    def batches(loader):
        seed(1)
        return [batch["inputs"].tolist() for batch in trainer.prepare_data_loader(loader)]

    expected = batches(DataLoader(Sums(), 8, shuffle=True, num_workers=2))
    assert len(expected) == 10
    readers._warn_of_rebuilt.cache_clear()
    with pytest.warns(UserWarning, match="was rebuilt as"):
        trainer.prepare_data_loader(rayloader.DataLoader(Sums(), num_workers=2))
    kinds = recorded(monkeypatch, rayloader.DataLoader)
    with rayloader.patch():
        assert batches(rayloader.DataLoader(Sums(), 8, shuffle=True, num_workers=2)) == expected
        assert batches(DataLoader(Sums(), 8, shuffle=True, num_workers=2)) == expected
    assert kinds == [rayloader.DataLoader] * 2


@pytest.mark.filterwarnings("default")
@pytest.mark.filterwarnings("ignore:this epoch has the same random order")  # set_epoch is not what is tested here
@pytest.mark.parametrize("num_workers", [2, 0])
def test_ray_train_goes_on_in_mid_epoch(trainer, num_workers):
    """What it prepares is a batch ahead."""

    def prepared(dataset):
        seed(1)
        stream = isinstance(dataset, Numbers)
        ranks = {} if stream else {"num_replicas": 2, "rank": 1}
        loader = rayloader.DataLoader(dataset, 3, None if stream else True, num_workers=num_workers, **ranks)
        return loader, trainer.prepare_data_loader(loader)

    for dataset in (Augmented(), Numbers()):
        loader, read = prepared(dataset)
        states, batches = [], []
        for batch in read:
            batches.append(batch.tolist())
            states.append(loader.state_dict())
        following = [batch.tolist() for batch in read]
        assert len(batches) == loader.stats().total.batches // 2 == (4 if isinstance(dataset, Augmented) else 8)
        for taken in (1, 3, len(batches)):
            loader, read = prepared(dataset)
            loader.load_state_dict(states[taken - 1])
            assert [batch.tolist() for batch in read] == (batches[taken:] or following)


@pytest.mark.filterwarnings("default")
def test_the_loader_that_ray_train_makes_anew_has_no_position(trainer):
    with rayloader.patch():
        loader = rayloader.DataLoader(Sums(), 8)
        next(iter(trainer.prepare_data_loader(loader)))
        with pytest.raises(rayloader.StateError, match="create the loader with num_replicas and rank"):
            loader.state_dict()


def run_script(name, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the end" in done.stdout.splitlines(), done.stdout + done.stderr  # Ray may print after it


@full
@pytest.mark.parametrize("case", ["restarted", "unprepared", "patched"])
def test_trainers_of_ray_train(case, tmp_path):
    """See the script."""
    run_script("script_ray_train.py", tmp_path, case, RAY_ADDRESS=ray.get_runtime_context().gcs_address)


# ---- Ray Tune


@full
def test_trials_of_ray_tune_use_loaders_with_default_arguments(tmp_path):
    """See the script."""
    run_script("script_tune.py", tmp_path, RAY_ADDRESS="local")
