"""Loaders of classes that derive from torch's, and what makes torch's iterators itself: stand-ins, and the real ones.

Each case makes a loader; `run` gives its batches.

python subclasses_cases.py OUT NAME...   write to OUT, as JSON, those of torch's iterators
"""

import importlib
import json
import multiprocessing
import random
import warnings

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

from framework_data import Augmented, Numbers, seed, write_results

# ---- stand-ins


class Nodes(DataLoader):
    """As PyG's `NodeLoader`: the workers call a method of the loader, and so do the iterators."""

    def __init__(self, data, **others):
        self.data = data
        super().__init__(range(len(data)), collate_fn=self.collate, **others)

    def collate(self, indices):
        return torch.stack([self.data[index] for index in indices])

    def _get_iterator(self):
        return map(torch.neg, super()._get_iterator())


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader):
    """As timm's `MultiEpochsDataLoader` and Ultralytics' `InfiniteDataLoader`: one iterator for all epochs."""

    def __init__(self, *arguments, **others):
        super().__init__(*arguments, **others)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = None

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)

    def close(self):
        if hasattr(self.iterator, "_workers"):
            self.iterator._shutdown_workers()


class Fake:
    """As fastai's: no loader of torch's, but with all that torch's iterators read."""

    _IterableDataset_len_called, _auto_collation, drop_last, in_order, generator = None, False, False, True, None
    _dataset_kind, prefetch_factor, timeout, persistent_workers = _DatasetKind.Iterable, 2, 0, False
    pin_memory, pin_memory_device, worker_init_fn, multiprocessing_context = False, "", None, multiprocessing
    collate_fn = staticmethod(torch.neg)

    def __init__(self, num_workers):
        self.dataset, self.num_workers = Numbers(), num_workers
        self._index_sampler = range(100)

    def __iter__(self):
        return _MultiProcessingDataLoaderIter(self)


STAND_INS = {
    "nodes": lambda: Nodes(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "endless": lambda: Endless(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "fake": lambda: Fake(2),
}

# ---- the libraries' own


def real(name):
    """A module of a library, which may warn of what it likes as it is imported, and draw random numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(name)
    seed(1)
    return module


def pyg():
    data = real("torch_geometric.data").Data
    edges = torch.tensor([[0, 1], [1, 2]])
    graphs = [data(x=torch.rand(3, 2), edge_index=edges) for _ in range(10)]
    make = real("torch_geometric.loader").DataLoader
    return make(graphs, batch_size=4, shuffle=True, follow_batch=["x"], num_workers=2)


def monai():
    transforms, data = real("monai.transforms"), real("monai.data")
    noise = transforms.Compose([transforms.EnsureTyped("image"), transforms.RandGaussianNoised("image", prob=0.5)])
    images = [{"image": np.random.rand(1, 4, 4)} for _ in range(10)]
    return data.DataLoader(data.CacheDataset(images, noise, progress=False), batch_size=3, shuffle=True, num_workers=2)


REAL = {"torch_geometric": pyg, "monai": monai}
CASES = STAND_INS | REAL


def plain(batch):
    """As JSON has it."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return torch.as_tensor(batch).tolist()
    if hasattr(batch, "to_dict") or isinstance(batch, dict):
        items = batch.items() if isinstance(batch, dict) else batch.to_dict().items()
        return {str(key): plain(value) for key, value in items if isinstance(value, (torch.Tensor, list))}
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def run(name):
    """The batches of two epochs, and what the program draws next."""
    seed(1)
    loader = CASES[name]()
    seed(2)
    found = [[plain(batch) for batch in loader] for _ in range(2)]
    if isinstance(loader, Endless):
        loader.close()
    return json.loads(json.dumps([*found, random.random(), torch.rand(2).tolist()]))


if __name__ == "__main__":
    write_results(run)
