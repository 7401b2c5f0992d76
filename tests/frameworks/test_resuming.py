"""Training that a framework saves goes on after any batch with the batches that followed, inside that framework.

Each program of `PROGRAMS` gives the batches of two epochs, each with a state from after it, and can begin with such a
state. Several frameworks read one batch ahead, and the state counts what the program was given.
"""

import contextlib
import copy
import importlib
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from framework_data import Augmented, Numbers, seed
from simulated_device import SimulatedAccelerator
from trainings_cases import as_trainer_of_two

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what the frameworks warn of is their own matter
]


def made(dataset, **options):
    """A loader, from the same seed each time."""
    seed(1)
    return rayloader.DataLoader(dataset, 3, shuffle=isinstance(dataset, Augmented) or None, **options)


def accelerate(dataset, folder, state, configuration=None, **options):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration or {}))
    loader = accelerator.prepare(made(dataset, **options))
    first = 0
    if state is not None:
        loader.load_state_dict(state["loader"])
        first = loader.iteration = state["epoch"]  # it numbers epochs by itself, and seeds its sampler with the number
    for epoch in range(first, 2):
        for batch in loader:
            saved = copy.deepcopy(loader.state_dict())
            assert saved["_iterator_finished"] == loader.end_of_dataloader  # which it adds
            yield batch.tolist(), {"loader": saved, "epoch": epoch + loader.end_of_dataloader}


def accelerate_saves(dataset, folder, state, **options):
    """Its `save_state`, for which it makes torchdata's loader; within the first epoch.

    It saves the generators of this process too, a batch ahead: without workers random samples are others.
    """
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(made(dataset, **options))
    assert isinstance(loader, rayloader.DataLoader)
    assert isinstance(loader, StatefulDataLoader)
    if state is not None:
        accelerator.load_state(state)
    for number, batch in enumerate(loader):
        accelerator.save_state(str(folder / f"{number}-{state is None}"))
        yield batch.tolist(), str(folder / f"{number}-{state is None}")


def ray_train(dataset, folder, state, **options):
    with as_trainer_of_two() as prepare:
        ranks = {"num_replicas": 2, "rank": 1} if isinstance(dataset, Augmented) else {}
        loader = made(dataset, **options, **ranks)
        read = prepare(loader)
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(2):
            for batch in read:
                yield batch.tolist(), loader.state_dict()


def lightning(dataset, folder, state, saves="batch", steps_first=False, mode=None, epochs=2, limit=None, **options):
    """Lightning's.

    Args:
        saves: after each "batch", or after each "epoch" by its own callback.
        steps_first: the program reads the number of steps, at which Lightning drops the state (its issue 20550).
        mode: of two loaders that are read together.
        epochs: how many there are.
        limit: of batches in an epoch.
    """
    importlib.import_module("any_torchvision")
    pytorch = importlib.import_module("lightning.pytorch")
    seen = []

    class Module(pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            batches = batch if isinstance(batch, dict) else {"one": batch}
            seen.append({name: None if one is None else one.tolist() for name, one in batches.items()})
            return 0 * self.linear(torch.ones(1)).sum()

        def on_train_batch_end(self, *_):
            if state is None and saves == "batch":
                self.trainer.save_checkpoint(folder / f"step={self.global_step}.ckpt")

        def configure_optimizers(self):
            assert not steps_first or self.trainer.estimated_stepping_batches > 0 or isinstance(dataset, Numbers)
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = made(dataset, **options)
    if mode is not None:
        together = importlib.import_module("lightning.pytorch.utilities.combined_loader").CombinedLoader
        loader = together({"long": loader, "short": rayloader.DataLoader(type(dataset)(11), 4, **options)}, mode)
    kept = folder if state is None else folder / "resumed"
    keep = pytorch.callbacks.ModelCheckpoint(kept, filename="{step}", save_top_k=-1)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pytorch.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        limit_train_batches=limit,
        callbacks=[keep] * (saves == "epoch"),
        enable_checkpointing=saves == "epoch",
        **quiet,
    )
    trainer.fit(Module(), loader, ckpt_path=state)
    return [(batch, folder / f"step={step}.ckpt") for step, batch in enumerate(seen, 1)]


STEPS, BOTH, MAPS = (1, 7, 8, 11), (Augmented, Numbers), (Augmented,)
PROGRAMS = [  # after which steps they are continued, what they read, with how many workers, and their options
    (accelerate, STEPS, BOTH, (2, 0), {"configuration": {"dispatch_batches": False}}),
    (accelerate, STEPS, BOTH, (0, 2), {"configuration": {"dispatch_batches": True}}),
    (accelerate, STEPS, MAPS, (0, 2), {"configuration": {"use_seedable_sampler": False}}),
    (accelerate_saves, (1, 3), BOTH, (2,), {}),
    (ray_train, (1, 3, 4, 6), BOTH, (0, 2), {}),
    (lightning, STEPS, BOTH, (0, 2), {}),
    (lightning, (2, 3, 6, 7), MAPS, (0, 2), {"epochs": 3, "limit": 3}),
    (lightning, (2, 3), MAPS, (2,), {"limit": 3, "persistent_workers": True}),
    (lightning, (3, 8, 11), MAPS, (0, 2), {"steps_first": True}),
    (lightning, (8,), MAPS, (0, 2), {"saves": "epoch"}),
    (lightning, (1, 2, 3, 4), BOTH, (0, 2), {"mode": "min_size"}),
    (lightning, (1, 2, 7, 8, 9), BOTH, (0, 2), {"mode": "max_size"}),
    (lightning, (1, 2, 7, 8, 9), MAPS, (0, 2), {"mode": "max_size_cycle"}),
]
# `make test` has the first number of workers, and not Lightning, which is installed for `make test-full`.
CASES = [
    pytest.param(
        partial(program, num_workers=number, **options),
        steps,
        dataset,
        marks=[pytest.mark.full] * (program is lightning or number != workers[0]),
        id=f"{program.__name__}, {dataset.__name__}, {number}, {options}",
    )
    for program, steps, datasets, workers, options in PROGRAMS
    for dataset in datasets
    for number in workers
]


@pytest.fixture(autouse=True)
def accelerate_forgets():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize(("program", "steps", "dataset"), CASES)
def test_training_goes_on_with_the_batches_that_followed(program, steps, dataset, tmp_path):
    with rayloader.patch():
        told = list(program(dataset(), tmp_path, None))
        batches = [batch for batch, _ in told]
        for step in steps:
            rest = [batch for batch, _ in program(dataset(), tmp_path, told[step - 1][1])]
            assert rest[: len(batches) - step] == batches[step:], step  # some go on after the second epoch


@pytest.mark.full
def test_a_stream_of_which_lightning_has_drawn_a_batch_before_it_loads_the_state_is_refused(tmp_path):
    told = lightning(Numbers(), tmp_path, None, steps_first=True, num_workers=2)
    with pytest.raises(rayloader.StateError, match="estimated_stepping_batches"):
        lightning(Numbers(), tmp_path, told[2][1], steps_first=True, num_workers=2)


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("num_processes", [2, 1])
@pytest.mark.filterwarnings("ignore:a rayloader.DataLoader was rebuilt")
def test_a_rank_whose_part_would_be_dealt_out_to_all_is_an_error(is_patched, num_processes):
    accelerator = Accelerator(cpu=True)
    PartialState._shared_state["num_processes"] = num_processes  # the others are not asked before the first batch
    one_of_two = rayloader.DataLoader(Numbers(), 3, num_replicas=2, rank=0)
    refused = pytest.raises(ValueError, match=r"has those of rank 0; leave num_replicas and rank out")
    with rayloader.patch() if is_patched else contextlib.nullcontext():
        with refused if num_processes == 2 else contextlib.nullcontext():
            accelerator.prepare(one_of_two)
        accelerator.prepare(rayloader.DataLoader(Numbers(), 3))


def test_batches_that_are_on_the_device_already_are_not_copied_again(monkeypatch):
    accelerator = SimulatedAccelerator(at_each_query=1).install(monkeypatch)
    copies = []
    copy = accelerator.copy
    monkeypatch.setattr(accelerator, "copy", lambda *of: copies.append(copy(*of)) or copies[-1])
    with rayloader.patch():
        loader = Accelerator(cpu=True).prepare(made(Augmented(), num_workers=2, device="cuda"))
    assert loader.base_dataloader.device == "cuda"
    assert [batch.data_ptr() for batch in loader] == [one.data_ptr() for one in copies]
