"""Train a small network, get killed, and continue from the last checkpoint as if nothing had happened.

Every few batches the network, the optimizer and the loader's position in its epoch are written to one file, which
replaces the old one atomically. Started again in the same folder, with any number of workers, training continues from
there: even in the middle of an epoch, no batch is lost, repeated or augmented differently.

Each batch leaves a line in `batches.log`: its number, a hash of its bytes and the loss. This shows that the log of a
run that was killed and resumed equals that of a run that was not:

    python examples/resume.py /tmp/whole
    python examples/resume.py /tmp/halves --kill-at 100
    python examples/resume.py /tmp/halves --workers 3
    cmp /tmp/whole/batches.log /tmp/halves/batches.log

The images are scikit-learn's digits, shifted, dimmed and given noise at random in the workers.
"""

import argparse
import hashlib
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

from rayloader import DataLoader


class MovedDigits(Dataset):
    """Pairs of an image (1, 8, 8), shifted and dimmed at random, with noise, and its label."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16  # scikit-learn counts from 0 to 16
        self.labels = torch.from_numpy(digits.target)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shifts = random.choice((-1, 0, 1)), random.choice((-1, 0, 1))
        image = self.images[index].roll(shifts, dims=(1, 2)) * np.random.uniform(0.7, 1.0)
        return image + 0.05 * torch.randn(image.shape), self.labels[index]


class Training:
    """The contents of a checkpoint: network, optimizer, loader, and the number of epochs and batches done.

    Args:
        folder: the folder of the checkpoint and of the log; created if it does not exist.
        workers: number of workers of the loader. A checkpoint may have been written with another number.
        seed: seed of the network and of the batches.
    """

    def __init__(self, folder: Path, workers: int, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.log = folder / "checkpoint.pt", folder / "batches.log"
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        # The loader has its own generator, so that other draws from torch's global one do not change the batches. With
        # a seed for each batch, the number of workers does not change them either.
        generator = torch.Generator().manual_seed(seed)
        self.loader = DataLoader(
            MovedDigits(), 32, shuffle=True, num_workers=workers, generator=generator, seeding="batch"
        )
        self.epoch = self.step = 0
        if self.checkpoint.exists():
            self.restore()

    def save(self) -> None:
        """Write the checkpoint; whenever the process is killed, a complete one exists, old or new."""
        parts = {"network": self.network, "optimizer": self.optimizer, "loader": self.loader}
        state = {name: part.state_dict() for name, part in parts.items()}
        unfinished = self.checkpoint.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save({**state, "epoch": self.epoch, "step": self.step}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.checkpoint)

    def restore(self) -> None:
        """Go back to the checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        self.epoch, self.step = state["epoch"], state["step"]

    def train(self, images: Tensor, labels: Tensor) -> float:
        """Learn from one batch; return its loss."""
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, epochs: int, every: int, kill_at: int | None) -> None:
        """Train until `epochs` are done, with a checkpoint after every `every` batches and one at the end."""
        print(f"continuing after batch {self.step}, in epoch {self.epoch + 1}", flush=True)
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        self.log.write_text("".join(lines[: self.step]))  # batches after the checkpoint come again
        with self.log.open("a") as log:
            while self.epoch < epochs:
                for images, labels in self.loader:  # after a restart: the rest of the epoch
                    loss = self.train(images, labels)
                    self.step += 1
                    print(self.step, digest(images, labels), loss, file=log, flush=True)
                    if self.step == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if self.step % every == 0:
                        self.save()
                        print(f"epoch {self.epoch + 1}/{epochs}, batch {self.step}: loss {loss:.3f}", flush=True)
                self.epoch += 1
            self.save()


def digest(*tensors: Tensor) -> str:
    """Hash every byte of a batch."""
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(tensor.numpy().tobytes())
    return sha256.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the checkpoint and of batches.log")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="number of batches from one checkpoint to the next")
    parser.add_argument("--kill-at", type=int, metavar="N", help="end with SIGKILL after batch N")
    parser.add_argument("--seed", type=int, default=0, help="seed of the network and of the batches")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the network is tiny; more threads would only take cores from the workers
    Training(options.folder, options.workers, options.seed).run(options.epochs, options.every, options.kill_at)


if __name__ == "__main__":
    main()
