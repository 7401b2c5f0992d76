"""How workers make tensors of samples: as torch's workers do, but in the worker's arena, or in memory of their own.

Promise: batches equal torch's exactly, strides and errors included, and the user's code cannot tell where they lie. Of
some datasets of torch's own, whole batches are selected from their tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset, default_collate

from rayloader._compat import (
    collate_float_fn,
    collate_int_fn,
    collate_tensor_fn,
    default_collate_fn_map,
    dispatch_modes,
    function_modes,
    torch_tensor,
    typed_storage,
)
from rayloader.fetching import collates
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.codec import Fresh
from rayloader.transport.raw import NUMPYS, storage_over

FreshTensors = dict[int, Fresh]  # by their `id`


class _Target(threading.local):
    """Where this thread collates.

    Attributes:
        arena: memory for large tensors.
        fresh: collects the tensors that are made, if no code of the user's runs before the batch is finished; else
            None.
    """

    arena: ArenaWriter | None = None
    fresh: FreshTensors | None = None


_target = _Target()

# torch's own entries of its collate map. The program has perhaps changed that before this module is imported.
_FIRST = {key: f for key, f in default_collate_fn_map.items() if f.__module__ == collate_tensor_fn.__module__}
_adopted: set[Any] = set()  # keys of the driver's map, as it was last adopted in this process
# Types of samples, or of items in a tuple, list or dict that is one, whose collating runs no code of the user's.
_LEAVES = {torch.Tensor, int, float, bool, str, bytes, np.ndarray}
_LEAVES |= {kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)}

_FILE = sys.modules[Dataset.__module__].__file__
# With fewer samples than that, looking at the dataset costs more than asking it for each (measured: 16 to 32).
FEWEST = 32
_Rows = np.ndarray[Any, np.dtype[np.int64]]


def collate_into(arena: ArenaWriter | None, *, alone: bool = False) -> FreshTensors:
    """From here on, tensors that this thread stacks lie in slots of the arena, if they are large enough.

    Args:
        arena: None: memory of the worker's own.
        alone: until the next call, no code of the user's runs.

    Returns:
        A collection of the tensors made meanwhile, which keeps them, if only torch and this module refer to them.
    """
    fresh: FreshTensors = {}
    _target.fresh = fresh if alone else None
    _target.arena = arena
    return fresh


def is_torchs(collate_fn: Any) -> bool:
    """Whether it is `default_collate`, and that runs no function of the user's for torch's own types.

    No mode, such as that of a default device, and no patch affects it.
    """
    if collate_fn is not default_collate or default_collate_fn_map != collates or torch.tensor is not torch_tensor:
        return False
    return not function_modes() and not dispatch_modes()


def are_torchs(samples: Any) -> bool:
    """Whether `default_collate`, if it `is_torchs`, runs no code of the user's for these samples.

    The types of the first sample's parts decide which functions are called, and those check the types of all.
    """
    if type(samples) is not list or not samples:
        return False
    first = samples[0]
    kind = type(first)
    if kind in (tuple, list, dict):
        parts = first.values() if kind is dict else first
        return _LEAVES.issuperset(map(type, parts)) and set(map(type, samples)) == {kind}
    return kind in _LEAVES


def adopt_collate_fn_map(drivers: dict[Any, Any]) -> None:
    """In a worker: makes torch's collate map the driver's, with our versions of some functions.

    Entries that modules have added while this worker imported them stay, after the driver's entries: the order matters.
    """
    global _adopted
    known, _adopted = _FIRST.keys() | drivers.keys() | _adopted, set(drivers)  # the driver may have removed some since
    added = {key: function for key, function in default_collate_fn_map.items() if key not in known}
    default_collate_fn_map.clear()
    for key, function in {**drivers, **added}.items():
        default_collate_fn_map[key] = _INSTEAD.get(function, function)


def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stacks as torch's collate does in workers, step by step; see NOTE [no shared memory in collate]."""
    elem = batch[0]
    if elem.is_nested or elem.layout is not torch.strided or not elem.is_cpu or elem.is_neg():
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    arena = _target.arena
    nbytes = elem.nbytes * len(batch)
    dtype = NUMPYS.get(elem.dtype) if set(map(type, batch)) == {torch.Tensor} else None
    if dtype is not None and nbytes and (arena is None or nbytes <= arena.small):
        try:
            array = np.empty((len(batch), *elem.shape), dtype)
            return _stacked(batch, torch.from_numpy(array), array.reshape(-1).view(np.uint8))
        except Exception as error:
            if not _is_from(error, stack, _stacked):
                raise  # from a signal handler
            # Unequal samples, or too many dimensions: the error is raised below, where everything is in torch's order.
    nbytes = sum(tensor.numel() for tensor in batch) * elem.element_size()
    out, memory = _new(elem, nbytes, (len(batch), *elem.size()))
    return _stacked(batch, out, memory if dtype is not None and nbytes else None)


def _new(like: torch.Tensor, nbytes: int, size: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    """A tensor of this size, and the bytes of its storage, which cannot grow: in the arena, if there is room."""
    arena = _target.arena
    room = arena.allocate(nbytes) if arena is not None and nbytes > arena.small else None
    memory: Any = np.empty(nbytes, np.uint8) if room is None else room
    raw = torch.from_numpy(memory).untyped_storage() if room is None else storage_over(room)
    return like.new(typed_storage(wrap_storage=raw, dtype=like.dtype)).resize_(size), memory


def _stacked(batch: Any, out: torch.Tensor, memory: Any) -> torch.Tensor:
    """The batch, stacked into `out`, whose bytes are `memory`; None: it is not plain."""
    stacked = torch.stack(batch, 0, out=out)
    if memory is not None:
        _note(out, memory)
    return stacked


def _is_from(error: BaseException, *functions: Any) -> bool:
    """Whether it was raised by one of these functions of this module, or in C code that they call."""
    raised = error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    return raised is not None and raised.tb_frame.f_code in [function.__code__ for function in functions]


def _numbers(kind: type, dtype: Any, torchs: Any, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """A batch of numbers, as torch's collate makes it; in a third of the time if it is to be sent unchanged."""
    # Any other code that gets the tensor may resize it, which torch's tensor allows.
    if _target.fresh is not None and type(batch) in (list, tuple) and set(map(type, batch)) == {kind}:
        try:
            array = np.array(batch, dtype)
        except OverflowError:  # torch has its own error for that
            pass
        else:
            numbers = torch.from_numpy(array)
            _note(numbers, array.view(np.uint8))
            return numbers
    return torchs(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _note(tensor: torch.Tensor, memory: Any) -> None:
    """Marks a tensor as fresh, if this thread's tensors are; its bytes are `memory`."""
    if _target.fresh is not None:
        _target.fresh[id(tensor)] = Fresh(tensor, memoryview(memory))


# Replacements of torch's functions.
whole_numbers = functools.partial(_numbers, int, np.int64, collate_int_fn)
floats = functools.partial(_numbers, float, np.float64, collate_float_fn)
_INSTEAD: dict[Any, Any] = {collate_tensor_fn: stack, collate_int_fn: whole_numbers, collate_float_fn: floats}
collates.update({key: _INSTEAD.get(function, function) for key, function in _FIRST.items()})


# ---- whole batches of torch's own datasets: one selection from each tensor, instead of one for every sample


class _Part(NamedTuple):
    """Rows of a tensor."""

    tensor: torch.Tensor
    rows: _Rows


class _NotWhole(Exception):
    """The samples must be asked for one by one."""


def takes_whole_batches(dataset: Any) -> bool:
    """Whether `whole_batch` may give some."""
    return type(dataset) in _SELECTS


def whole_batch(dataset: Any, indices: Any) -> Any:
    """What `default_collate` makes of the samples, bit for bit; None if they must be asked for one by one, or are few.

    Only datasets whose class is exactly torch's, over plain tensors, are known; whatever could differ, or would raise
    an error, goes the usual way.

    Args:
        dataset: any.
        indices: of a batch, as the sampler gave them.
    """
    if type(indices) is not list or len(indices) < FEWEST or set(map(type, indices)) != {int}:
        return None
    if not _IS_TORCHS or any(getattr(kind, name, None) is not method for kind, name, method in _METHODS):
        return None
    try:
        return _filled(_select(dataset, np.array(indices, np.int64)))
    except (_NotWhole, OverflowError):
        return None


def _select(dataset: Any, rows: _Rows) -> Any:
    """Tensors of the batch's structure, each with the rows of it to take."""
    select = _SELECTS.get(type(dataset))
    if select is None or "__getitems__" in getattr(dataset, "__dict__", {}):
        raise _NotWhole
    return select(dataset, rows)


def _of_tensor(tensor: Any, rows: _Rows) -> _Part:
    is_plain = type(tensor) is torch.Tensor and tensor.dtype in NUMPYS and tensor.layout is torch.strided
    if not is_plain or not tensor.is_cpu or tensor.requires_grad or tensor.is_nested or not tensor.dim():
        raise _NotWhole
    _check(rows, len(tensor))
    return _Part(tensor, rows)


def _check(rows: _Rows, length: int) -> None:
    if rows.min() < 0 or rows.max() >= length:
        raise _NotWhole


def _of_tensors(dataset: TensorDataset, rows: _Rows) -> Any:
    return tuple(_of_tensor(tensor, rows) for tensor in dataset.tensors)


def _of_stack(dataset: StackDataset[Any], rows: _Rows) -> Any:
    parts = dataset.datasets
    if type(parts) is dict:
        return {name: _select(part, rows) for name, part in parts.items()}
    return tuple(_select(part, rows) for part in parts)


def _of_subset(dataset: Subset[Any], rows: _Rows) -> Any:
    chosen: Any = dataset.indices
    if type(chosen) is torch.Tensor and chosen.dtype is torch.int64 and chosen.is_cpu:
        chosen = chosen.numpy()
    is_array = type(chosen) is np.ndarray and chosen.dtype == np.int64 and chosen.ndim == 1
    if not is_array and type(chosen) not in (list, tuple, range):  # first: others need have no length
        raise _NotWhole
    _check(rows, len(chosen))
    if is_array:
        return _select(dataset.dataset, chosen[rows])
    found = [chosen[row] for row in rows.tolist()]
    if set(map(type, found)) != {int}:
        raise _NotWhole
    return _select(dataset.dataset, np.array(found, np.int64))


def _filled(selected: Any) -> Any:
    """The batch, as `default_collate` puts it together."""
    if type(selected) is dict:
        return {name: _filled(part) for name, part in selected.items()}
    if type(selected) is tuple:
        return [_filled(part) for part in selected]
    tensor, rows = selected
    nbytes = len(rows) * tensor[:1].numel() * tensor.element_size()
    out, memory = _new(tensor, nbytes, (len(rows), *tensor.size()[1:]))
    if nbytes:
        _note(out, memory)
    return torch.index_select(tensor, 0, torch.from_numpy(rows), out=out)


_SELECTS: dict[type, Any] = {
    torch.Tensor: _of_tensor,
    TensorDataset: _of_tensors,
    StackDataset: _of_stack,
    Subset: _of_subset,
}
# What a program may have replaced, or added, by what torch has: another file's function is not torch's.
_METHODS = [
    (kind, name, getattr(kind, name, None))
    for kind in (TensorDataset, StackDataset, Subset)
    for name in ("__getitem__", "__getitems__")
]
_IS_TORCHS = all(
    method is None or getattr(getattr(method, "__code__", None), "co_filename", None) == _FILE
    for _, _, method in _METHODS
)


# NOTE [no shared memory in collate]
# In a worker torch's default_collate stacks into fresh shared memory, ten times slower than a plain stack, and useless
# here: batches do not travel in torch's shared memory. So the map has `stack` instead of torch's function. It does
# the same in the arena, or in the worker's own memory, whichever code calls default_collate. Exactly the same: stacking
# into a given tensor makes the batch contiguous whatever the samples' strides are, and the fact that its storage cannot
# grow decides which error samples of different shapes cause. Torch's workers too share default_collate's tensors with
# the trainer.
