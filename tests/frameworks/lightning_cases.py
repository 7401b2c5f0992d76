"""What Lightning makes of torch's loaders and of ours.

python lightning_cases.py OUT   write to OUT, as JSON, what it makes of torch's
"""

import json
import multiprocessing
import sys
import warnings
from pathlib import Path

import any_torchvision  # isort: skip  # noqa: F401 (first)
import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: F401  # for the tests
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from framework_data import Augmented, Model, Sums, seed

# Of its trainers: nothing is shown or saved by itself.
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# Of the loaders.
LOCAL = {"num_workers": 0}
FRESH = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}


class Regression(lightning.LightningModule):
    """Notes the losses, of training and of validation."""

    def __init__(self):
        super().__init__()
        self.model, self.losses = Model(), []

    def training_step(self, batch, _):
        loss = self.model(**batch)["loss"]
        self.losses.append(["training", loss.item()])
        return loss

    def validation_step(self, batch, _):
        loss = self.model(**batch)["loss"]
        self.losses.append(["validation", loss.item()])
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trained(loader_class, options):
    """The losses of an epoch, of a loader that the module makes."""

    class Module(Regression):
        def train_dataloader(self):
            return loader_class(Sums(), 8, shuffle=True, **options)

    seed(1)
    module = Module()
    lightning.Trainer(max_epochs=1, **QUIET).fit(module)
    return module.losses


def validated(loader_class, options):
    """The losses of two epochs with two validations in each, after the sanity check; and of a validation by itself."""
    seed(1)
    training = loader_class(Sums(), 8, shuffle=True, **options)
    validation = loader_class(Sums(), 16, **options)
    trainer = lightning.Trainer(max_epochs=2, val_check_interval=0.5, **QUIET)
    module = Regression()
    trainer.fit(module, training, validation)
    return module.losses, trainer.validate(module, validation, verbose=False)


class Noting(lightning.LightningModule):
    """Notes the batches, and saves a checkpoint after each one if it is told where."""

    def __init__(self, folder=None):
        super().__init__()
        self.model, self.folder, self.seen = Model(), folder, []

    def training_step(self, batch, _):
        self.note(batch)
        return 0 * self.model(torch.zeros(1, 4), torch.zeros(1))["loss"]

    def validation_step(self, batch, *_):
        self.note(batch)

    def note(self, batch):
        batches = batch if isinstance(batch, dict) else {"one": batch}
        self.seen.append({name: None if one is None else one.tolist() for name, one in batches.items()})

    def on_train_batch_end(self, *_):
        if self.folder is not None:
            self.trainer.save_checkpoint(self.folder / f"{self.global_step}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def two_loaders(loader_class, mode, options, dataset_class=Augmented):
    """Of 8 and 3 batches."""
    seed(1)
    shuffle = dataset_class is Augmented or None
    long = loader_class(dataset_class(23), 3, shuffle=shuffle, **options)
    return CombinedLoader({"long": long, "short": loader_class(dataset_class(11), 4, **options)}, mode)


def combined(loader_class, mode, options):
    """The batches of two epochs of training; in the mode that is for validation alone, of two validations."""
    module = Noting()
    loader = two_loaders(loader_class, mode, options)
    trainer = lightning.Trainer(max_epochs=2, **QUIET)
    if mode == "sequential":
        trainer.validate(module, loader, verbose=False)
        trainer.validate(module, loader, verbose=False)
    else:
        trainer.fit(module, loader)
    return module.seen


CASES = {
    "training": lambda loader_class, **own: trained(loader_class, {**FRESH, **own}),
    "training, no workers": lambda loader_class: trained(loader_class, LOCAL),
    "validation, no workers": lambda loader_class: validated(loader_class, LOCAL),
    "validation, fresh workers": lambda loader_class: validated(loader_class, FRESH),
    "validation, persistent workers": lambda loader_class: validated(loader_class, PERSISTENT),
    "max_size_cycle, no workers": lambda loader_class: combined(loader_class, "max_size_cycle", LOCAL),
    "min_size": lambda loader_class: combined(loader_class, "min_size", FRESH),
    "max_size": lambda loader_class: combined(loader_class, "max_size", PERSISTENT),
    "max_size_cycle": lambda loader_class: combined(loader_class, "max_size_cycle", FRESH),
    "max_size_cycle, persistent workers": lambda loader_class: combined(loader_class, "max_size_cycle", PERSISTENT),
    "sequential": lambda loader_class: combined(loader_class, "sequential", FRESH),
}


def run(loader_class, case, **own):
    """As JSON gives it back; some cases take more arguments of the loader."""
    return json.loads(json.dumps(CASES[case](loader_class, **own)))


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    warnings.simplefilter("ignore")
    found = {case: run(DataLoader, case) for case in CASES}
    assert "ray" not in sys.modules, "torch's side must not have Ray in it"
    Path(sys.argv[1]).write_text(json.dumps(found))
