"""Plans and streams in frameworks that make loaders anew, and deal batches out: all samples come as they should."""

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import rayloader
from rayloader.plans import Mixture, Packing, TokenBudget

SIZES = [1 + 7 * number % 19 for number in range(60)]
KINDS = {
    "budget": lambda _: TokenBudget(SIZES, 60, seed=1),
    "packing": lambda _: Packing(SIZES, 60, seed=1),
    "mixture": lambda _: Mixture([40, 20], [0.3, 0.7], seed=1, epoch_size=40),
    "stream": lambda folder: rayloader.ParquetStream(folder, shuffle=True),
}
kinds = pytest.mark.parametrize("kind", [*KINDS])
full = pytest.mark.full
quiet = pytest.mark.filterwarnings("default")  # what they warn of is their own matter


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return {"x": torch.tensor(float(index))}


class Noting(torch.nn.Module):
    """Notes the batches that it gets."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, x, **_):
        self.seen.append({"x": x})
        return {"loss": self.layer(x[:, None]).mean()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file of twelve row groups."""
    folder = tmp_path_factory.mktemp("files")
    table = pa.table({"x": pa.array(range(60), pa.int64()).cast(pa.float32())})
    parquet.write_table(table, folder / "x.parquet", row_group_size=5)
    return folder


def loader_of(loader_class, given, **options):
    if isinstance(given, rayloader.ParquetStream):
        return loader_class(given, 4, **options)
    chosen = {"sampler": given, "batch_size": 4} if isinstance(given, Mixture) else {"batch_sampler": given}
    return loader_class(Numbers(), **chosen, **options)


def ours(kind, folder):
    return loader_of(rayloader.DataLoader, KINDS[kind](folder), num_workers=1, workers="fork")


def numbers_in(batches):
    return [[int(number) for number in batch["x"]] for batch in batches]


def expected(kind, folder, epochs=(0, 1)):
    given, found = KINDS[kind](folder), []
    for epoch in epochs:
        given.set_epoch(epoch)
        found += numbers_in(loader_of(TorchDataLoader, given))
    return found


@full
@quiet
@kinds
def test_lightning_trains_and_sets_the_epoch_of_a_plan(kind, folder):
    importlib.import_module("any_torchvision")
    lightning = importlib.import_module("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Noting()

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quietly = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    for loader in ours(kind, folder), loader_of(TorchDataLoader, KINDS[kind](folder)):
        module = Module()
        lightning.Trainer(max_epochs=2, accelerator="cpu", **dict.fromkeys(quietly, False)).fit(module, loader)
        epochs = (0, 0) if kind == "stream" else (0, 1)
        assert numbers_in(module.model.seen) == expected(kind, folder, epochs)


@full
@quiet
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stream"])  # which has no length, as it asks for
def test_a_trainer_of_transformers_trains(kind, folder, tmp_path):
    importlib.import_module("any_torchvision")
    transformers = importlib.import_module("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(ours(kind, folder))

    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    model = Noting()
    with rayloader.patch():
        Trainer(model, arguments, train_dataset=Numbers()).train()
    assert numbers_in(model.seen) == expected(kind, folder)


@kinds
@pytest.mark.parametrize("loader_class", [rayloader.DataLoader, pytest.param(TorchDataLoader, marks=full)])
def test_accelerate_reads_it_and_sets_the_epoch(kind, loader_class, folder):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        with rayloader.patch():
            loader = Accelerator(cpu=True).prepare(loader_of(loader_class, KINDS[kind](folder)))
        assert type(loader.base_dataloader) is rayloader.DataLoader
        found = []
        for epoch in range(2):
            if kind != "stream":  # which it tells by itself
                loader.set_epoch(epoch)
            found += numbers_in(loader)
        assert found == expected(kind, folder)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


SCRIPT = """
import sys
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
sys.path.insert(0, sys.argv[1])
import test_plans as cases
import rayloader
from rayloader.plans import TokenBudget

with rayloader.patch():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    plan = TokenBudget(cases.SIZES, 60, seed=1, num_replicas=2)
    loader = accelerator.prepare(cases.loader_of(rayloader.DataLoader, plan))
    print("got", accelerator.process_index, cases.numbers_in(loader), flush=True)
"""


@full
def test_two_processes_of_accelerate_have_equal_steps(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(Path(__file__).parent)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = [eval(line.split(maxsplit=2)[2]) for line in done.stdout.splitlines() if line.startswith("got")]
    assert len(parts) == 2
    assert len(parts[0]) == len(parts[1])
    assert Counter(number for part in parts for batch in part for number in batch) == Counter(range(len(SIZES)))
