"""Whole batches of torch's own datasets: each tensor is selected from once, instead of once for every sample.

Promise: a batch is what `default_collate` makes of the samples, bit for bit, or None: then the samples are asked for
one by one. Only datasets whose class is exactly torch's, over plain tensors, are known; whatever could differ, or would
raise an error, goes the usual way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from rayloader.host.collate import new_batch
from rayloader.transport.raw import NUMPYS

_FILE = sys.modules[Dataset.__module__].__file__
# With fewer samples than that, looking at the dataset costs more than asking it for each (measured: 16 to 32).
FEWEST = 32
_Places = np.ndarray[Any, np.dtype[np.int64]]


class _Part(NamedTuple):
    """Rows of one tensor, and where in the batch they go; None: they are all of it, in order."""

    tensor: torch.Tensor
    rows: _Places
    places: _Places | None = None


class _NotWhole(Exception):
    """The samples must be asked for one by one."""


def whole_batch(dataset: Any, indices: Any) -> Any:
    """The collated samples; None if they must be asked for one by one, or are few.

    Args:
        dataset: any.
        indices: of a batch, as the sampler gave them.
    """
    if type(indices) is not list or len(indices) < FEWEST or set(map(type, indices)) != {int}:
        return None
    if not _IS_TORCHS or any(getattr(kind, name, None) is not method for kind, name, method in _METHODS):
        return None
    try:
        return _filled(_select(dataset, np.array(indices, np.int64)), len(indices))
    except (_NotWhole, OverflowError):
        return None


def _select(dataset: Any, rows: _Places) -> Any:
    """Lists of the parts of each tensor of the batch, in the batch's structure."""
    select = _SELECTS.get(type(dataset))
    if select is None or "__getitems__" in getattr(dataset, "__dict__", {}):
        raise _NotWhole
    return select(dataset, rows)


def _of_tensor(tensor: Any, rows: _Places) -> list[_Part]:
    is_plain = type(tensor) is torch.Tensor and tensor.dtype in NUMPYS and tensor.layout is torch.strided
    if not is_plain or not tensor.is_cpu or tensor.requires_grad or tensor.is_nested or not tensor.dim():
        raise _NotWhole
    if rows.min() < 0 or rows.max() >= len(tensor):
        raise _NotWhole
    return [_Part(tensor, rows)]


def _of_tensors(dataset: TensorDataset, rows: _Places) -> Any:
    return tuple(_of_tensor(tensor, rows) for tensor in dataset.tensors)


def _of_stack(dataset: StackDataset[Any], rows: _Places) -> Any:
    parts = dataset.datasets
    if type(parts) is dict:
        return {name: _select(part, rows) for name, part in parts.items()}
    return tuple(_select(part, rows) for part in parts)


def _of_subset(dataset: Subset[Any], rows: _Places) -> Any:
    chosen: Any = dataset.indices
    if type(chosen) is torch.Tensor and chosen.dtype is torch.int64 and chosen.is_cpu:
        chosen = chosen.numpy()
    is_array = type(chosen) is np.ndarray and chosen.dtype == np.int64 and chosen.ndim == 1
    if not is_array and type(chosen) not in (list, tuple, range):  # first: others need have no length
        raise _NotWhole
    if rows.min() < 0 or rows.max() >= len(chosen):
        raise _NotWhole
    if is_array:
        return _select(dataset.dataset, chosen[rows])
    found = [chosen[row] for row in rows.tolist()]
    if set(map(type, found)) != {int}:
        raise _NotWhole
    return _select(dataset.dataset, np.array(found, np.int64))


def _of_concatenation(dataset: ConcatDataset[Any], rows: _Places) -> Any:
    ends = np.array(dataset.cumulative_sizes, np.int64)
    if rows.min() < 0 or rows.max() >= ends[-1]:
        raise _NotWhole
    owners = np.searchsorted(ends, rows, side="right")
    parts = []
    for owner in np.unique(owners).tolist():
        places = np.flatnonzero(owners == owner)
        before = dataset.cumulative_sizes[owner - 1] if owner else 0
        parts.append(_at(_select(dataset.datasets[owner], rows[places] - before), places))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _at(selected: Any, places: _Places) -> Any:
    """The same, at these places of the batch."""
    if type(selected) is list:
        return [part._replace(places=places if part.places is None else places[part.places]) for part in selected]
    if type(selected) is dict:
        return {name: _at(part, places) for name, part in selected.items()}
    return tuple(_at(part, places) for part in selected)


def _joined(selections: Sequence[Any]) -> Any:
    """The parts of several selections, if they are alike."""
    first = selections[0]
    if len({(type(one), type(one) is list or len(one)) for one in selections}) > 1:
        raise _NotWhole
    if type(first) is list:
        parts = [part for selected in selections for part in selected]
        if len({(part.tensor.dtype, part.tensor.shape[1:]) for part in parts}) > 1:
            raise _NotWhole
        return parts
    if type(first) is dict:
        if any(list(one) != list(first) for one in selections):
            raise _NotWhole
        return {name: _joined([one[name] for one in selections]) for name in first}
    return tuple(_joined(parts) for parts in zip(*selections, strict=True))


def _filled(selected: Any, count: int) -> Any:
    """The batch, as `default_collate` puts it together."""
    if type(selected) is dict:
        return {name: _filled(part, count) for name, part in selected.items()}
    if type(selected) is tuple:
        return [_filled(part, count) for part in selected]
    batch = new_batch(selected[0].tensor, count)
    for tensor, rows, places in selected:
        if places is None:
            torch.index_select(tensor, 0, torch.from_numpy(rows), out=batch)
        else:
            batch.index_copy_(0, torch.from_numpy(places), torch.index_select(tensor, 0, torch.from_numpy(rows)))
    return batch


_SELECTS: dict[type, Any] = {
    torch.Tensor: _of_tensor,
    TensorDataset: _of_tensors,
    StackDataset: _of_stack,
    Subset: _of_subset,
    ConcatDataset: _of_concatenation,
}
# What a program may have replaced, or added, by what torch has: another file's function is not torch's.
_METHODS = [
    (kind, name, getattr(kind, name, None))
    for kind in (TensorDataset, StackDataset, Subset, ConcatDataset)
    for name in ("__getitem__", "__getitems__")
]
_IS_TORCHS = all(
    method is None or getattr(getattr(method, "__code__", None), "co_filename", None) == _FILE
    for _, _, method in _METHODS
)
