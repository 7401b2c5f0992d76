"""Trainers that have loops of their own: Hugging Face Transformers, Lightning, Ray Train."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from torch.utils.data import DataLoader, DistributedSampler

import rayloader
from framework_data import Augmented, Model, Numbers, Sums, seed

HANG_LIMIT = 300  # seconds for a script; on expiry it is killed and the test fails
# Of Lightning's trainers: nothing is shown or saved by itself.
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

full = pytest.mark.full
pytestmark = pytest.mark.usefixtures("ray_session")


def recorded(monkeypatch, loader_class):
    """The classes of the loaders whose iterators are made, as far as they derive from this one."""
    kinds = []
    get_iterator = loader_class._get_iterator

    def noted(loader):
        kinds.append(type(loader))
        return get_iterator(loader)

    monkeypatch.setattr(loader_class, "_get_iterator", noted)
    return kinds


# ---- Transformers: its Trainer makes loaders by torch's name, and Accelerate makes them anew


def transformers_losses(folder, workers=2):
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


# ---- Lightning: makes a loader anew of the loader's own class


def lightning_losses(loader_class, **arguments):
    lightning = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = Model(), []

        def training_step(self, batch, _):
            loss = self.model(**batch)["loss"]
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def train_dataloader(self):
            return loader_class(Sums(), 8, shuffle=True, num_workers=2, **arguments)

    seed(1)
    module = Module()
    trainer = lightning.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module)
    return module.losses


@full
@pytest.mark.filterwarnings("default")
def test_lightning(monkeypatch):
    expected = lightning_losses(DataLoader)
    assert len(expected) == 20
    kinds = recorded(monkeypatch, rayloader.DataLoader)
    assert lightning_losses(rayloader.DataLoader, on_error="skip") == expected
    with rayloader.patch(on_error="skip"):
        assert lightning_losses(DataLoader) == expected
    assert kinds == [rayloader.DataLoader] * 2


@full
@pytest.mark.filterwarnings("default")
def test_lightning_deals_the_samples_out_to_the_ranks():
    data = importlib.import_module("lightning.fabric.utilities.data")
    loader = rayloader.DataLoader(Sums(), 8, num_workers=2, on_error="skip", max_skipped=3)
    sampler = DistributedSampler(loader.dataset, 2, 1)
    anew = data._update_dataloader(loader, sampler)
    assert type(anew) is rayloader.DataLoader
    assert (anew.sampler, len(anew), anew.on_error, anew.max_skipped) == (sampler, 10, "skip", 3)
    with rayloader.patch(on_error="skip"):
        loader = DataLoader(Sums(), 8, num_workers=2)
    anew = data._update_dataloader(loader, sampler)  # afterwards
    assert type(anew) is rayloader.DataLoader
    assert (anew.sampler, anew.on_error) == (sampler, "skip")


@full
@pytest.mark.filterwarnings("default")
def test_lightning_goes_on_in_mid_epoch(tmp_path):
    """With a stream, whose length it does not know, it is a batch ahead."""
    lightning = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self, saves):
            super().__init__()
            self.model, self.saves, self.seen = Model(), saves, []

        def training_step(self, batch, _):
            self.seen.append(batch.tolist())
            return 0 * self.model(torch.zeros(1, 4), torch.zeros(1))["loss"]

        def on_train_batch_end(self, *_):
            if self.saves:
                self.trainer.save_checkpoint(tmp_path / f"{self.global_step}")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(path=None):
        module = Module(path is None)
        trainer = lightning.Trainer(max_epochs=2, **QUIET)
        trainer.fit(module, rayloader.DataLoader(Numbers(), 3, num_workers=2), ckpt_path=path)
        return module.seen

    batches = fit()
    assert len(batches) == 16
    for step in (1, 7, 8, 11):
        assert fit(tmp_path / f"{step}") == batches[step:], step


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
    monkeypatch.setattr("rayloader.frameworks._warned", False)
    with pytest.warns(UserWarning, match="was made anew"):
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
        with pytest.raises(rayloader.StateError, match="Under Ray Train make the loader with num_replicas"):
            loader.state_dict()


@full
def test_trainers_that_ray_train_starts_again_go_on_in_mid_epoch(tmp_path):
    """See the script."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "script_ray_train.py", tmp_path],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the end"]), done.stdout + done.stderr
