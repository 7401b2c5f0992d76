"""Creates tensors and arrays over a skeleton's buffers: the functions that skeletons name. No state.

A span arrives as (storage, the byte of the original storage at which it starts).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rayloader._compat import no_torch_function, rebuild_from_type
from rayloader.transport.raw import DTYPES


def make_tensor(span: Any, name: str, offset: int, size: Any, stride: Any, grad: bool, kind: Any = Tensor) -> Tensor:
    """Creates a view of a span."""
    dtype = DTYPES[name]
    storage, start = span or (torch.UntypedStorage(0), 0)
    tensor = torch.empty(0, dtype=dtype, device="cpu")  # the user may have set another default device
    tensor.set_(storage, offset - start // dtype.itemsize, size, stride)
    if kind is not Tensor:
        tensor = tensor.as_subclass(kind)
    if grad:
        with no_torch_function():
            tensor.requires_grad_()
    return tensor


def itself(obj: Any) -> Any:
    """Returns an object that was carried besides the skeleton."""
    return obj


def set_state(tensor: Tensor, state: object) -> None:
    """Gives a tensor its attributes."""
    rebuild_from_type(lambda: tensor, type(tensor), (), state)


def make_sparse(layout: torch.layout, parts: tuple[Any, ...], grad: bool) -> Tensor:
    """Creates a sparse tensor from others."""
    # Not torch's own function, which also appends the tensor to a list that only torch.load empties.
    if layout is torch.sparse_coo:
        *data, coalesced = parts
        tensor = torch.sparse_coo_tensor(*data, check_invariants=False, is_coalesced=coalesced)
    else:
        tensor = torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)
    return tensor.requires_grad_(grad)


def make_array(
    buffer: Any,
    shape: tuple[int, ...],
    dtype: Any,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    order: Literal["C", "F"] = "C",
    writable: bool = True,
    kind: type[np.ndarray[Any, Any]] = np.ndarray,
) -> Any:
    """Creates a view of a buffer."""
    array = np.ndarray.__new__(kind, shape, dtype, buffer, offset, strides, order)
    if not writable:
        array.flags.writeable = False
    return array


def set_array(array: np.ndarray[Any, Any], state: tuple[Any, tuple[dict[str, Any], ...], bool]) -> None:
    """Gives an array of objects its content, and one of a subclass its attributes."""
    content, attributes, writable = state
    if content is not None:
        np.ndarray.__setstate__(array, content)
    if attributes:
        own, slots = attributes
        if hasattr(array, "__dict__"):
            vars(array).clear()  # set by `__array_finalize__`
            vars(array).update(own)
        for name, value in slots.items():
            object.__setattr__(array, name, value)
    if not writable:
        array.flags.writeable = False


def set_attributes(obj: Any, state: Any) -> None:
    """Gives an object its attributes, as unpickling does, but does not ask the object how."""
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        setattr(obj, name, value)
