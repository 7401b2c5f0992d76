"""One training with a framework, in a process of its own: image-like samples, a small network, torch's loader or ours.

Started by `frameworks.py`, as `framework_cases.py FRAMEWORK torch|rayloader BATCHES WORKERS FILE`. What it has measured
goes to the file, as JSON. Each function below is the framework's own example: only the line that makes the loader, or
`rayloader.patch()`, differs. The process of torch's loader must not have Ray in it, but for Ray Train's. Where several
processes train, each has a loader of half the batch size, and what is measured is the first one's.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EPOCHS = 3
BATCH_SIZE = 32
SIDE = 64  # pixels
RATE = 0.05
RANKS = 2  # of torchrun and Ray Train

times: list[float] = []  # of each batch's arrival at the network
losses: list[Tensor] = []


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pictures in memory, flipped and brightened at random."""

    def __init__(self, length: int) -> None:
        self.pixels = torch.randint(256, (length, 3, SIDE, SIDE), dtype=torch.uint8)
        self.labels = torch.randint(10, (length,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return augmented(self.pixels[index], self.labels[index])


def augmented(pixels: Tensor, label: Tensor) -> dict[str, Tensor]:
    """A sample of the network's, from a picture."""
    image = pixels.float() / 255 + random.uniform(-0.1, 0.1)
    return {"pixels": image.flip(2) if torch.rand(()) < 0.5 else image, "labels": label}


class Network(nn.Module):
    """Tells its loss, and notes when batches arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
        )

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        times.append(time.monotonic())
        loss = nn.functional.cross_entropy(self.layers(pixels), labels)
        losses.append(loss.detach())
        return {"loss": loss}


Make = Callable[..., Any]  # a loader, of a dataset and torch's arguments


def plain(loader_class: Make, dataset: Images, workers: int) -> None:
    """A loop of one's own."""
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    begin()
    loader = loader_class(dataset, BATCH_SIZE, shuffle=True, num_workers=workers)
    for _ in range(EPOCHS):
        for batch in loader:
            train(network, optimizer, batch)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """One step."""
    optimizer.zero_grad()
    network(**batch)["loss"].backward()
    optimizer.step()


def torchdata(loader_class: Make, dataset: Images, workers: int) -> None:
    """A loop that takes a state every tenth batch. In order, for torchdata's class shuffles otherwise than torch's."""
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    begin()
    loader = loader_class(dataset, BATCH_SIZE, num_workers=workers, snapshot_every_n_steps=10)
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader, start=1):
            train(network, optimizer, batch)
            if number % 10 == 0:
                loader.state_dict()


def datasets(loader_class: Make, dataset: Images, workers: int) -> None:
    """A dataset of Hugging Face's, of Arrow, and a collator."""
    hugging_face = importlib.import_module("datasets")
    columns = {"pixels": dataset.pixels.flatten(1).numpy(), "labels": dataset.labels.numpy()}
    rows = hugging_face.Dataset.from_dict(columns).with_format("torch")
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    begin()
    loader = loader_class(rows, BATCH_SIZE, shuffle=True, num_workers=workers, collate_fn=collated)
    for _ in range(EPOCHS):
        for batch in loader:
            train(network, optimizer, batch)


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of the rows."""
    samples = [augmented(row["pixels"].view(3, SIDE, SIDE), row["labels"]) for row in rows]
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def lightning(loader_class: Make, dataset: Images, workers: int) -> None:
    """`Trainer.fit`."""
    pl = importlib.import_module("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.network(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), RATE)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", **dict.fromkeys(off, False))
    module = Module()
    begin()
    trainer.fit(module, loader_class(dataset, BATCH_SIZE, shuffle=True, num_workers=workers))


def accelerate(loader_class: Make, dataset: Images, workers: int) -> None:
    """`prepare`, which makes the loader anew."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    begin()
    loader = loader_class(dataset, BATCH_SIZE, shuffle=True, num_workers=workers)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(network(**batch)["loss"])
            optimizer.step()


def transformers(_: Make, dataset: Images, workers: int) -> None:
    """Its `Trainer`, which makes the loader by torch's name."""
    hugging_face = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        arguments = hugging_face.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH_SIZE,
            num_train_epochs=EPOCHS,
            learning_rate=RATE,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_num_workers=workers,
            dataloader_pin_memory=False,
        )
        trainer = hugging_face.Trainer(Network(), arguments, train_dataset=dataset)
        begin()
        trainer.train()


def torchrun(loader_class: Make, dataset: Images, workers: int) -> None:
    """A rank, with DistributedDataParallel."""
    torch.distributed.init_process_group("gloo")
    network = nn.parallel.DistributedDataParallel(Network())
    begin()
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True)
    loader = loader_class(dataset, BATCH_SIZE // RANKS, sampler=sampler, num_workers=max(1, workers // RANKS))
    train_epochs(network, loader)
    torch.distributed.destroy_process_group()


def train_epochs(network: nn.Module, loader: Any) -> None:
    """All of them, of a rank."""
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            train(network, optimizer, batch)


def ray_train(loader_class: Make, dataset: Images, workers: int) -> None:
    """`TorchTrainer`, whose `prepare_data_loader` makes the loader anew."""
    ray, train_module = importlib.import_module("ray"), importlib.import_module("ray.train")
    of_torch = importlib.import_module("ray.train.torch")
    is_ours, length = loader_class is not torch.utils.data.DataLoader, len(dataset)

    def train_rank(config: dict[str, Any]) -> None:
        import framework_cases as cases  # of the trainer's process

        if is_ours:
            import rayloader

            rayloader.patch()
        torch.manual_seed(1)
        images = cases.Images(length)
        network = of_torch.prepare_model(cases.Network())
        cases.begin()
        loader = loader_class(images, BATCH_SIZE // RANKS, shuffle=True, num_workers=max(1, workers // RANKS))
        cases.train_epochs(network, of_torch.prepare_data_loader(loader))
        if train_module.get_context().get_world_rank() == 0:
            config["file"].write_text(json.dumps([cases.began, cases.times, [loss.item() for loss in cases.losses]]))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank"
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}}, num_cpus=RANKS + workers, log_to_driver=False)
        of_torch.TorchTrainer(
            train_rank,
            train_loop_config={"file": file},
            scaling_config=train_module.ScalingConfig(num_workers=RANKS),
            run_config=train_module.RunConfig(storage_path=folder),
        ).fit()
        global began
        began, times[:], of_losses = json.loads(file.read_text())
        losses[:] = map(torch.tensor, of_losses)


FRAMEWORKS: dict[str, Callable[[Make, Images, int], None]] = {
    "plain loop": plain,
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
    "datasets": datasets,
    "torchdata": torchdata,
    "torchrun": torchrun,
    "ray train": ray_train,
}
PATCHED = {"accelerate", "transformers"}

began = 0.0


def begin() -> None:
    """The clock starts: all that is not loading or training is there."""
    global began
    began = time.monotonic()


def loader_class(framework: str, loader: str) -> Make:
    """What the framework's example makes its loader of."""
    if loader == "rayloader":
        import rayloader

        if framework in PATCHED:
            rayloader.patch()
        return rayloader.DataLoader
    if framework == "torchdata":
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader  # type: ignore[no-any-return]
    return torch.utils.data.DataLoader


def main(framework: str, loader: str, batches: int, workers: int, file: Path) -> None:
    """Trains, and writes the figures."""
    random.seed(1)
    torch.manual_seed(1)
    dataset = Images(batches * BATCH_SIZE)
    make = loader_class(framework, loader)
    FRAMEWORKS[framework](make, dataset, workers)
    ended = time.monotonic()
    if len(times) != EPOCHS * batches:
        sys.exit(f"{framework} gave {len(times)} batches instead of {EPOCHS * batches}")
    if framework != "ray train" and (loader == "torch") is ("ray" in sys.modules):
        sys.exit(f"Ray is {'' if loader == 'torch' else 'not '}in the process of {framework} with the loader {loader}")
    last = times[batches - 1 :: batches]  # of each epoch
    epochs = [after - before for before, after in itertools.pairwise(last)]
    figures = {"first batch": times[0] - began, "later epoch": sum(epochs) / len(epochs)}
    if os.environ.get("RANK", "0") == "0":
        file.write_text(json.dumps({"figures": figures, "loss": losses[-1].item(), "ended": ended}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
