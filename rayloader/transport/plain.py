"""Plain batches: a dense contiguous tensor, or a tuple, list or dict of some, each with a storage of its own.

Most batches are like that, and like the batch before. Pickling them costs more than all the rest of their transport, so
their skeleton only describes the parts, and both ends remember the skeletons that they met last.

Promise: `encode` accepts only what `decode` recreates exactly, storages included. No state besides the caches.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayloader.transport.raw import DTYPES, NAMES, NUMPYS, array_tensor_over, flat_bytes, memory, tensor_over

if TYPE_CHECKING:
    from typing_extensions import Buffer

MARK = 0  # first byte of the skeleton; a pickle begins with another one
_KINDS: tuple[type, ...] = (Tensor, tuple, list, dict)
_CACHED = 64  # skeletons
_MOST_DIMENSIONS = 32  # of a NumPy array, in any version

_Spec = tuple[str, tuple[int, ...], tuple[int, ...], int]  # of a tensor: dtype's name, size, stride, bytes


class Fresh(NamedTuple):
    """A tensor that only the collate function has had, which made it plain, contiguous and in memory of its own."""

    tensor: Tensor
    memory: memoryview  # its bytes, flat


NOT_FRESH: Mapping[int, Fresh] = MappingProxyType({})


def encode(obj: Any, fresh: Mapping[int, Fresh] = NOT_FRESH) -> tuple[bytes, list[memoryview]] | None:
    """Skeleton and buffers; None if `obj` is not a plain batch. `fresh` tensors, by their `id`, are not inspected."""
    kind = type(obj)
    names: tuple[str, ...] = ()
    if kind is Tensor:
        tensors: tuple[Any, ...] = (obj,)
    elif kind is dict:
        names, tensors = tuple(obj), tuple(obj.values())
        if set(map(type, names)) != {str}:
            return None
    elif kind is tuple or kind is list:
        tensors = tuple(obj)
    else:
        return None
    if set(map(type, tensors)) != {Tensor}:
        return None
    specs: list[_Spec] = []
    buffers = []
    addresses = set()  # of the storages
    for tensor in tensors:
        dtype = tensor.dtype
        if (made := fresh.get(id(tensor))) is not None:
            buffers.append(made.memory)
            specs.append((NAMES[dtype], tensor.shape, tensor.stride(), made.memory.nbytes))
            addresses.add(tensor.data_ptr())
            continue
        if dtype not in NAMES or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if not tensor.is_contiguous() or tensor.requires_grad or tensor.__dict__ or tensor.is_neg() or tensor.is_conj():
            return None
        storage, nbytes = tensor.untyped_storage(), tensor.nbytes
        if not nbytes or storage.nbytes() != nbytes or tensor.storage_offset():
            return None
        specs.append((NAMES[dtype], tensor.shape, tensor.stride(), nbytes))
        address = storage.data_ptr()
        buffers.append(memoryview(memory(address, nbytes, storage)))
        addresses.add(address)
    return (_skeleton(_KINDS.index(kind), names, tuple(specs)), buffers) if len(addresses) == len(tensors) else None


def decode(skeleton: bytes, buffers: Sequence[Buffer]) -> Any:
    """As `codec.decode`."""
    kind, names, parts = _parts(skeleton)
    if len(buffers) != len(parts):
        raise ValueError(f"decode needs the skeleton's {len(parts)} buffers, got {len(buffers)}")
    tensors: list[Tensor] = []
    for buffer, (nbytes, array, dtype, size, stride) in zip(buffers, parts, strict=True):
        view = flat_bytes(buffer, nbytes, len(tensors))
        if array is None or view.readonly:
            tensors.append(tensor_over(view, dtype, size, stride))
        else:
            tensors.append(array_tensor_over(view, array, size))
    if kind is Tensor:
        return tensors[0]
    return dict(zip(names, tensors, strict=True)) if kind is dict else kind(tensors)


@functools.lru_cache(_CACHED)
def _skeleton(kind: int, names: tuple[str, ...], specs: tuple[_Spec, ...]) -> bytes:
    plain = tuple((dtype, tuple(size), *others) for dtype, size, *others in specs)
    return bytes([MARK]) + pickle.dumps((kind, names, plain), pickle.HIGHEST_PROTOCOL)


class _Part(NamedTuple):
    """How to create a tensor."""

    nbytes: int
    array: np.dtype[Any] | None  # if an array of this type has exactly its strides
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@functools.lru_cache(_CACHED)
def _parts(skeleton: bytes) -> tuple[type, tuple[str, ...], tuple[_Part, ...]]:
    kind, names, specs = pickle.loads(memoryview(skeleton)[1:])
    return _KINDS[kind], names, tuple(_part(*spec) for spec in specs)


def _part(name: str, size: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> _Part:
    dtype = DTYPES[name]
    steps = [math.prod(size[axis + 1 :]) for axis in range(len(size))]  # of a new array
    as_array = list(stride) == steps and len(size) <= _MOST_DIMENSIONS
    return _Part(nbytes, NUMPYS.get(dtype) if as_array else None, dtype, size, stride)
