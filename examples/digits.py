"""Train a small network on handwritten digits, by Ray actors and by forks, and check every batch against torch's.

The images are scikit-learn's: 1797 digits of 8x8 pixels. This script starts Ray in the background, and meanwhile
writes them as PNG files into a temporary folder, which it removes at the end (or into `--folder`). Two workers open,
decode and augment them, and the network is trained in this process. A fifth of the images is set aside to measure its
accuracy. The loop runs twice: its workers are two Ray actors, and then two forks of this process.

Every training batch is hashed as the network takes it. Another process, which never imports Ray, then reads the same
files through torch's own DataLoader with the same arguments. The hashes of all batches must agree.

Exit status: 0 if the accuracy reached `--target` and all batches are equal, 1 otherwise.

    python examples/digits.py
"""

import argparse
import collections
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from tqdm import tqdm


class DigitImages(Dataset):
    """PNG files named `<label>-<number>.png`, as pairs of an image (1, 8, 8) in 0..1 and its label.

    Args:
        folder: the folder of the files.
        augment: rotate, shift and add noise at random. Python's, NumPy's and torch's generators all take part,
            so two loaders give the same batches only if their workers seed all three alike.
    """

    def __init__(self, folder: Path, augment: bool) -> None:
        self.paths = sorted(folder.glob("*.png"))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        label = int(path.name.split("-")[0])
        with Image.open(path) as image:
            if self.augment:
                angle = random.uniform(-12, 12)
                shift = tuple(np.random.uniform(-0.7, 0.7, size=2))
                image = image.rotate(angle, Image.Resampling.BILINEAR, translate=shift)
            pixels = torch.from_numpy(np.array(image, dtype=np.float32)) / 255
        if self.augment:
            pixels += 0.03 * torch.randn(pixels.shape)
        return pixels.unsqueeze(0), label


def write_images(folder: Path) -> tuple[Path, Path]:
    """Write the digits as PNG files; return the folders of the training and of the test images."""
    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)  # scikit-learn counts grey levels from 0 to 16
    numbers = np.arange(len(images))
    train, test = train_test_split(numbers, test_size=0.2, stratify=digits.target, random_state=0)
    for split, members in ("train", train), ("test", test):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in members:
            Image.fromarray(images[number]).save(folder / split / f"{digits.target[number]}-{number:04}.png")
    return folder / "train", folder / "test"


def training_loader(loader_class: type[TorchDataLoader], folder: Path, seed: int, **more: str) -> TorchDataLoader:
    """Build the training loader, with the same call for rayloader and for torch; `more`: rayloader's own arguments."""
    return loader_class(
        DigitImages(folder, augment=True),
        batch_size=32,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        # The loader has its own generator, so that the network's use of torch's global one does not change the batches.
        generator=torch.Generator().manual_seed(seed),
        **more,
    )


def digest(batch: Iterable[Tensor]) -> str:
    """Hash the type, the shape and every byte of the tensors of a batch."""
    sha256 = hashlib.sha256()
    for tensor in batch:
        sha256.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        sha256.update(tensor.numpy().tobytes())
    return sha256.hexdigest()


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(network: nn.Module, loader: TorchDataLoader, epochs: int) -> tuple[list[str], float]:
    """Train the network; return the digests of all batches, in order, and the seconds until the first one came."""
    digests, first = [], 0.0
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * len(loader))
    network.train()
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        total_loss = 0.0
        title = f"epoch {epoch:2}/{epochs}"
        # The bar appears in terminals only (disable=None); the line after each epoch appears in logs too.
        for images, labels in tqdm(loader, title, leave=False, unit="batch", disable=None):
            first = first or time.perf_counter() - start
            digests.append(digest([images, labels]))
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total_loss += loss.item()
        seconds = time.perf_counter() - start
        print(f"{title}  loss {total_loss / len(loader):.3f}  {seconds:.1f} s", flush=True)
    return digests, first


@torch.no_grad()
def measure_accuracy(network: nn.Module, loader: TorchDataLoader) -> float:
    """Return the fraction of images that the network classifies correctly."""
    network.eval()
    hits = sum(int((network(images).argmax(dim=1) == labels).sum()) for images, labels in loader)
    return hits / len(loader.dataset)


def print_reference(folder: Path, seed: int, epochs: int) -> None:
    """Print the digests of the batches of torch's own loader, as JSON. Runs in a process of its own."""
    loader = training_loader(TorchDataLoader, folder, seed)
    digests = [digest(batch) for _ in range(epochs) for batch in loader]
    if "ray" in sys.modules:
        sys.exit("The reference must come from a process without Ray, but something has imported it.")
    print(json.dumps(digests))


def run_reference(folder: Path, seed: int, epochs: int) -> list[str]:
    """Run this script again as the reference; return the digests that it prints."""
    options = ["--reference", "--folder", folder, "--seed", seed, "--epochs", epochs]
    command = [sys.executable, __file__, *map(str, options)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def check_batches(ours: list[str], reference: list[str]) -> None:
    """Exit with a message unless both lists of digests are equal."""
    for number, (our_digest, reference_digest) in enumerate(zip(ours, reference, strict=False)):
        if our_digest != reference_digest:
            sys.exit(f"Batches differ: batch {number} of {len(ours)} is not the one that torch's DataLoader gave.")
    if len(ours) != len(reference):
        sys.exit(f"Batches differ: rayloader gave {len(ours)}, torch's DataLoader {len(reference)}.")


def train_and_measure(folders: tuple[Path, Path], options: argparse.Namespace, workers: str) -> tuple[list[str], str]:
    """Train with one kind of workers, and check the accuracy; return the digests of all batches, and who built them."""
    from rayloader import DataLoader  # not at the top: the reference process runs this script without rayloader

    loader = training_loader(DataLoader, folders[0], options.seed, workers=workers)
    test_loader = DataLoader(DigitImages(folders[1], augment=False), batch_size=128)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is tiny; more threads would only take cores from the workers
    network = make_network()
    start = time.perf_counter()
    digests, first = train(network, loader, options.epochs)
    seconds = time.perf_counter() - start
    accuracy = measure_accuracy(network, test_loader)
    workers_stats = loader.stats().epoch.workers
    kinds = collections.Counter(worker.process for worker in workers_stats)
    who = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items())
    if nodes := {worker.node for worker in workers_stats} - {""}:
        who += f" on {len(nodes)} node{'s' * (len(nodes) > 1)}"
    print(f"test accuracy {accuracy:.2%} after {seconds:.1f} s, batches built by {who}\n", flush=True)
    if accuracy < options.target:
        sys.exit(f"The test accuracy must be at least {options.target:.2%}.")
    return digests, f"{who} (first batch after {first:.1f} s)"


def train_and_check(folder: Path, options: argparse.Namespace) -> None:
    """Train with both kinds of workers, and compare the batches with those of the reference process."""
    import rayloader

    rayloader.init(num_workers=2)  # returns at once: Ray and two actors start while the images are written
    folders = write_images(folder)
    sizes = " and ".join(f"{len(list(one.iterdir()))} {one.name}" for one in folders)
    print(f"{sizes} images as PNG files in {folder}", flush=True)
    by_actors, actors = train_and_measure(folders, options, "auto")  # actors, because the program has asked for Ray
    by_forks, forks = train_and_measure(folders, options, "fork")
    reference_seed = options.seed if options.reference_seed is None else options.reference_seed
    reference = run_reference(folders[0], reference_seed, options.epochs)
    check_batches(by_actors, reference)
    check_batches(by_forks, reference)
    print(f"All {len(reference)} training batches are bit for bit those of torch's own DataLoader, both times,")
    print(f"built by {actors}, and by {forks}.")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0, help="seed of the network and of the batches")
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach, 0 to 1")
    parser.add_argument("--folder", type=Path, help="keep the images here (all nodes must see it)")
    parser.add_argument("--reference-seed", type=int, help="seed of the reference alone: the comparison fails")
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)  # see run_reference
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.reference:
        print_reference(options.folder, options.seed, options.epochs)
    elif options.folder:
        train_and_check(options.folder, options)
    else:
        with tempfile.TemporaryDirectory(prefix="rayloader-digits-") as folder:
            train_and_check(Path(folder), options)


if __name__ == "__main__":
    main()
