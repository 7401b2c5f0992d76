"""What must work with every combination of versions: the batches of torch's loader, whatever happens to the workers.

`test_versions.py` runs this in an environment of its own, where rayloader comes from its wheel.
"""

import importlib.metadata
import os
import signal
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rayloader


class Noisy(Dataset):
    """Random augmentation; memory of all kinds that is shared between workers; the death of a process, once."""

    def __init__(self, deadly=None):
        self.images = np.arange(48 * 3000, dtype=np.float32).reshape(48, 3000)  # batches too large to travel inline
        self.table = pa.table({"label": list(range(48))})
        self.names = rayloader.SharedList([f"{i}.png" for i in range(48)])
        self.deadly = deadly  # a file; whoever finds it at sample 20 removes it, and dies

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if self.deadly is not None and index == 20 and self.deadly.exists():
            self.deadly.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        noise = torch.rand(3000) + float(np.random.rand())
        return torch.from_numpy(self.images[index]) + noise, {
            "label": self.table["label"][index].as_py(),
            "name": int(self.names[index].removesuffix(".png")),
        }


class Stream(IterableDataset):
    """A part of the numbers for each worker, each with noise."""

    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id, 31, info.num_workers):
            yield number, torch.rand(5)


assert_close = partial(torch.testing.assert_close, rtol=0, atol=0)  # to the last bit


def torchs(dataset):
    """The batches of two epochs of torch's forked workers."""
    loader = TorchDataLoader(dataset, 4, isinstance(dataset, Noisy), num_workers=2, multiprocessing_context="fork")
    torch.manual_seed(7)
    return [list(loader) for _ in range(2)]


def check(expected, **options):
    """Whether a loader with these options gives what torch's gives."""

    def load(dataset, workers=2):
        torch.manual_seed(7)
        return rayloader.DataLoader(dataset, 4, isinstance(dataset, Noisy), num_workers=workers, **options)

    with tempfile.TemporaryDirectory() as folder:
        deadly = Path(folder, "deadly")
        deadly.touch()
        for dataset, batches in (Noisy(), expected[0]), (Stream(), expected[1]), (Noisy(deadly), expected[0]):
            loader = load(dataset)
            assert_close([list(loader) for _ in range(2)], batches)
        assert not deadly.exists()  # a worker did die
    for dataset, batches in zip((Noisy(), Stream()), expected, strict=True):
        loader = load(dataset)
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(3)]
        resumed = load(dataset, workers=1)
        resumed.load_state_dict(loader.state_dict())
        assert_close(taken + list(resumed), batches[0])


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)  # by ray.init() of Ray 2.52
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", category=ResourceWarning)  # of older versions of Ray
    print(
        *(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "ray", "numpy", "pyarrow", "cloudpickle"))
    )
    expected = torchs(Noisy()), torchs(Stream())  # before there is a Ray in this process
    check(expected)
    check(expected, arenas=False)
    rayloader.shutdown()
    assert not ray.is_initialized()
    ray.init(num_cpus=4, log_to_driver=False)  # and now a Ray that rayloader joins
    check(expected, ray_remote_args={"num_cpus": 1, "runtime_env": {"env_vars": {"GIVEN": "1"}}})
    ray.shutdown()
    print("smoke passed:", Path(rayloader.__file__).parent, sys.version.split()[0])
