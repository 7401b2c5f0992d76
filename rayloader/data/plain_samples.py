"""Samples as JSON and raw buffers, for caches that a group shares: whoever wrote them, reading them runs no code.

Promise: what `decode` gives equals what `encode` got, types included; tensors and arrays are contiguous, and those that
shared memory do so no longer. Bytes that are something else are a `CacheError`, or another plain sample. No state.

Tensors, arrays, NumPy's scalars and bytes are buffers, in the order in which they are met. In JSON, a number, a text,
None or a bool is itself, and all else is a list that begins with its kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayloader.errors import CacheError
from rayloader.transport.raw import NAMES, memory, tensor_over

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DTYPES = {name: dtype for dtype, name in NAMES.items()}
_THEMSELVES = {str, int, float, bool, type(None)}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}


def encode(sample: Any) -> tuple[bytes, list[memoryview]]:
    """A sample as JSON and buffers.

    Raises:
        CacheError: it holds something else than tensors, arrays, texts, bytes and numbers, in dicts, lists and tuples.
    """
    buffers: list[memoryview] = []
    return json.dumps(_encoded(sample, buffers)).encode(), buffers


def _encoded(part: Any, buffers: list[memoryview]) -> Any:
    kind = type(part)
    if kind in _THEMSELVES:
        return part
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *(_encoded(item, buffers) for item in part)]
    if kind is dict:
        return ["dict", *([_encoded(key, buffers), _encoded(value, buffers)] for key, value in part.items())]
    if kind is bytes:
        buffers.append(memoryview(part))
        return ["bytes"]
    if kind is torch.Tensor and _is_plain(part):
        whole = part.resolve_conj().resolve_neg().contiguous()
        buffers.append(memoryview(memory(whole.data_ptr(), whole.nbytes, whole) if whole.nbytes else b""))
        return ["tensor", NAMES[part.dtype], list(part.shape)]
    is_scalar = isinstance(part, np.generic) and kind is part.dtype.type
    if (kind is np.ndarray or is_scalar) and not part.dtype.hasobject and np.dtype(part.dtype.str) == part.dtype:
        buffers.append(memoryview(part.tobytes()))
        return ["scalar" if is_scalar else "array", part.dtype.str, list(part.shape)]
    raise CacheError(
        "a cache with shared=True keeps dense tensors without gradient, arrays, texts, bytes and numbers, in dicts, "
        f"lists and tuples, got {kind.__qualname__}; make one of these of it in the dataset, or leave out shared="
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested and tensor.dtype in NAMES
    return dense and not tensor.requires_grad and not tensor.__dict__


def decode(skeleton: Buffer, buffers: Sequence[memoryview]) -> Any:
    """The sample; tensors and arrays are views of the buffers.

    Raises:
        CacheError: these bytes are not from `encode`.
    """
    try:
        return _decoded(json.loads(bytes(skeleton)), iter(buffers))
    except Exception as error:  # whatever JSON, NumPy and torch say of it
        raise CacheError(f"a record of the cache is damaged: {error!r}; delete the cache") from error


def _decoded(part: Any, buffers: Iterator[memoryview]) -> Any:
    if type(part) is not list:
        return part
    match part:
        case ["list", *items]:
            return [_decoded(item, buffers) for item in items]
        case ["tuple", *items]:
            return tuple([_decoded(item, buffers) for item in items])
        case ["dict", *items]:
            return {_decoded(key, buffers): _decoded(value, buffers) for key, value in items}
        case ["bytes"]:
            return bytes(next(buffers))
        case ["tensor", name, shape]:
            view, dtype = next(buffers), _DTYPES[name]
            if not view.nbytes:
                return torch.empty(0, dtype=dtype, device="cpu").reshape(shape)
            return tensor_over(view, torch.uint8, (view.nbytes,), (1,)).view(dtype).reshape(shape)
        case ["array" | "scalar" as kind, dtype, shape]:
            return np.frombuffer(next(buffers), np.dtype(dtype)).reshape(shape)[... if kind == "array" else ()]
    raise TypeError(f"{part!r:.100}")
