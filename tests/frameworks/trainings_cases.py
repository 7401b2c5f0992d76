"""The same small training by each framework: the batches and losses that it gets of a class of loaders.

python trainings_cases.py OUT NAME...   write to OUT, as JSON, what it gets of torch's

A name is a framework of `FRAMEWORKS`, what it trains on, of `DATA`, and a setting of workers.
"""

import contextlib
import importlib
import json
import tempfile
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from pyarrow import parquet
from torch.utils.data import DataLoader

import rayloader
from framework_data import Model, Sums, seed, write_results
from rayloader.plans import Mixture, Packing, TokenBudget

SETTINGS = {
    "0": {"num_workers": 0},
    "1": {"num_workers": 1},
    "2": {"num_workers": 2},
    "2p": {"num_workers": 2, "persistent_workers": True},
}

# ---- what is trained on

LENGTHS = [1 + 7 * number % 19 for number in range(80)]


def rows():
    """Rows of `datasets`."""
    inputs = [[number / 80 + part for part in range(4)] for number in range(80)]
    return datasets.Dataset.from_dict({"inputs": inputs, "labels": [sum(row) for row in inputs]}).with_format("torch")


def files():
    """A folder with a Parquet file of twelve row groups."""
    folder = tempfile.mkdtemp()
    floats = pa.array(range(60), pa.int64()).cast(pa.float32())
    table = pa.table({"inputs": pa.FixedSizeListArray.from_arrays(pa.array(range(240)).cast("float32"), 4)})
    parquet.write_table(table.append_column("labels", floats), Path(folder, "x.parquet"), row_group_size=5)
    return folder


DATA = {
    "noise": lambda: {"dataset": Sums(), "batch_size": 8, "shuffle": True},
    "rows": lambda: {"dataset": rows(), "batch_size": 8, "shuffle": True},
    "rows as a stream": lambda: {"dataset": rows().to_iterable_dataset(4), "batch_size": 8},
    "Parquet": lambda: {"dataset": rayloader.ParquetStream(files(), shuffle=True), "batch_size": 8},
    "budget": lambda: {"dataset": Sums(), "batch_sampler": TokenBudget(LENGTHS, 60, seed=1)},
    "packing": lambda: {"dataset": Sums(), "batch_sampler": Packing(LENGTHS, 60, seed=1)},
    "mixture": lambda: {"dataset": Sums(), "sampler": Mixture([40, 40], [0.3, 0.7], seed=1), "batch_size": 8},
}

# ---- the frameworks


def by_hand(model, loader, evaluation, backward=torch.Tensor.backward):
    """Two epochs in plain torch, with an evaluation after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for one in (loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            backward(model(**batch)["loss"])
            optimizer.step()
        evaluate(model.eval(), evaluation)
        model.train()


@torch.no_grad()
def evaluate(model, loader):
    for batch in loader:
        model(**batch)


def accelerate(model, *loaders, **configuration):
    """The same by Accelerate, and the rest of a third epoch; what it gathers is noted too."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    try:
        inner, loader, evaluation = accelerator.prepare(model, *loaders)
        by_hand(inner, loader, evaluation, accelerator.backward)
        evaluate(inner, accelerator.skip_first_batches(loader, 2))
        model.seen += [accelerator.gather_for_metrics(batch["inputs"]).tolist() for batch in evaluation]
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def module_of(model):
    """What Lightning trains."""
    importlib.import_module("any_torchvision")
    lightning = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, *_):
            return self.model(**batch)["loss"]

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Module()


def lightning(model, *loaders, **options):
    """Two epochs by Lightning, with its sanity check, and evaluations within them."""
    module = module_of(model)
    quiet = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    options = {"max_epochs": 2, "accelerator": "cpu", "val_check_interval": 4, **options}
    trainer = importlib.import_module("lightning.pytorch").Trainer(**dict.fromkeys(quiet, False), **options)
    trainer.fit(module, *loaders)


def transformers(model, loader, evaluation):
    """An epoch by Transformers' Trainer: from its own loader, which it makes by torch's name, if it can."""
    importlib.import_module("any_torchvision")
    transformers = importlib.import_module("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            made = super().get_train_dataloader
            return (
                made() if isinstance(loader.dataset, Sums) and loader.batch_size else self.accelerator.prepare(loader)
            )

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_num_workers=loader.num_workers,
            dataloader_pin_memory=False,
        )
        Trainer(model, arguments, train_dataset=loader.dataset).train()


@contextlib.contextmanager
def as_trainer_of_two():
    """Ray Train's `prepare_data_loader` as the second of two trainers has it."""
    utilities = importlib.import_module("ray.train.torch.train_loop_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities.session, "get_world_size", lambda: 2)
        patch.setattr(utilities.session, "get_world_rank", lambda: 1)
        patch.setattr(utilities, "get_device", lambda: torch.device("cpu"))
        patch.setattr(torch.distributed, "is_available", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
        patch.setattr(torch.distributed, "get_rank", lambda *_: 1)
        yield utilities._TorchAccelerator(amp=False).prepare_data_loader


def ray_train(model, *loaders):
    """By Ray Train, which makes each loader anew, with a DistributedSampler."""
    with as_trainer_of_two() as prepare:
        by_hand(model, *map(prepare, loaders))


FRAMEWORKS = {
    "torch": by_hand,
    "Accelerate": accelerate,
    "Accelerate with torch's sampler": partial(accelerate, use_seedable_sampler=False),
    "Accelerate that splits": partial(accelerate, split_batches=True),
    "Accelerate that dispatches": partial(accelerate, dispatch_batches=True),
    "Lightning": lightning,
    "Transformers": transformers,
    "Ray Train": ray_train,
}


# What draws random numbers as it is imported.
PACKAGES = {name: ["any_torchvision", name.lower()] for name in ("Lightning", "Transformers")}


def trained(name, loader_class=DataLoader, dataset=None, **options):
    """What the model has seen, as JSON gives it back."""
    framework, data, setting = name.split(", ")
    for package in PACKAGES.get(framework.split()[0], ()):
        importlib.import_module(package)
    seed(1)
    given = {**DATA[data](), **SETTINGS[setting], **options, **({"dataset": dataset} if dataset else {})}
    evaluation = loader_class(Sums(), 16, **SETTINGS[setting], **options)
    model = Model()
    FRAMEWORKS[framework](model, loader_class(**given), evaluation)
    return json.loads(json.dumps(model.seen))


if __name__ == "__main__":
    write_results(trained)
