"""Read Python's own standard library with two workers and print its most frequent letters."""

import sysconfig
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from rayloader import DataLoader


class ByteCounts(Dataset):
    """For each module, the number of times that each of the 256 byte values occurs in its source."""

    def __init__(self):
        self.paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return np.bincount(np.fromfile(self.paths[index], dtype=np.uint8), minlength=256)


if __name__ == "__main__":
    loader = DataLoader(ByteCounts(), batch_size=16, num_workers=2)
    counts = sum(batch.sum(dim=0) for batch in loader)  # each batch is a tensor of shape (16, 256)
    letters = sorted("abcdefghijklmnopqrstuvwxyz", key=lambda letter: -counts[ord(letter)])
    print(f"{counts.sum():,} bytes in {len(loader.dataset)} files; most frequent:", *letters[:8])
