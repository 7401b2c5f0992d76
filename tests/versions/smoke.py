"""What must work with every combination of versions: the batches of torch's loader, whatever happens to the workers.

`test_versions.py` runs this in an environment of its own, where rayloader comes from its wheel.
"""

import importlib.metadata
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import rayloader

OPTIONS = {"batch_size": 4, "num_workers": 2}
FORKED = {**OPTIONS, "multiprocessing_context": "fork"}  # not the default of each Python


class Noisy(Dataset):
    """Random augmentation; memory of all kinds that is shared between workers; the death of a process, once."""

    def __init__(self, deadly=None):
        self.images = np.arange(48 * 3000, dtype=np.float32).reshape(48, 3000)  # batches too large to travel inline
        self.table = pa.table({"label": list(range(48))})
        self.names = rayloader.SharedList([f"image {i}" for i in range(48)])
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
            "name": self.names[index],
        }


class Stream(IterableDataset):
    """A part of the numbers for each worker, each with noise."""

    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id, 31, info.num_workers):
            yield number, torch.rand(5)


def check_equal(got, expected):
    """Batches of the same type and content, to the last bit."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        check_equal(list(got.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_equal(one, other)
    else:
        assert got == expected


def epochs(loader, number=2):
    """The batches of some epochs, from the same seed each time."""
    torch.manual_seed(7)
    return [list(loader) for _ in range(number)]


def check(expected, **options):
    """Whether a loader with these options gives what torch's gives."""
    check_equal(epochs(rayloader.DataLoader(Noisy(), shuffle=True, **OPTIONS, **options)), expected["map"])
    check_equal(epochs(rayloader.DataLoader(Stream(), **OPTIONS, **options)), expected["stream"])
    with tempfile.TemporaryDirectory() as folder:
        deadly = Path(folder, "deadly")
        deadly.touch()
        check_equal(epochs(rayloader.DataLoader(Noisy(deadly), shuffle=True, **OPTIONS, **options)), expected["map"])
        assert not deadly.exists()  # a worker did die
    for dataset, kind in (Noisy(), "map"), (Stream(), "stream"):
        torch.manual_seed(7)
        loader = rayloader.DataLoader(dataset, shuffle=kind == "map" or None, **OPTIONS, **options)
        batches = iter(loader)
        taken = [next(batches) for _ in range(3)]
        state = loader.state_dict()
        loader = rayloader.DataLoader(
            dataset, shuffle=kind == "map" or None, **{**OPTIONS, "num_workers": 1}, **options
        )
        loader.load_state_dict(state)
        check_equal(taken + list(loader), expected[kind][0])


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)  # by ray.init() of Ray 2.52
    warnings.filterwarnings("ignore", "This DataLoader will create")
    warnings.filterwarnings("ignore", category=ResourceWarning)  # of older versions of Ray
    print(
        *(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "ray", "numpy", "pyarrow", "cloudpickle"))
    )
    expected = {  # from torch's workers, before there is a Ray in this process
        "map": epochs(TorchDataLoader(Noisy(), shuffle=True, **FORKED)),
        "stream": epochs(TorchDataLoader(Stream(), **FORKED)),
    }
    check(expected)
    check(expected, arenas=False)
    rayloader.shutdown()
    assert not ray.is_initialized()
    ray.init(num_cpus=4, log_to_driver=False)  # and now a Ray that rayloader joins
    check(expected, ray_remote_args={"num_cpus": 1, "runtime_env": {"env_vars": {"GIVEN": "1"}}})
    ray.shutdown()
    print("smoke passed:", Path(rayloader.__file__).parent, sys.version.split()[0])
