"""Train a small classifier on Parquet files whose rows hold PNG images, and continue it from a checkpoint.

The program writes the files itself: scikit-learn's 1797 handwritten digits, as PNG files in a column of binary data.
Two workers read them as a stream: each takes its part of the row groups, mixes the rows in a buffer and decodes the
images of each batch. In the middle of an epoch the program saves a state of the loader, throws the loader away, and
goes on with a new one that loads the state.

Exit status: 0 if `--target` of the digits are classified correctly at the end, 1 otherwise.

    python examples/parquet_stream.py
"""

import argparse
import io
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_digits
from torch import Tensor, nn

from rayloader import DataLoader, ParquetStream, ShuffleBuffer

FILES, GROUP_ROWS = 4, 64


def write_files(folder: Path) -> None:
    """Write the digits as PNG, with their labels, in a few files of several row groups."""
    digits = load_digits()
    images = []
    for pixels in digits.images:
        file = io.BytesIO()
        Image.fromarray((pixels * 15).astype(np.uint8)).save(file, "PNG")
        images.append(file.getvalue())
    table = pa.table({"image": images, "label": digits.target})
    rows = -(-len(table) // FILES)
    for number in range(FILES):
        path = folder / f"{number}.parquet"
        parquet.write_table(table.slice(number * rows, rows), path, row_group_size=GROUP_ROWS)


def decode(png: bytes) -> Tensor:
    """Turn a PNG file into 64 numbers between 0 and 1."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(png)), np.float32) / 255).flatten()


def collate(rows: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Make a batch of rows, in a worker."""
    images = [decode(row["image"]) for row in rows]
    return {"image": torch.stack(images), "label": torch.stack([row["label"] for row in rows])}


def make_loader(folder: Path) -> DataLoader:
    """Make a loader."""
    stream = ShuffleBuffer(ParquetStream(folder, shuffle=True), 500)
    return DataLoader(stream, batch_size=32, num_workers=2, collate_fn=collate)


def train(folder: Path, epochs: int) -> float:
    """Train for some epochs with a break in the middle of the second one; return the share of correct answers."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = make_loader(folder)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        iterator, seen, losses = iter(loader), 0, []
        while (batch := next(iterator, None)) is not None:
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(batch["label"])
            losses.append(loss.item())
            if epoch == 1 and len(losses) == 20:
                state = loader.state_dict()  # a program would save it, with the model and the optimizer
                loader = make_loader(folder)
                loader.load_state_dict(state)
                iterator = iter(loader)
                print(f"epoch {epoch}: continued after {seen} images", flush=True)
        print(f"epoch {epoch}: {seen} images, loss {sum(losses) / len(losses):.3f}", flush=True)
    (whole,) = DataLoader(ParquetStream(folder), batch_size=10_000, collate_fn=collate)
    correct = model(whole["image"]).argmax(1) == whole["label"]
    return correct.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="passes over the files, at least 2")
    parser.add_argument("--target", type=float, default=0.95, help="share of correct answers to reach")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is small; more threads would mostly wait for each other
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        accuracy = train(Path(folder), options.epochs)
    print(f"{accuracy:.1%} of the digits are classified correctly")
    if accuracy < options.target:
        sys.exit(f"{options.target:.1%} must be.")


if __name__ == "__main__":
    main()
