"""What a sample contains, as bytes, to tell that one which is built again is the one that a cache keeps.

Promise: equal samples have equal content, in one process: whichever of their parts are one object, in whatever order
their sets are, wherever in memory their tensors lie. Classes and functions count by their names. No state.
"""

from __future__ import annotations

import hashlib
import io
import types
from typing import Any

import cloudpickle
import torch

from rayloader._compat import no_torch_function
from rayloader.transport.raw import memory

_SETS = set, frozenset


def content_of(sample: Any) -> bytes:
    """The content of a sample that can be pickled."""
    try:
        return _dumped(sample, fast=True)
    except ValueError:  # it contains itself
        return _dumped(sample, fast=False)


def _dumped(sample: Any, fast: bool) -> bytes:
    file = io.BytesIO()
    pickler = _Content(file, protocol=5)
    pickler.fast = fast  # does not record which parts are one object
    pickler.dump(sample)
    return hashlib.sha256(file.getbuffer()).digest()


class _Content(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a sample for its content only."""

    def persistent_id(self, obj: Any) -> Any:
        """Stands for a set."""
        return sorted(map(content_of, obj)) if type(obj) in _SETS else None

    def reducer_override(self, obj: Any) -> Any:
        """How another object is described."""
        if obj is str:  # what descriptions are made of
            return NotImplemented
        if isinstance(obj, (type, types.FunctionType)):
            return str, (f"{obj.__module__}.{obj.__qualname__}",)
        if isinstance(obj, torch.Tensor) and (described := _tensor(obj)):
            return str, (described,), vars(obj) or None
        return super().reducer_override(obj)


def _tensor(tensor: torch.Tensor) -> str:
    """A tensor, also of a class of the user's; empty if it has no plain memory."""
    with no_torch_function():
        plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not plain or tensor.device.type == "meta":
            return ""
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = memory(whole.data_ptr(), whole.nbytes, whole) if whole.nbytes else b""
        kind = type(tensor).__qualname__
        return f"{kind} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
