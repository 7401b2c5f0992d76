"""Plans in frameworks that make loaders anew, and deal batches out: each sample comes as often as the plan says."""

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import rayloader
from rayloader.plans import Mixture, Packing, TokenBudget

SIZES = [1 + 7 * number % 19 for number in range(60)]
PLANS = {
    "budget": lambda: TokenBudget(SIZES, 60, seed=1),
    "packing": lambda: Packing(SIZES, 60, seed=1),
    "mixture": lambda: Mixture([40, 20], [0.3, 0.7], seed=1, epoch_size=40),
}
plans = pytest.mark.parametrize("name", [*PLANS])
full = pytest.mark.full
quiet = pytest.mark.filterwarnings("default")  # what they warn of is their own matter


class Numbers(Dataset[torch.Tensor]):
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def loader_of(loader_class, plan, **options):
    given = {"sampler": plan, "batch_size": 4} if isinstance(plan, Mixture) else {"batch_sampler": plan}
    return loader_class(Numbers(), **given, **options)


def numbers_in(batches):
    return [[int(number) for number in batch.flatten()] for batch in batches]


def expected(name, epochs):
    plan, found = PLANS[name](), []
    for epoch in range(epochs):
        plan.set_epoch(epoch)
        found += numbers_in(loader_of(TorchDataLoader, plan))
    return found


@full
@quiet
@plans
@pytest.mark.parametrize("loader_class", [rayloader.DataLoader, TorchDataLoader])
def test_lightning_trains_by_a_plan_and_sets_its_epoch(name, loader_class):
    importlib.import_module("any_torchvision")
    lightning = importlib.import_module("lightning.pytorch")

    class Noting(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _):
            self.seen.append(batch)
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = {"workers": "fork"} if loader_class is rayloader.DataLoader else {}
    loader = loader_of(loader_class, PLANS[name](), num_workers=1, **options)
    settings = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    module = Noting()
    lightning.Trainer(max_epochs=2, accelerator="cpu", **settings).fit(module, loader)
    assert numbers_in(module.seen) == expected(name, 2)


@full
@quiet
@plans
def test_a_trainer_of_transformers_trains_by_a_plan(name, tmp_path):
    importlib.import_module("any_torchvision")
    transformers = importlib.import_module("transformers")
    seen = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x, **_):
            seen.append(x)
            return {"loss": self.layer(x).mean()}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            options = {"num_workers": 1, "workers": "fork", "collate_fn": lambda samples: {"x": torch.stack(samples)}}
            return self.accelerator.prepare(loader_of(rayloader.DataLoader, PLANS[name](), **options))

    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    with rayloader.patch():
        Trainer(Model(), arguments, train_dataset=Numbers()).train()
    assert numbers_in(seen) == expected(name, 2)


@plans
@pytest.mark.parametrize("loader_class", [rayloader.DataLoader, pytest.param(TorchDataLoader, marks=full)])
def test_accelerate_reads_a_plan(name, loader_class):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    try:
        with rayloader.patch():
            loader = Accelerator(cpu=True).prepare(loader_of(loader_class, PLANS[name]()))
        found = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            found += numbers_in(loader)
        assert found == expected(name, 2)
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
    counts = Counter(number for part in parts for batch in part for number in batch)
    assert counts == Counter(range(len(SIZES)))
