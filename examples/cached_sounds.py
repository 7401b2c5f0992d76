"""Train on spectrograms that are computed once: the first epoch fills a cache, the others read it.

The sounds are chords of two tones in noise, a second long; the label is the interval between the tones. Their
spectrograms are always the same, so `rayloader.cached` keeps them. What is random comes on top: a part of the time
is blanked out, another one each time. A small convolutional net in this process learns the interval.

Exit status: 0 if at least `--target` of the sounds of a test set are recognized after `--epochs`, and the cache has
built each spectrogram once; 1 otherwise.

    python examples/cached_sounds.py
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

import rayloader
from rayloader import DataLoader

RATE = 8000  # samples a second
INTERVALS = 8  # half-tones; the classes
Sample = tuple[Tensor, int]


class Spectrograms(Dataset[Sample]):
    """Spectrograms of shape (1, 129, 63), float32, with their labels.

    Args:
        count: of sounds.
        seed: of the first one; each has a generator of its own, so that it is the same each time.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(self.seed + index)
        label = index % INTERVALS
        lower = 200 + 400 * torch.rand((), generator=generator)
        time = torch.arange(RATE) / RATE
        tones = [torch.sin(2 * torch.pi * tone * time) for tone in (lower, lower * 2 ** ((label + 1) / 12))]
        sound = sum(tones, 0.5 * torch.randn(RATE, generator=generator))
        spectrum = torch.stft(sound, 256, 128, window=torch.hann_window(256), return_complex=True)
        return spectrum.abs().log1p()[None], label


class Blanked(Dataset[Sample]):
    """Spectrograms in which a part of the time is blanked out, at random."""

    def __init__(self, samples: rayloader.CachedDataset[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        spectrogram, label = self.samples[index]
        begin = int(torch.randint(spectrogram.shape[-1] - 8, ()))
        spectrogram[..., begin : begin + 8] = 0  # the cache keeps its own
        return spectrogram, label


def main() -> None:
    """Train, and say what the cache has done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--sounds", type=int, default=2048)
    parser.add_argument("--target", type=float, default=0.8, help="share of the test sounds to recognize")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    kept = rayloader.cached(Spectrograms(arguments.sounds, seed=0), max_bytes="1GB")
    loader = DataLoader(Blanked(kept), batch_size=32, shuffle=True, num_workers=2)
    model = nn.Sequential(
        nn.Conv2d(1, 16, (9, 5), stride=2), nn.ReLU(), nn.Conv2d(16, 32, (9, 5), stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d((None, 1)), nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, INTERVALS),
    )  # fmt: skip
    model(kept[0][0][None])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(arguments.epochs):
        total = 0.0
        for spectrograms, labels in tqdm(loader, f"epoch {epoch + 1}", disable=None):
            loss = nn.functional.cross_entropy(model(spectrograms), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.3f}; cache: {kept.stats()}")

    spectrograms, labels = next(iter(DataLoader(Spectrograms(256, seed=10**6), batch_size=256)))
    with torch.no_grad():
        accuracy = (model(spectrograms).argmax(1) == labels).float().mean().item()
    print(f"{accuracy:.0%} of the test sounds are recognized")
    if accuracy < arguments.target:
        sys.exit(f"fewer than {arguments.target:.0%}")
    if kept.stats().built != arguments.sounds:
        sys.exit(f"the cache has built {kept.stats().built} spectrograms instead of {arguments.sounds}")


if __name__ == "__main__":
    main()
