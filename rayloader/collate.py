"""How workers stack tensors: as torch's workers do, but in memory of their own, or straight into the call's slot.

Promise: batches are torch's to the letter, strides and errors included, and the user's code cannot tell where they lie.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from rayloader.transport.arena import SlotWriter

_dtype_of = operator.attrgetter("dtype")

CollateMap = dict[Any, Callable[..., Any]]


def changed_collate_fn_map() -> dict[Any, Any]:
    """The entries that the user added to torch's collate map: a forked worker would have them."""
    return {key: function for key, function in default_collate_fn_map.items() if not _is_stock(function)}


def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stacks as torch's collate does in workers, step by step; see NOTE [no shared memory in collate]."""
    elem = batch[0]
    if elem.is_nested or elem.layout is not torch.strided:
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return] # refuses
    nbytes = sum(tensor.numel() for tensor in batch) * elem.element_size()
    memory = torch.from_numpy(np.empty(nbytes, np.uint8)).untyped_storage()
    storage = torch.TypedStorage(wrap_storage=memory, dtype=elem.dtype, _internal=True)
    out = elem.new(storage).resize_(len(batch), *elem.size())
    return torch.stack(batch, 0, out=out)


# NOTE [no shared memory in collate]
# In a worker torch's default_collate stacks into fresh shared memory, ten times slower than a plain stack, and of no
# use here: batches do not travel in torch's shared memory. So the map's tensor entry does the same in the worker's own
# memory. The same to the letter: stacking into a given tensor makes the batch contiguous whatever the samples' strides
# are, and that its storage cannot grow decides which error samples of different shapes end in.


def collate_into(writer: SlotWriter, collate_fn_map: CollateMap) -> CollateMap:
    """A copy of torch's `default_collate_fn_map` for `collate()` that stacks tensors into a slot.

    Only where the result is the same, strides included: dense CPU tensors of one shape and dtype, no subclasses, no
    grad, not channels-last, and room in the slot. In all other cases the given map's entry does it. The user's own
    entries are called with the given map, for they may keep what it makes; a tensor entry of the user's stays as it is.
    """
    entry = collate_fn_map.get(Tensor)
    if entry is None or not _is_stock(entry):
        return dict(collate_fn_map)

    def stack_tensors(batch: Sequence[Any], *, collate_fn_map: CollateMap | None = None) -> Any:
        stacked = _stack_into(writer, batch)
        return entry(batch, collate_fn_map=collate_fn_map) if stacked is None else stacked

    def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda batch, **_: function(batch, collate_fn_map=collate_fn_map)

    stacking = {key: fn if _is_stock(fn) else unchanged(fn) for key, fn in collate_fn_map.items()}
    stacking[Tensor] = stack_tensors
    return stacking


def _is_stock(function: Callable[..., Any]) -> bool:
    """Whether an entry of the collate map is torch's or ours, not the user's."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith(("torch.utils.data._utils.", "rayloader."))


def _stack_into(writer: SlotWriter, batch: Sequence[Any]) -> Tensor | None:
    # Runs for each field of each batch: what torch.stack refuses by itself when there is an `out`, such as unequal
    # shapes, other devices and layouts, requires_grad, is not looked for in every element.
    if set(map(type, batch)) != {Tensor} or len(set(map(_dtype_of, batch))) != 1:
        return None
    first = batch[0]
    if first.is_nested or first.is_quantized or not first.is_cpu or first.layout is not torch.strided:
        return None
    if first.dim() > 3 and not all(tensor.is_contiguous() for tensor in batch):
        return None  # torch.stack would keep channels-last, and decides that by the elements
    out = writer.empty((len(batch), *first.shape), first.dtype)
    if out is None:
        return None
    try:
        return torch.stack(batch, 0, out=out)  # type: ignore[arg-type] # any sequence will do
    except RuntimeError:
        return None  # without `out` it works, or raises what the user is to see
