"""Train a small character model on a stream of text: the sources of Python's own standard library.

An iterable dataset reads the files. Each of the two workers takes every second file, cuts it into windows
of characters and shuffles these in a buffer. A GRU in this process learns to predict the next character: its
loss, in bits per character, falls, and at the end it writes a few lines of its own.

A model that knows only the frequency of each character reaches the unigram entropy of the text, about 4.5 bits
per character. Exit status: 0 if the loss fell to `--target` times that entropy or lower, 1 otherwise.

    python examples/text_stream.py
"""

import argparse
import math
import random
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

from rayloader import DataLoader

CHARACTERS = 128  # ASCII; anything else in the sources is read as "?"


class SourceWindows(IterableDataset):
    """Windows of `length` characters of source code, as tensors of character codes (int64), in random order.

    Args:
        paths: paths of the files. Each worker reads its own share of them.
        length: characters in a window.
        buffer_size: number of windows from which each worker chooses the next one.
    """

    def __init__(self, paths: list[Path], length: int = 96, buffer_size: int = 10_000) -> None:
        self.paths = paths
        self.length = length
        self.buffer_size = buffer_size

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        share = self.paths[worker.id :: worker.num_workers] if worker else self.paths
        # The initial seed differs from worker to worker and from epoch to epoch.
        rng = random.Random(torch.initial_seed())
        windows = self._windows(rng.sample(share, len(share)))
        buffer = list(islice(windows, self.buffer_size))
        for window in windows:
            slot = rng.randrange(len(buffer))
            yield buffer[slot]
            buffer[slot] = window
        rng.shuffle(buffer)
        yield from buffer

    def _windows(self, paths: list[Path]) -> Iterator[Tensor]:
        """Cut the files into windows, one after the other, dropping the rest at the end of each."""
        for path in paths:
            text = path.read_text(encoding="utf-8", errors="replace").encode("ascii", errors="replace")
            for end in range(self.length, len(text) + 1, self.length):
                yield torch.tensor(list(text[end - self.length : end]))


class CharacterModel(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 64)
        self.gru = nn.GRU(64, width, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map characters (batch, time) to logits (batch, time, character), and to a state from which to continue."""
        hidden, state = self.gru(self.embedding(text), state)
        return self.head(hidden), state


def standard_library() -> list[Path]:
    """List the library's modules and the first level of its packages, without tables and tests."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"encodings", "pydoc_data", "test", "site-packages", "dist-packages"}
    paths = [*root.glob("*.py"), *root.glob("*/*.py")]
    return sorted(path for path in paths if path.parent.name not in left_out)


def train(model: CharacterModel, loader: DataLoader, steps: int) -> tuple[float, float]:
    """Train the model; return its final loss and the text's unigram entropy, both in bits per character."""
    report_every = max(1, steps // 10)
    losses = []
    counts = torch.zeros(CHARACTERS)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    # The bar appears in terminals only (disable=None); the printed lines appear in logs too.
    for batch in tqdm(islice(loader, steps), "training", steps, leave=False, unit="batch", disable=None):
        logits, _ = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        losses.append(loss.item() / math.log(2))
        counts += torch.bincount(batch.flatten(), minlength=CHARACTERS)
        if len(losses) == 1 or len(losses) % report_every == 0:
            recent = losses[-report_every:]
            tqdm.write(f"step {len(losses):4}/{steps}  {sum(recent) / len(recent):.2f} bits per character")
            sys.stdout.flush()
    recent = losses[-report_every:]
    unigram_entropy = torch.distributions.Categorical(counts).entropy().item() / math.log(2)
    return sum(recent) / len(recent), unigram_entropy


@torch.no_grad()
def write_sample(model: CharacterModel, prompt: str, length: int, temperature: float = 0.8) -> str:
    """Have the model continue the prompt, character by character."""
    text = list(prompt.encode("ascii"))
    logits, state = model(torch.tensor([text]))
    for _ in range(length):
        code = torch.multinomial((logits[0, -1] / temperature).softmax(dim=0), 1)
        text.append(int(code))
        logits, state = model(code.unsqueeze(0), state)
    return bytes(text).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="batches to train on, at most one epoch")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of the stream")
    parser.add_argument("--target", type=float, default=0.5, help="loss to reach, as a multiple of the unigram entropy")
    options = parser.parse_args()

    paths = standard_library()
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    print(f"{len(paths)} files of Python's standard library, {megabytes:.1f} MB", flush=True)
    loader = DataLoader(
        SourceWindows(paths),
        batch_size=32,
        num_workers=2,
        drop_last=True,
        generator=torch.Generator().manual_seed(options.seed),
    )
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the model is small; more threads would mostly wait for each other
    model = CharacterModel()
    loss, unigram_entropy = train(model, loader, options.steps)
    print(f"\nA sample:\n\n{write_sample(model, 'def ', length=400)}\n")
    print(f"loss {loss:.2f} bits per character, unigram entropy {unigram_entropy:.2f}")
    if loss > options.target * unigram_entropy:
        sys.exit(f"The loss must fall to {options.target} times the unigram entropy.")


if __name__ == "__main__":
    main()
