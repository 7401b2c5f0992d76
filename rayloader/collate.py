"""How workers stack tensors: as torch's workers do, but in the worker's arena, or in memory of their own.

Promise: batches are torch's to the letter, strides and errors included, and the user's code cannot tell where they lie.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from rayloader._compat import collate_tensor_fn, default_collate_fn_map
from rayloader.transport.arena import ArenaWriter
from rayloader.transport.raw import NAMES, NUMPYS, storage_over


class _Target(threading.local):
    """Where this thread stacks."""

    arena: ArenaWriter | None = None


_target = _Target()

# Of torch's collate map in a process that has just started: torch's own.
_FIRST_KEYS = frozenset(default_collate_fn_map)


def stack_into(arena: ArenaWriter | None) -> None:
    """From here on what this thread stacks lies in slots of the arena, if it is worth one."""
    _target.arena = arena


def adopt_collate_fn_map(drivers: dict[Any, Any]) -> None:
    """In a worker: makes torch's collate map the driver's, as after a fork; tensors are stacked by `stack`.

    What modules have added while this worker imported them stays, behind the driver's entries: the order matters.
    """
    known = _FIRST_KEYS | drivers.keys()
    added = {key: function for key, function in default_collate_fn_map.items() if key not in known}
    default_collate_fn_map.clear()
    for key, function in {**drivers, **added}.items():
        default_collate_fn_map[key] = stack if function is collate_tensor_fn else function


def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stacks as torch's collate does in workers, step by step; see NOTE [no shared memory in collate]."""
    elem = batch[0]
    if elem.is_nested or elem.layout is not torch.strided or not elem.is_cpu or elem.is_neg():
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    arena = _target.arena
    nbytes = elem.nbytes * len(batch)
    if type(elem) is torch.Tensor and elem.dtype in NUMPYS and nbytes and (arena is None or nbytes <= arena.small):
        try:
            out = torch.from_numpy(np.empty((len(batch), *elem.shape), NAMES[elem.dtype]))
            return torch.stack(batch, 0, out=out)
        except Exception:  # unlike samples, or too many dimensions: it is raised below, where all is in torch's order
            pass
    nbytes = sum(tensor.numel() for tensor in batch) * elem.element_size()
    room = arena.allocate(nbytes) if arena is not None and nbytes > arena.small else None
    memory = storage_over(room) if room is not None else torch.from_numpy(np.empty(nbytes, np.uint8)).untyped_storage()
    storage = torch.TypedStorage(wrap_storage=memory, dtype=elem.dtype, _internal=True)
    out = elem.new(storage).resize_(len(batch), *elem.size())
    return torch.stack(batch, 0, out=out)


# NOTE [no shared memory in collate]
# In a worker torch's default_collate stacks into fresh shared memory, ten times slower than a plain stack, and of no
# use here: batches do not travel in torch's shared memory. So the map has `stack` in place of torch's function. It does
# the same in the arena, or in the worker's own memory, whoever calls default_collate. The same to the letter: stacking
# into a given tensor makes the batch contiguous whatever the samples' strides are, and that its storage cannot grow
# decides which error samples of different shapes end in. Torch's workers too share with the trainer what
# default_collate made.
