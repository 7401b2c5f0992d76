"""How workers stack tensors: as torch's workers do, but in the worker's arena, or in memory of their own.

Promise: batches are torch's to the letter, strides and errors included, and the user's code cannot tell where they lie.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from rayloader._compat import (
    collate_float_fn,
    collate_int_fn,
    collate_tensor_fn,
    default_collate_fn_map,
    no_torch_function_mode,
)
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.plain import Fresh
from rayloader.transport.raw import NUMPYS, storage_over

FreshTensors = dict[int, Fresh]  # by their `id`


class _Target(threading.local):
    """Where this thread collates.

    Attributes:
        arena: in which large tensors lie.
        fresh: gets the tensors that are made, where nobody else has them before the batch is there; else None.
    """

    arena: ArenaWriter | None = None
    fresh: FreshTensors | None = None


_target = _Target()

# torch's collate map in a process that has just started: torch's own.
_FIRST = dict(default_collate_fn_map)


def collate_into(arena: ArenaWriter | None, collate_fn: Any = None) -> FreshTensors:
    """From here on what this thread stacks lies in slots of the arena, if it is worth one.

    Returns:
        What gets the tensors that only this module and torch have had, where `collate_fn` is all that is called. It
        keeps them.
    """
    fresh: FreshTensors = {}
    # With functions of the user's in the map, a tensor may be the user's before the batch is there.
    _target.fresh = fresh if collate_fn is default_collate and default_collate_fn_map == _OURS else None
    _target.arena = arena
    return fresh


def adopt_collate_fn_map(drivers: dict[Any, Any]) -> None:
    """In a worker: makes torch's collate map the driver's, as after a fork; tensors are stacked by `stack`.

    What modules have added while this worker imported them stays, behind the driver's entries: the order matters.
    """
    known = _FIRST.keys() | drivers.keys()
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
    dtype = NUMPYS.get(elem.dtype) if type(elem) is torch.Tensor else None
    if dtype is not None and nbytes and (arena is None or nbytes <= arena.small):
        try:
            array = np.empty((len(batch), *elem.shape), dtype)
            return _stacked(batch, torch.from_numpy(array), array.reshape(-1).view(np.uint8))
        except Exception:  # unlike samples, or too many dimensions: it is raised below, where all is in torch's order
            pass
    nbytes = sum(tensor.numel() for tensor in batch) * elem.element_size()
    room = arena.allocate(nbytes) if arena is not None and nbytes > arena.small else None
    memory: Any = np.empty(nbytes, np.uint8) if room is None else room
    raw = torch.from_numpy(memory).untyped_storage() if room is None else storage_over(room)
    storage = torch.TypedStorage(wrap_storage=raw, dtype=elem.dtype, _internal=True)
    out = elem.new(storage).resize_(len(batch), *elem.size())
    return _stacked(batch, out, memory if dtype is not None and nbytes else None)


def _stacked(batch: Any, out: torch.Tensor, memory: Any) -> torch.Tensor:
    """The batch, stacked into `out`, whose bytes `memory` is; None: it is not plain."""
    stacked = torch.stack(batch, 0, out=out)
    if memory is not None and stacked is out:  # else a sample's class has made something else
        _note(out, memory)
    return stacked


def whole_numbers(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """A batch of ints, as torch's collate makes it; in a third of the time where it is to be sent as it is."""
    return _numbers(batch, int, np.int64, collate_int_fn, collate_fn_map)


def floats(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """The same of floats."""
    return _numbers(batch, float, np.float64, collate_float_fn, collate_fn_map)


def _numbers(batch: Any, kind: type, dtype: Any, torchs: Any, collate_fn_map: Any) -> torch.Tensor:
    # Whoever else gets the tensor may resize it, which torch's allows. And a mode may have it made on another device.
    if _target.fresh is not None and set(map(type, batch)) == {kind} and no_torch_function_mode():
        try:
            array = np.array(batch, dtype)
        except OverflowError:  # torch has an error of its own
            pass
        else:
            numbers = torch.from_numpy(array)
            _note(numbers, array.view(np.uint8))
            return numbers
    return torchs(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _note(tensor: torch.Tensor, memory: Any) -> None:
    """It is fresh, if this thread's tensors are; its bytes are `memory`."""
    if _target.fresh is not None:
        _target.fresh[id(tensor)] = Fresh(tensor, memoryview(memory))


# In place of torch's functions.
_INSTEAD = {collate_tensor_fn: stack, collate_int_fn: whole_numbers, collate_float_fn: floats}
_OURS = {key: _INSTEAD.get(function, function) for key, function in _FIRST.items()}


# NOTE [no shared memory in collate]
# In a worker torch's default_collate stacks into fresh shared memory, ten times slower than a plain stack, and of no
# use here: batches do not travel in torch's shared memory. So the map has `stack` in place of torch's function. It does
# the same in the arena, or in the worker's own memory, whoever calls default_collate. The same to the letter: stacking
# into a given tensor makes the batch contiguous whatever the samples' strides are, and that its storage cannot grow
# decides which error samples of different shapes end in. Torch's workers too share with the trainer what
# default_collate made.
